"""The core asks a backend what its device does: an accelerator is one module of ``backends``, and lists itself."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import graphdispatch
from graphdispatch import backends
from graphdispatch.backends.accelerator import AcceleratorBackend

from .test_names import COMPANIONS

ROOT = Path(graphdispatch.__file__).parent
HERE = {name: factory() for name, factory in backends._FACTORIES.items() if factory.__module__ == backends.__name__}
"""The backends of the library; others are of tests and plug-ins."""
ACCELERATORS = [cls for cls in HERE.values() if cls.device_type != "cpu"]
MAY_NAME = {Path(inspect.getfile(one)) for one in (backends, *ACCELERATORS)} - {
    Path(inspect.getfile(AcceleratorBackend))
}
CORE = sorted(
    path
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0].removesuffix(".py") not in COMPANIONS and path not in MAY_NAME
)
DEVICES = sorted(cls.device_type for cls in ACCELERATORS)
ACCELERATOR = re.compile(rf"(?<![a-z])({'|'.join(DEVICES)})(?!_?graph)", re.IGNORECASE)
"""A device's name, not within a word; graphs are called CUDA graphs everywhere, also those of the CPU."""


WORDS: dict[type[ast.AST], str] = {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name", ast.Constant: "value"}
"""Where parts of the code have names and texts."""


def words(tree: ast.AST) -> Iterator[str]:
    """The names and texts of the code, without docstrings and other texts that stand alone."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        word = getattr(node, WORDS.get(type(node), ""), None)
        if isinstance(word, str) and not (isinstance(node, ast.Constant) and id(node) in alone):
            yield word


def test_the_core_names_no_accelerator() -> None:
    """Its code has neither names nor texts with one; what is written for people may."""
    assert {"cuda", "xpu"} <= {*DEVICES}
    trees = {path: ast.parse(path.read_text()) for path in CORE}
    assert len(trees) > 50
    assert [(path, word) for path, tree in trees.items() for word in words(tree) if ACCELERATOR.search(word)] == []


def test_each_backend_is_documented() -> None:
    """It has a row in the page on accelerators, which says what was run."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "accelerators.md").read_text()
    rows = dict(re.findall(r"^\| [^|]+ \| `(\w+)`[^|]* \| ([^|]+) \|$", page, re.M))
    assert {*HERE} <= {*rows}


def test_texts_of_errors_are_found() -> None:
    """They are in lower case, as errors are before they are compared, and no earlier one hides a later one."""
    for cls in HERE.values():
        signs = [*cls.errors]
        assert signs == [sign.lower() for sign in signs]
        assert [(one, other) for i, one in enumerate(signs) for other in signs[i + 1 :] if one in other] == []
