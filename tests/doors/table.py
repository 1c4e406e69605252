"""The table of ``docs/doors.md``: every case of the suites by every door, read from the tests' declarations.

``python -m tests.doors.table`` writes it; ``test_document.py`` compares it.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from .features import FEATURES, LACKS, OUTCOMES

__all__ = ["DOCUMENT", "cases", "document", "footgun_outcomes"]

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "doors.md"
SUITES = {
    "Guarantees": ROOT / "tests" / "doors" / "test_guarantees.py",
    "Effects and failures": ROOT / "tests" / "doors" / "test_effects.py",
    "Surroundings": ROOT / "tests" / "doors" / "test_surroundings.py",
    "Footguns": ROOT / "tests" / "footguns",
}
THROUGH_A_DOOR = {"opened", "settled", "tried"}

HEAD = """# Doors: every case through every front door

The library has several front doors, and one server behind them. Each case below is one test, which runs through every
door that can express it, on the CPU backend. This file is made from the tests: `python -m tests.doors.table` writes it.

The doors:

- **graphed**: `graphed(fn, ...)`
- **wrapper**, **adaptive_wrapper**: `CUDAGraphWrapper`, `AdaptiveCUDAGraphWrapper`, with a batch descriptor for
  each number of rows
- **execute_or_capture**, **replay_graph**: the methods of `CUDAGraphManager`; `replay_graph` after `capture_graph`
- **entry**: `CUDAGraphEntry.replay`, for an entry that was handed on
- **dispatcher**: `CudagraphDispatcher` with a registered entry
- **streams**, **streams_entry**: `StreamDispatcher`, after `capture` and with a registered entry
- **composite**: `CompositeDispatcher` with a `CudagraphDispatcher` that has a registered entry

`replay_graph` and `entry` have no eager path. They refuse a call with an exception, before anything is copied, and the
caller runs it; the table counts that as eager.

What the cells say:

"""


class Case(NamedTuple):
    """One test: its name without ``test_``, the suite, what it needs of a door, its outcome and its claim."""

    name: str
    suite: str
    needs: tuple[str, ...]
    outcome: str
    claim: str


def footgun_outcomes() -> dict[str, str]:
    """What ``docs/footguns.md`` says of each row, as a word of ``OUTCOMES``."""
    text = (ROOT / "docs" / "footguns.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| *(LIMIT|eager|error|right)", text, re.M)
    return {name: outcome.lower() for name, outcome in rows}


def cases() -> list[Case]:
    """All cases, suite by suite, in the order of the files."""
    outcomes = footgun_outcomes()
    found = []
    for suite, path in SUITES.items():
        files = [path] if path.is_file() else sorted(path.glob("test_*.py"))
        for file in files:
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and _runs_through_a_door(node):
                    name = node.name.removeprefix("test_")
                    features, declared = _declared(node)
                    outcome = outcomes.get(name, "right") if suite == "Footguns" else declared
                    claim = (ast.get_docstring(node) or "").splitlines()[0].removeprefix("LIMIT: ").replace("``", "`")
                    found.append(Case(name, suite, features, outcome, claim))
    return found


def _runs_through_a_door(node: ast.FunctionDef) -> bool:
    return node.name.startswith("test_") and bool(THROUGH_A_DOOR & {argument.arg for argument in node.args.args})


def _declared(node: ast.FunctionDef) -> tuple[tuple[str, ...], str]:
    """The features and the outcome of the ``needs`` of a test."""
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "needs":
            outcomes = [ast.literal_eval(keyword.value) for keyword in call.keywords]
            return tuple(map(ast.literal_eval, call.args)), outcomes[0] if outcomes else "right"
    return (), "right"


def document() -> str:
    """The text of ``docs/doors.md``."""
    reasons = {reason: number for number, reason in enumerate(dict.fromkeys(_reasons()), 1)}
    lines = [f"- {word}: {meaning}" for word, meaning in OUTCOMES.items()]
    lines += ["- (1), (2), ...: the door cannot express the case, because:", ""]
    lines += ["| | what is missing | doors | why |", "|---|---|---|---|"]
    for reason, number in reasons.items():
        missing = [FEATURES[f] for f in FEATURES if any(lacks.get(f) == reason for lacks in LACKS.values())]
        doors = [door for door in LACKS if reason in LACKS[door].values()]
        lines.append(f"| ({number}) | {'; '.join(missing)} | {', '.join(doors)} | {reason} |")
    everything = cases()
    for suite in SUITES:
        lines += ["", f"## {suite}", "", f"| case | {' | '.join(LACKS)} |", f"|---|{'---|' * len(LACKS)}"]
        for case in everything:
            if case.suite == suite:
                lines.append(f"| `{case.name}` | {' | '.join(_cell(case, door, reasons) for door in LACKS)} |")
        if suite != "Footguns":
            lines += ["", *(f"- `{case.name}`: {case.claim}" for case in everything if case.suite == suite)]
    lines += ["", "[footguns.md](footguns.md) says what each footgun is, and what to do instead."]
    return HEAD + "\n".join(lines) + "\n"


def _reasons() -> list[str]:
    return [LACKS[door][feature] for feature in FEATURES for door in LACKS if feature in LACKS[door]]


def _cell(case: Case, door: str, reasons: dict[str, int]) -> str:
    missing = [f"({reasons[LACKS[door][feature]]})" for feature in case.needs if feature in LACKS[door]]
    return " ".join(missing) or case.outcome


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
