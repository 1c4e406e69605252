"""What is known of calls in advance: the prepared hit, or why no graph serves them for a while."""

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..decide.decision import Decision
from ..memory.entry import CUDAGraphEntry
from ..memory.replay import ReplayPlan
from ..state.guards import StateGuard

if TYPE_CHECKING:
    from .group import GraphGroup, Route

_MOST_HITS = 8192
__all__ = ["Hit", "Hits", "Standing"]


class Hit(NamedTuple):
    """What a hit needs, made once for a number of rows."""

    entry: CUDAGraphEntry
    plan: ReplayPlan
    decision: Decision
    guard: StateGuard | None
    """What must be as it was at the capture; None if nobody guards it."""


class Standing(NamedTuple):
    """Why no graph serves such calls, and none will for a while: they run eagerly at once.

    It has another number of fields than a hit, by which the core tells them apart.
    """

    route: "Route"
    misses: Counter[int]
    """By size, the calls that no graph served; refused at once, they are counted without a lock, which may lose one."""
    size: int
    """The size whose misses the calls are; 0 if no size would serve them."""
    decision: Decision
    rows: int
    """What statistics count of such a call: the ``cells_of`` its rows."""
    until: float
    """The misses of the size from which on calls take the slow path again."""
    core: Any
    """What the core serves such calls by (``EagerPath.core_of``); None if Python serves them."""


class Hits(dict[int, Hit | Standing | None]):
    """The hits of a group by number of rows; ``hits[rows]`` is None where no graph serves so many by a hit yet.

    A hit is made at its first lookup, by any thread, without a lock. Why there is none is put here by the slow
    path, with the server's lock held.
    """

    __slots__ = ("_group",)

    def __init__(self, group: "GraphGroup") -> None:
        super().__init__()
        self._group = weakref.ref(group)  # so that a group that was dropped ends at once, with what it holds

    def __missing__(self, rows: int) -> Hit | Standing | None:
        group = self._group()
        hit = group.make_hit(rows) if group is not None else None
        if hit is not None:
            if len(self) >= _MOST_HITS:
                self.clear()
            self[rows] = hit
        return hit
