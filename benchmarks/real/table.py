"""The table of the programs, on the terminal and as a page."""

import datetime
import platform
from collections.abc import Sequence
from importlib.metadata import version

from .measure import AFTER, Figures

__all__ = ["page", "row_of"]


def row_of(figures: Figures) -> str:
    """One row of the table."""
    if figures.failed:
        return f"| {figures.name} | did not run: {figures.failed[:150]} |"
    speeds = [f"{figures.speeds[str(number)]:.2f}" if str(number) in figures.speeds else "" for number in AFTER]
    warm = [f"{figures.prewarmed:.2f}", f"{figures.prewarmed_share:.0%}"] if figures.prewarmed else ["", ""]
    why = f"WRONG: {figures.wrong}" if figures.wrong else figures.why.replace("|", "/").replace("\n", " ")[:160]
    cells = [
        figures.name,
        f"{figures.eager_ms:.2f}",
        *speeds,
        f"{figures.share:.0%}",
        *warm,
        f"{figures.slowest:.0f}",
        why,
    ]
    return f"| {' | '.join(cells)} |"


def page(found: Sequence[Figures]) -> str:
    """The page of the documentation."""
    ran = [figures for figures in found if not figures.failed]
    wrong = sum(bool(figures.wrong) for figures in ran)
    libraries = len({figures.name.partition("/")[0] for figures in ran})
    today = datetime.date.today().isoformat()
    return "\n".join(
        [
            "# Real programs",
            "",
            "`make real` builds tiny models of other libraries with random weights, without downloads, and calls each",
            "1,000 times with random numbers of rows, as somebody does who has read the first page: with the defaults,",
            "and no prewarm. Then it prewarms another callable, and calls it 300 times. Every answer is compared with",
            "eager's. Speeds are eager's processor time over that of served calls, captures included.",
            "",
            f"On {today}, with torch {version('torch')} and Python {platform.python_version()} on the CPU, one thread:",
            f"{len(ran)} programs of {libraries} libraries, {wrong} wrong.",
            "",
            "| program | eager ms | speed over 100 | 300 | 1,000 calls | then by graphs | prewarmed speed | by graphs "
            "| slowest call, in eager calls | why eager |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *map(row_of, ran),
            "",
        ]
    )
