"""``docs/models.md``: what a sweep found, as tables. Written by ``python -m tests.real_models.sweep --write``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sweep import Outcome

__all__ = ["document", "write"]

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_HEAD = """# Models that were tried

`make sweep` builds tiny models with random weights, from transformers, timm and `torch.nn`. It calls each in the styles
in which people call it, three rounds of eight batches of 2 to 4 rows, and compares every answer with eager on the CPU
backend. This file is what it wrote; nothing in it is written by hand. *full*: every call of the last round was a hit.
*difference* is the largest one between an answer and eager's, with padding. *ratio* is eager's time over the served one
for 4 rows of these tiny models; on a busy machine it says little.

"""


def document(outcomes: Sequence[Outcome], unbuilt: dict[str, str]) -> str:
    """The document's text."""
    counted = Counter(_share(outcome) for outcome in outcomes)
    families = len({(outcome.kind, outcome.family) for outcome in outcomes})
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    lines = [
        f"{len(outcomes)} cases of {families} families: {counted['full']} fully served, {counted['partly']} partly, "
        f"{counted['never']} never; {len(wrong)} wrong. {len(unbuilt)} further families could not be made so small.",
        "",
        "| kind, style | cases | full | median ratio | reasons of the others |",
        "|---|---|---|---|---|",
    ]
    for kind, style in dict.fromkeys((outcome.kind, outcome.style) for outcome in outcomes):
        of_style = [outcome for outcome in outcomes if (outcome.kind, outcome.style) == (kind, style)]
        full = [outcome for outcome in of_style if outcome.served == "full"]
        reasons = Counter(outcome.reason for outcome in of_style if outcome.reason)
        ratio = f"{median(outcome.ratio for outcome in full):.2f}" if full else "-"
        told = ", ".join(f"`{reason}` {count}" for reason, count in reasons.most_common())
        lines.append(f"| {kind}, {style} | {len(of_style)} | {len(full)} | {ratio} | {told} |")
    lines += ["", "## Not fully served, and why", "", "| model | style | served | reason |", "|---|---|---|---|"]
    for outcome in outcomes:
        if outcome.served != "full" or outcome.wrong:
            why = f"`{outcome.reason}`: {_cell(outcome.wrong or outcome.detail)}"
            lines.append(f"| {outcome.family} | {outcome.style} | {outcome.served} | {why} |")
    lines += ["", "## All cases", "", "| model | style | served | difference | ratio |", "|---|---|---|---|---|"]
    lines += (
        f"| {outcome.family} | {outcome.style} | {outcome.served} | {outcome.difference:.0e} | {outcome.ratio:.2f} |"
        for outcome in outcomes
    )
    return _HEAD + "\n".join(lines) + "\n"


def write(outcomes: Sequence[Outcome], unbuilt: dict[str, str]) -> None:
    """Write the document."""
    DOCUMENT.write_text(document(outcomes, unbuilt), "utf-8")


def _share(outcome: Outcome) -> str:
    return outcome.served if outcome.served in ("full", "never") else "partly"


def _cell(text: str) -> str:
    """A refusal in a cell of a table: paths as from the package that the line is in."""
    text = re.sub(r"^eager, \d+ rows: ", "", text)
    text = re.sub(r"\S*/site-packages/(\S+?):\d+", r"\1", text)
    return text.replace("|", "/")[:260].replace("[", r"\[")  # or a subscript would be read as a link
