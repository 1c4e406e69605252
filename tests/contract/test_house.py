"""How the house is kept: documented, in small pieces, and drawn in ``docs/architecture.md``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "graphdispatch"
FILES = sorted(PACKAGE.rglob("*.py"))
TABLE = re.compile(r"^\| `([\w/]+\.py)` \|", re.M)

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, Definition]]:
    """All classes and functions with their dotted names; what is within a function is its own business."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            name = f"{inside}{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node, f"{name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from definitions(node, inside)


def repeats(node: Definition) -> bool:
    """Whether it is another face of something that is documented already: a setter, or an overload."""
    return any(ast.unparse(how).endswith((".setter", "overload")) for how in node.decorator_list)


@every_file
def test_what_is_public_is_documented(path: Path) -> None:
    """The module, and each class, function and method whose name and whose class's name is public."""
    tree = ast.parse(path.read_text())
    silent = [
        name
        for name, node in definitions(tree)
        if not any(part.startswith("_") for part in name.split(".")) and not (ast.get_docstring(node) or repeats(node))
    ]
    assert ast.get_docstring(tree)
    assert silent == []


@every_file
def test_pieces_are_small(path: Path) -> None:
    """No file has more than 400 lines, no function more than 60."""
    text = path.read_text()
    assert text.count("\n") <= 400
    long = [
        name
        for name, node in definitions(ast.parse(text))
        if not isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= 60  # type: ignore[operator]
    ]
    assert long == []


@every_file
def test_what_a_module_exports_exists(path: Path) -> None:
    """``__all__`` of a module names things that the module has."""
    tree = ast.parse(path.read_text())
    exported = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and path.parent != PACKAGE
    ]
    defined = {name for name, _ in definitions(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {ast.unparse(target) for target in targets}
    assert set(exported[0] if exported else []) <= defined


def test_the_architecture_names_every_module() -> None:
    """Its table has one row for each module of the package, and no other."""
    modules = {str(path.relative_to(PACKAGE)) for path in FILES if path.name != "__init__.py"}
    rows = TABLE.findall((ROOT / "docs" / "architecture.md").read_text())
    assert len(set(rows)) == len(rows)
    assert (modules - set(rows), set(rows) - modules) == (set(), set())


def test_the_architecture_points_at_what_exists() -> None:
    """Every path in its text is a module of the package."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    mentioned = set(re.findall(r"`((?:\w+/)*\w+\.pyi?)`", text))
    assert {name for name in mentioned if not (PACKAGE / name).exists()} == set()


def test_the_architecture_names_what_exists() -> None:
    """A method that it names, as ``Server.step``, is defined; a function or option is at least mentioned somewhere."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    sources = [path.read_text() for path in FILES]
    defined = {name for source in sources for name, _ in definitions(ast.parse(source))}
    methods = set(re.findall(r"`([A-Z]\w+\.\w+)`", text))
    assert len(methods) > 10
    assert methods - defined == set()
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    assert set(re.findall(r"`(\w+)`", text)) - words == set()


def test_the_search_found_the_package() -> None:
    """The tests above did not silently look at nothing."""
    assert len(FILES) > 40
