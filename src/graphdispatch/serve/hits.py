"""What is known of calls in advance: the prepared hit."""

import weakref
from typing import TYPE_CHECKING, NamedTuple

from ..decide.decision import Decision
from ..memory.entry import CUDAGraphEntry
from ..memory.replay import ReplayPlan
from ..state.guards import StateGuard

if TYPE_CHECKING:
    from .group import GraphGroup

_MOST_HITS = 8192
__all__ = ["Hit", "Hits"]


class Hit(NamedTuple):
    """What a hit needs, made once for a number of rows."""

    entry: CUDAGraphEntry
    plan: ReplayPlan
    decision: Decision
    guard: StateGuard | None
    """What must be as it was at the capture; None if nobody guards it."""


class Hits(dict[int, Hit | None]):
    """The hits of a group by number of rows; ``hits[rows]`` is None where no graph serves so many by a hit yet.

    A hit is made at its first lookup, by any thread, without a lock.
    """

    __slots__ = ("_group",)

    def __init__(self, group: "GraphGroup") -> None:
        super().__init__()
        self._group = weakref.ref(group)  # so that a group that was dropped ends at once, with what it holds

    def __missing__(self, rows: int) -> Hit | None:
        group = self._group()
        hit = group.make_hit(rows) if group is not None else None
        if hit is not None:
            if len(self) >= _MOST_HITS:
                self.clear()
            self[rows] = hit
        return hit
