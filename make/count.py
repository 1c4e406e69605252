"""How large the package is: code lines and files of each room, imports inside functions, and circles of imports.

    python make/count.py            this checkout
    python make/count.py DIRECTORY  another one

Code lines are those that hold code: no blank lines, comments or docstrings. A circle is a set of modules that import
each other at the top of their files, ``TYPE_CHECKING`` blocks left out.
"""

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

COMPANIONS = {"auditing", "cli", "demo", "engines", "integrations", "metrics", "plan", "report", "testing"}
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """The lines of a module that hold code."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def inner_imports(tree: ast.AST) -> int:
    """The imports inside functions."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    found = {part for function in functions for part in ast.walk(function)}
    return sum(isinstance(part, ast.Import | ast.ImportFrom) for part in found)


def top_imports(path: Path, root: Path, modules: dict[tuple[str, ...], Path]) -> Iterator[Path]:
    """The package's own modules that a file imports when it is loaded."""
    package = path.relative_to(root).parts[:-1]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
            base = tuple(part for part in base if part)
            for name in node.names:
                found = modules.get((*base, name.name), modules.get(base))
                if found is not None and found != path:
                    yield found


def circles(edges: dict[Path, set[Path]]) -> list[list[Path]]:
    """Sets of more than one module that reach each other."""
    reach: dict[Path, set[Path]] = {}
    for start in edges:
        seen, todo = set[Path](), [start]
        while todo:
            for path in edges.get(todo.pop(), ()):
                if path not in seen:
                    seen.add(path)
                    todo.append(path)
        reach[start] = seen
    groups = {frozenset(other for other in reach[path] if path in reach.get(other, ())) for path in edges}
    return [sorted(group) for group in groups if len(group) > 1]


def main(checkout: Path) -> None:
    """Print the table."""
    root = checkout / "src" / "graphdispatch"
    files = sorted(root.rglob("*.py"))
    modules = {
        path.relative_to(root).with_suffix("").parts[: -1 if path.stem == "__init__" else None]: path for path in files
    }
    rooms: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path in files:
        parts, text = path.relative_to(root).parts, path.read_text()
        room = parts[0] if len(parts) > 1 else path.stem if path.stem in COMPANIONS else "(vocabulary)"
        for place, count in enumerate((code_lines(text), 1, inner_imports(ast.parse(text)))):
            rooms[room][place] += count
    print(f"{'room':14} {'code':>6} {'files':>6} {'imports in functions':>21}")
    for kind, is_kind in (("core", False), ("companions", True)):
        chosen = {room: counts for room, counts in sorted(rooms.items()) if (room in COMPANIONS) is is_kind}
        for room, (lines, number, inner) in chosen.items():
            print(f"{room:14} {lines:6} {number:6} {inner:21}")
        lines, number, inner = (sum(column) for column in zip(*chosen.values(), strict=True))
        print(f"{kind:14} {lines:6} {number:6} {inner:21}\n")
    native = [path for kind in ("cpp", "h") for path in (root / "native").rglob(f"*.{kind}")]
    print(f"C++: {sum(len(path.read_text().splitlines()) for path in native)} lines in {len(native)} files")
    tests = sorted((checkout / "tests").rglob("*.py"))
    print(f"tests: {sum(code_lines(path.read_text()) for path in tests)} code lines in {len(tests)} files")
    largest = max(files, key=lambda path: len(path.read_text().splitlines()))
    print(f"largest file: {largest.relative_to(root)}, {len(largest.read_text().splitlines())} lines")
    edges = {path: set(top_imports(path, root, modules)) for path in files}
    for circle in circles(edges):
        print("circle:", *(path.relative_to(root).as_posix() for path in circle))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]))
