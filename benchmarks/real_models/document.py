"""What a sweep found: a summary in ``docs/models.md``, and every case in ``build/models.csv``.

``python -m benchmarks.real_models.sweep --write`` writes both.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sweep import Outcome

__all__ = ["document", "write"]

_ROOT = Path(__file__).resolve().parents[2]
_DOCUMENT = _ROOT / "docs" / "models.md"
_CASES = _ROOT / "build" / "models.csv"
_HEAD = """# Models that were tried

`make sweep` builds tiny models with random weights, from transformers, timm and `torch.nn`. It calls each as people
call it, with eight batches of 2 to 4 rows, three times, whatever captures cost and graphs gain, and compares every
answer with eager on the CPU backend. It writes this page, and every case into `build/models.csv`. *Full* means that
graphs served every call of the last round.

"""


def document(outcomes: Sequence[Outcome], unbuilt: dict[str, str]) -> str:
    """The page: how many cases were served, by kind and style, and what refused the others."""
    counted = Counter(_share(outcome) for outcome in outcomes)
    families = len({(outcome.kind, outcome.family) for outcome in outcomes})
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    lines = [
        f"{len(outcomes)} cases of {families} families: {counted['full']} fully served, {counted['partly']} partly, "
        f"{counted['never']} never; {len(wrong)} wrong. {len(unbuilt)} further families could not be made so small.",
        "",
        "| kind, style | cases | full |",
        "|---|---|---|",
    ]
    for kind, style in dict.fromkeys((outcome.kind, outcome.style) for outcome in outcomes):
        of_style = [outcome for outcome in outcomes if (outcome.kind, outcome.style) == (kind, style)]
        full = [outcome for outcome in of_style if outcome.served == "full"]
        lines.append(f"| {kind}, {style} | {len(of_style)} | {len(full)} |")
    lines += ["", "## Not fully served", "", "| model | served | reason |", "|---|---|---|"]
    refused = [outcome for outcome in outcomes if outcome.served != "full" or outcome.wrong]
    for family, served, reason in dict.fromkeys((one.family, one.served, one.reason) for one in refused):
        first = next(one for one in refused if (one.family, one.served, one.reason) == (family, served, reason))
        lines.append(f"| {family} | {served} | `{reason}`: {_cell(first.wrong or first.detail)} |")
    return _HEAD + "\n".join(lines) + "\n"


def write(outcomes: Sequence[Outcome], unbuilt: dict[str, str]) -> None:
    """Write the page, and the table of all cases."""
    _DOCUMENT.write_text(document(outcomes, unbuilt), "utf-8")
    _CASES.parent.mkdir(exist_ok=True)
    rows = [asdict(outcome) for outcome in outcomes]
    with _CASES.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        table.writeheader()
        table.writerows(rows)


def _share(outcome: Outcome) -> str:
    return outcome.served if outcome.served in ("full", "never") else "partly"


def _cell(text: str) -> str:
    """What refused a case, in a cell of a table: the first clause, and the line of the model where it names one."""
    text = re.sub(r"^eager, \d+ rows: |^the call changes Python state: ", "", text)
    clause = re.split(r"[;:,] | reads | indexes | gives ", text)[0]
    line = re.search(r"site-packages/transformers/models/\S+\.py:\d+: ([^\n]*?)(?:;| \(while|$)", text)
    return (f"{clause}, at `{line[1]}`" if line else clause).replace("|", "/")[:120]
