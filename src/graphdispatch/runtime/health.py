"""Whether graphs engage, in words."""

from collections.abc import Iterable
from typing import NamedTuple

from ..reasons import Reason
from ..showing import count, percent, without_numbers
from ..stats import CUDAGraphStats
from .group import GraphGroup

FIRST_CALLS = 1000
"""After so many calls the log says once if graphs serve fewer than half."""
_OF_NEW_CALLS = (Reason.CONSTANT_CHANGES, Reason.FIRST_SIGHTING, Reason.CAPTURE_WAITS)
FIRST_CAPTURES = 32
"""After so many captures it says once if half of the graphs are gone."""


class Health(NamedTuple):
    """Whether graphs serve at least half of the calls, and stay.

    Attributes:
        calls: All calls.
        share: The share of them that graphs served; 0.0 before the first.
        captures: The graphs that were captured.
        lost: Those of them that were evicted.
        causes: The three commonest reasons of the other calls, each with its number.
        details: What is known of each of these besides, such as the line of the model; empty where nothing is.
        why_idle: Why there may be no calls; empty after the first.
        change: What changed of the callable's state most often when graphs stopped fitting; empty if nothing did.
    """

    calls: int
    share: float
    captures: int
    lost: int
    causes: tuple[tuple[Reason, int], ...]
    details: tuple[str, ...] = ()
    why_idle: str = ""
    change: str = ""

    @classmethod
    def of(cls, stats: CUDAGraphStats, groups: Iterable[GraphGroup] = ()) -> "Health":
        """What the counters and the failures of groups say now."""
        causes, texts = stats.reasons.copy().most_common(3), details_of(groups)
        details = tuple(texts.get(reason, [""])[0] for reason, _ in causes)
        counted = stats.calls, stats.graph_ratio, stats.captures, stats.evictions
        changes = stats.state_changes.copy().most_common(1)
        return cls(*counted, tuple(causes), details, change="".join(what for what, _ in changes))

    @property
    def is_well(self) -> bool:
        """Whether graphs serve at least half of the calls, and fewer than half of many captured graphs are gone."""
        return self.share >= 0.5 and (self.captures < FIRST_CAPTURES or 2 * self.lost < self.captures)

    def __str__(self) -> str:
        if not self.calls:
            return self.why_idle or "no call came yet"
        causes = "".join(
            f"; {reason}, {count(number)} time{'s' * (number != 1)}: {detail or reason.text}"
            for (reason, number), detail in zip(self.causes, self.details, strict=True)
        )
        change = f" (changed: {self.change})" if self.change else ""
        lost = f", and {count(self.lost)} of {count(self.captures)} graphs are gone{change}" if self.lost else ""
        return f"graphs serve {percent(self.share)} of {count(self.calls)} calls{lost}{causes}"


def details_of(groups: Iterable[GraphGroup]) -> dict[Reason, list[str]]:
    """What is known of reasons besides their texts, such as a line of the model, each once. Needs no lock."""
    found: dict[Reason, dict[str, str]] = {}
    for group in groups:
        said = [(failure.reason, failure.detail) for failure in list(group.failures.values())] + group.against_padding()
        if group.unlike and not group.entries:
            about = group.unlike if group.is_of_constant else f"{group.unlike}; prewarm() with such a call, too"
            said += [(reason, about) for reason in _OF_NEW_CALLS]
        for reason, detail in said:
            if detail and detail != reason.text:
                found.setdefault(reason, {}).setdefault(without_numbers(detail), detail)
    return {reason: list(details.values()) for reason, details in found.items()}
