"""The public names: one list in three places, each documented, and importing them costs nothing until they are used."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import graphdispatch

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "src" / "graphdispatch" / "__init__.pyi"
PUBLIC = [name for name in graphdispatch.__all__ if name != "__version__"]


def python(code: str, *options: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_type_checkers_see_the_same_names() -> None:
    """The stub re-exports exactly ``__all__``, and the module ``metrics``."""
    stubbed = set()
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            if node.module is None:
                assert ast.unparse(node) == "from . import metrics as metrics"
                continue
            assert all(alias.asname == alias.name for alias in node.names), ast.unparse(node)
            stubbed |= {alias.name for alias in node.names}
        elif isinstance(node, ast.AnnAssign):
            stubbed.add(ast.unparse(node.target))
    assert stubbed == set(graphdispatch.__all__)


def test_the_stub_imports_from_where_the_names_live() -> None:
    """A name of the stub and the same name at run time are one object's."""
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                assert graphdispatch._HOME_OF[alias.name] == node.module


@pytest.mark.parametrize("name", PUBLIC)
def test_a_name_resolves_and_is_documented(name: str) -> None:
    """It is what its home calls so, not a module, and says what it is."""
    value = graphdispatch.__getattr__(name)
    assert not isinstance(value, ModuleType)
    assert value.__doc__
    # A class without one of its own may show one that was made for it, or its base's.
    assert not value.__doc__.startswith(f"{name}(")
    assert not inspect.isclass(value) or vars(value).get("__doc__")


def test_names_are_listed_once_and_in_order() -> None:
    """``dir`` shows exactly the public names."""
    assert len(set(graphdispatch.__all__)) == len(graphdispatch.__all__)
    assert dir(graphdispatch) == sorted(graphdispatch.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="module 'graphdispatch' has no attribute 'nothing'"):
        _ = graphdispatch.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "module", ["", ".config", ".sizes", ".stats", ".decide.decision", ".decide.policies", ".testing", ".cli"]
)
def test_deciding_and_configuring_need_no_torch(module: str) -> None:
    """Importing the package, its vocabulary, configuration, decisions or command line does not load torch."""
    assert python(f"import graphdispatch{module}, sys; print('torch' in sys.modules)") == "False"


COMPANIONS = (
    "plan",
    "metrics",
    "report",
    "auditing",
    "simulation",
    "calibration",
    "ranks",
    "integrations",
    "demo",
    "cli",
    "testing",
)
SERVE_AND_LIST_MODULES = """
import sys
import torch
import graphdispatch
layer = torch.nn.Linear(4, 4).eval()
serve = graphdispatch.graphed(layer, dynamic={"input": 0}, max_size=4)
for rows in (3, 3, 4, 3):
    serve(torch.randn(rows, 4))
assert serve.stats.hits == 1
print(*(module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "graphdispatch"))
"""


def test_serving_loads_no_companion() -> None:
    """A callable that is captured, compared and replayed loads the rooms of the core and one backend, and no more than
    15,800 lines of the package.

    About a tenth of them see Python state (``state/``); captures need it, so it cannot be left out.
    """
    package = Path(graphdispatch.__file__).parent
    loaded = [Path(file) for file in python(SERVE_AND_LIST_MODULES).split() if file.endswith(".py")]
    rooms = {path.relative_to(package).parts[0] for path in loaded}
    assert "serve" in rooms
    assert rooms & set(COMPANIONS) == set()
    assert not any(path.parent.name == "cuda" for path in loaded)
    assert sum(path.read_text().count("\n") for path in loaded) < 15_800


def test_importing_gives_no_warning() -> None:
    """Neither the package nor its front doors."""
    code = "import graphdispatch as g; g.CUDAGraphManager, g.CUDAGraphWrapper, g.CudagraphDispatcher, g.Graphed"
    assert python(code, "-W", "error") == ""


def test_a_star_import_gives_every_name() -> None:
    """All of them resolve in a fresh interpreter."""
    code = "from graphdispatch import *; import graphdispatch; print(set(graphdispatch.__all__) - set(globals()))"
    assert python(code) == "set()"


def test_the_version_is_the_project_s() -> None:
    """``__version__``, the project file and the newest release of the change log, if there is one, agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    releases = re.findall(r"^## \[?v?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert graphdispatch.__version__ == project
    assert releases[:1] in ([], [project])
