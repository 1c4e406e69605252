"""The public names: listed once, each documented, and importing them costs nothing until they are used."""

import inspect
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import graphdispatch
from graphdispatch import engines, errors, plan

from ..helpers import run_python
from .described import ATTRIBUTES, PROPERTIES, SIGNATURES

ROOT = Path(__file__).resolve().parents[2]
SEEDS = sorted({"GraphEntry", *(name.partition(".")[0] for name in (*SIGNATURES, *PROPERTIES, *ATTRIBUTES))})


def python(code: str, *options: str) -> str:
    """What a fresh interpreter prints."""
    return run_python(*options, "-c", code).strip()


def test_the_top_level_is_small() -> None:
    """25 names, which ``dir`` shows; four of them are modules."""
    names = graphdispatch.__all__
    assert len(names) == len(set(names)) == 25
    assert dir(graphdispatch) == sorted(names)
    modules = {name for name in names if isinstance(getattr(graphdispatch, name), ModuleType)}
    assert modules == {"engines", "errors", "metrics", "plan"}


@pytest.mark.parametrize("module", [graphdispatch, engines, errors, plan], ids=lambda module: module.__name__)
def test_names_resolve_and_are_documented(module: ModuleType) -> None:
    """Each is there, and says what it is in words of its own, not in a base's or those made for its class."""
    for name in set(module.__all__) - {"__version__"}:
        value = getattr(module, name)
        assert value.__doc__, name
        assert not value.__doc__.startswith(f"{name}("), name
        assert not inspect.isclass(value) or vars(value).get("__doc__"), name


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_name_resolves_at_the_top(name: str) -> None:
    """It is the one of ``engines``, and is listed there."""
    assert name in engines.__all__
    assert getattr(graphdispatch, name) is getattr(engines, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="module 'graphdispatch' has no attribute 'nothing'"):
        _ = graphdispatch.nothing  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"module 'graphdispatch\.engines' has no attribute 'nothing'"):
        _ = engines.nothing  # type: ignore[attr-defined]


WITHOUT_TORCH = ["cli", "config", "runtime.decide", "engines.policies", "errors", "plan", "sizes", "stats", "testing"]


@pytest.mark.parametrize("module", ["graphdispatch", *(f"graphdispatch.{name}" for name in WITHOUT_TORCH)])
def test_deciding_and_configuring_need_no_torch(module: str) -> None:
    """Importing the package, its vocabulary, configuration, decisions or command line does not load torch."""
    assert python(f"import {module}, sys; print('torch' in sys.modules)") == "False"


COMPANIONS = {"plan", "engines", "metrics", "report", "auditing", "integrations", "demo", "cli", "testing"}
SERVE_AND_LIST_MODULES = """
import sys
import torch
import graphdispatch
layer = torch.nn.Linear(4, 4).eval()
serve = graphdispatch.graphed(
    layer, dynamic={"input": 0}, max_size=4, options=graphdispatch.CUDAGraphOptions(capture_share=None), strict=True
)
for rows in (3, 3, 3, 4):
    serve(torch.randn(rows, 4))
assert serve.stats.hits == 1
print(*sys.modules)
"""


def test_serving_loads_no_companion() -> None:
    """A callable that is captured, compared and replayed loads the core and one backend, and no compiler."""
    names = python(SERVE_AND_LIST_MODULES).split()
    assert "torch._dynamo" not in names  # loading it takes longer than many captures
    loaded = [name.split(".")[1:] for name in names if name.startswith("graphdispatch.")]
    packages = {parts[0] for parts in loaded}
    assert {"runtime", "proof"} <= packages
    assert packages & COMPANIONS == set()
    assert ["backends", "cuda"] not in loaded


def test_importing_gives_no_warning() -> None:
    """Neither the package nor its front ends."""
    code = "import graphdispatch as g; g.CUDAGraphManager, g.CUDAGraphWrapper, g.CudagraphDispatcher, g.Graphed"
    assert python(code, "-W", "error") == ""


def test_the_version_is_the_project_s() -> None:
    """``__version__``, the project file and the newest release of the change log, if there is one, agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    releases = re.findall(r"^## \[?v?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert graphdispatch.__version__ == project
    assert releases[:1] in ([], [project])
