"""State that code reads under names that do not stand in it, and from where it lies out of sight."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.helpers import check_rows, make

FILES = {
    "config": "FACTOR = 2.0\nSCALE_a = 2.0\n",
    "sub/mod": """
        from .. import config
        from . import parent as _
        from .. import aside as _

        KEY = "".join(["sca", "le"])

        class Inner:
            scale = 2.0

        held = Inner()

        def parent(x):
            from ..config import FACTOR
            return x * FACTOR

        def whole(x):
            return x * getattr(config, "_".join(["SCALE", "a"]))

        def get(of, *names, default=1.0):
            for name in names:
                of = getattr(of, name, default)
            return of

        def passed(x):
            return x * get(config, "_".join(["SCALE", "a"]))

        def later(x):
            return x * get(config, "_".join(["SCALE", "b"]))

        class Keeps:
            config, held = config, Inner()

            def get(self, name):
                return getattr(self.held, name)

        keeps = Keeps()

        def kept(x):
            return x * keeps.get(KEY) * vars(keeps.config)["_".join(["SCALE", "a"])]

        def beside(x, of=keeps):
            import user_package.aside
            return x * getattr(of.held, KEY)
    """,
    "aside": "import threading\nlocal = threading.local()\n",
    "sub/parent": "import user_package as held\n",
    "sub/__init__": "",
    "__init__": "from . import config\n",
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package of the user's: ``user_package.sub.mod``."""
    for name, text in FILES.items():
        file = tmp_path / "user_package" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("user_package.sub.mod")
    for name in [name for name in sys.modules if name.startswith("user_package")]:
        del sys.modules[name]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "parent": lambda m: setattr(m.config, "FACTOR", 5.0),
    "whole": lambda m: setattr(m.config, "SCALE_a", 5.0),
    "passed": lambda m: setattr(m.config, "SCALE_a", 5.0),
    "later": lambda m: setattr(m.config, "SCALE_b", 5.0),
    "kept": lambda m: setattr(m.config, "SCALE_a", 5.0),
    "beside": lambda m: setattr(m.keeps.held, "scale", 5.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_read_under_a_computed_name_is_compared(made: ModuleType, name: str) -> None:
    """Graphs serve, or refuse; once it has changed, the next answer is eager's."""
    step = make(getattr(made, name))
    check_rows(step, 4, 4, 4, 3)
    CHANGES[name](made)
    check_rows(step, 4, 3)


def test_modules_beside_do_not_count(made: ModuleType) -> None:
    """Where code reads parts of its parameters under made-up names, it reads no module that it names."""
    step = make(made.beside)
    check_rows(step, *[4] * 6)
    assert step.stats.hits


def test_lazy_modules_of_libraries_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call asks of transformers by name is looked up in its table, and not in all that this may import; but
    what somebody puts in its place is noticed."""
    transformers = pytest.importorskip("transformers")
    assert "__version__" not in vars(transformers)
    step = make(lambda x: x * (2 if transformers.__version__ else 5))
    assert check_rows(step, *[4] * 4)[-1].is_graph
    guard = step.entries[0].guard
    assert guard is not None
    assert len(guard.tensors) == 0
    monkeypatch.setattr(transformers, "__version__", "")
    check_rows(step, *[4] * 4)
