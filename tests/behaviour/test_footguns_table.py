"""Keeps the table in ``docs/footguns.md`` true: a test for each row, a row for each test."""

import ast
import re
from pathlib import Path

import pytest

from .cases import row_of
from .cases_read import KEPT, READS
from .cases_written import WRITES

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "footguns.md"
ROW = re.compile(r"^\|(?P<write>[^|]*)\|(?:(?P<here>[^|]*)\|(?P<instead>[^|]*)\|)? `(?P<id>\w+)` \|$", re.MULTILINE)


def _tests_of(path: Path) -> dict[str, str]:
    """The source of each test of a file, by its name without ``test_``."""
    source = path.read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {
        node.name.removeprefix("test_"): ast.get_source_segment(source, node) or ""
        for node in functions
        if node.name.startswith("test_")
    }


# What happens in each row; a row of two columns stands under a heading that says that the answer is right.
ROWS = {row["id"]: row["here"] or "right" for row in ROW.finditer(DOCUMENT.read_text(encoding="utf-8"))}
FILES = [path for path in sorted(HERE.glob("test_footguns_*.py")) if path.name != Path(__file__).name]
CASES = [(name, case) for table in (READS, KEPT, WRITES) for name, case in table.items() if case.row]
TESTS = {name: source for path in FILES for name, source in _tests_of(path).items()} | {
    row_of(name): str(getattr(case, "reason", "")).upper() for name, case in CASES
}


def test_every_row_is_executed() -> None:
    """Each row of the table has a test or a case of its name."""
    assert ROWS
    assert set(ROWS) - set(TESTS) == set()


def test_every_test_has_a_row() -> None:
    """Each test has a row; a remedy's test has that of the test it belongs to."""
    assert {name.removesuffix("_instead") for name in TESTS} - set(ROWS) == set()


@pytest.mark.parametrize("name", ROWS)
def test_outcome_is_tested(name: str) -> None:
    """The table's outcome is one of the four, and a reason that it names stands in the test."""
    here = ROWS[name].strip()
    assert here.startswith(("LIMIT:", "eager: ", "error: ", "right")), here
    if here.startswith("LIMIT:"):
        assert '"""LIMIT:' in TESTS[name]
    if here.startswith("eager: "):
        reason = re.match(r"eager: `(\w+)`", here)
        assert reason is not None
        helper = "CAPTURE_UNSAFE" if "_refused(" in TESTS[name] else ""
        assert reason[1].upper() in TESTS[name] + helper
