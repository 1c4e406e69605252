"""The core asks a backend what its device does: an accelerator is one module of ``backends``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import graphdispatch

from .test_names import COMPANIONS

ROOT = Path(graphdispatch.__file__).parent
MAY_NAME = {
    ROOT / "backends" / "__init__.py",  # it finds a backend by its name
    ROOT / "backends" / "cuda.py",
    ROOT / "backends" / "diagnosis.py",  # it knows what torch says of errors
}
CORE = sorted(
    path
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0].removesuffix(".py") not in COMPANIONS and path not in MAY_NAME
)
ACCELERATOR = re.compile(r"cuda(?!_?graph)", re.IGNORECASE)
"""The device's name; graphs are called CUDA graphs everywhere, also those of the CPU."""


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
    trees = {path: ast.parse(path.read_text()) for path in CORE}
    assert len(trees) > 50
    assert [(path, word) for path, tree in trees.items() for word in words(tree) if ACCELERATOR.search(word)] == []
