"""Each law of the architecture has tests, which the page of laws names; and the law that no other test can check."""

import ast
import re
from pathlib import Path

import graphdispatch

ROOT = Path(__file__).resolve().parents[2]
_UNPICKLE = re.compile(r"(pickle|torch|numpy|np|marshal|shelve|joblib|dill)\.(loads?|open|Unpickler)")


def laws() -> dict[str, str]:
    """The laws of the architecture, by number."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Laws\n")[2].partition("\n## ")[0]
    return {number: title.rstrip(".,") for number, title in re.findall(r"^(\d+)\. \*\*([^*]+)\*\*", text, re.M)}


def named_tests() -> dict[tuple[str, str], list[str]]:
    """The tests that the page of laws names, by number and title of the law."""
    parts = re.split(r"^## (\d+)\. (.+)$", (ROOT / "docs" / "laws.md").read_text(), flags=re.M)[1:]
    found = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return {(number, title): re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", rows) for number, title, rows in found}


def test_each_law_has_tests() -> None:
    """The page has the laws of the architecture, and at least one test of each, which is there."""
    named = named_tests()
    assert len(named) >= 12
    assert [*named] == [*laws().items()]
    assert [law for law, tests in named.items() if not tests] == []
    for test in {test for tests in named.values() for test in tests}:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), test
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), test


def test_nothing_is_unpickled() -> None:
    """No code of the library calls what runs code of a file: plans, traces and configurations are JSON and tables."""
    used: list[tuple[Path, str]] = []
    for path in Path(graphdispatch.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                used.append((path, ast.unparse(node.func)))
            elif isinstance(node, ast.ImportFrom):
                used += [(path, f"{node.module}.{alias.name}") for alias in node.names]
    assert len(used) > 1000
    assert [one for one in used if _UNPICKLE.fullmatch(one[1])] == []
