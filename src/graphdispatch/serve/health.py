"""``Health``: whether graphs serve the calls, and why they do not."""

from typing import NamedTuple

from ..reasons import Reason
from ..showing import count, percent
from ..stats import CUDAGraphStats

__all__ = ["FIRST_CALLS", "FIRST_CAPTURES", "Health"]

FIRST_CALLS = 1000
"""After so many calls the log says once if graphs serve fewer than half."""
FIRST_CAPTURES = 32
"""After so many captures it says once if half of the graphs are gone."""
_MOST_CAUSES = 3


class Health(NamedTuple):
    """Whether graphs serve at least half of the calls, and stay.

    Attributes:
        calls: All calls.
        share: The share of them that graphs served; 0.0 before the first.
        captures: The graphs that were captured.
        lost: Those of them that were evicted.
        causes: The three commonest reasons of the other calls, each with its number.
    """

    calls: int
    share: float
    captures: int
    lost: int
    causes: tuple[tuple[Reason, int], ...]

    @classmethod
    def of(cls, stats: CUDAGraphStats) -> "Health":
        """What the counters tell now."""
        causes = stats.reasons.copy().most_common(_MOST_CAUSES)
        return cls(stats.calls, stats.graph_ratio, stats.captures, stats.evictions, tuple(causes))

    @property
    def is_well(self) -> bool:
        """Whether graphs serve at least half of the calls, and fewer than half of many captured graphs are gone."""
        return self.share >= 0.5 and (self.captures < FIRST_CAPTURES or 2 * self.lost < self.captures)

    def __str__(self) -> str:
        causes = "".join(f"; {reason}, {count(number)} times: {reason.text}" for reason, number in self.causes)
        lost = f", and {count(self.lost)} of {count(self.captures)} graphs are gone" if self.lost else ""
        return f"graphs serve {percent(self.share)} of {count(self.calls)} calls{lost}{causes}"
