"""The core asks a backend what its device does: an accelerator is one folder of ``backends``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import graphdispatch

from .test_names import COMPANIONS

ROOT = Path(graphdispatch.__file__).parent
CORE = sorted(
    path
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0].removesuffix(".py") not in COMPANIONS
    and ROOT / "backends" / "cuda" not in path.parents
    and path != ROOT / "backends" / "accelerator" / "diagnosis.py"  # it knows what torch says of errors
)
ACCELERATOR = re.compile(r"cuda(?!_?graph)", re.IGNORECASE)
"""The device's name; graphs are called CUDA graphs everywhere, also those of the CPU."""


def words(tree: ast.AST) -> Iterator[str]:
    """The names and texts of the code, without docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def without_docstrings(tree: ast.AST) -> ast.AST:
    """The tree, in which texts that stand alone are gone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return tree


def test_the_core_names_no_accelerator() -> None:
    """Its code has neither names nor texts with one; what is written for people may."""
    trees = {path: without_docstrings(ast.parse(path.read_text())) for path in CORE}
    assert len(trees) > 50
    assert [(path, word) for path, tree in trees.items() for word in words(tree) if ACCELERATOR.search(word)] == []
