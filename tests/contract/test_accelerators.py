"""The core asks a backend what its device does: an accelerator is one module of ``backends``, and lists itself."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphdispatch
from graphdispatch import backends
from graphdispatch.backends.accelerator import AcceleratorBackend
from graphdispatch.backends.base import Backend, Capture, Graph, Pool

from .test_names import COMPANIONS

ROOT = Path(graphdispatch.__file__).parent
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "accelerators.md"
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
    rows = dict(re.findall(r"^\| [^|]+ \| `(\w+)`[^|]* \| ([^|]+) \|$", PAGE.read_text(), re.M))
    assert {*HERE} <= {*rows}


def has_answer(member: Any) -> bool:
    """Whether a member of a base class is a method, or a property, with an answer that a subclass may replace."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    is_open = not (getattr(function, "__isabstractmethod__", False) or getattr(function, "__final__", False))
    return inspect.isfunction(function) and is_open


def test_what_a_backend_may_answer_is_listed() -> None:
    """Each such member has a row in the page; Python names those that a backend must have, and the others are final."""
    every = ((cls, name, member) for cls in (Backend, Pool, Capture, Graph) for name, member in vars(cls).items())
    may = {f"{cls.__name__}.{name}" for cls, name, member in every if name[0] != "_" and has_answer(member)}
    assert {*re.findall(r"^\| `((?:Backend|Pool|Capture|Graph)\.\w+)` \|", PAGE.read_text(), re.M)} == may


def test_texts_of_errors_are_found() -> None:
    """They are in lower case, as errors are before they are compared, and no earlier one hides a later one."""
    for cls in HERE.values():
        signs = [*cls.errors]
        assert signs == [sign.lower() for sign in signs]
        assert [(one, other) for i, one in enumerate(signs) for other in signs[i + 1 :] if one in other] == []
