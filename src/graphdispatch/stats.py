"""Counters of what happened, bounded in memory, with a reason for each step that no graph served."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

from .copying import Unlocked, make_lock
from .modes import DispatchMode
from .reasons import Reason
from .showing import html_table, milliseconds
from .sizes import cells_of

MOST_ROWS = 4096  # this many different numbers of rows get a counter of their own
_MOST_CHANGES = 64  # this many different changes of state are counted


class EvictionReason(StrEnum):
    """Why a graph was released."""

    COUNT = "count"
    """The largest allowed number of graphs was reached."""
    BYTES = "bytes"
    """The graphs held more bytes than allowed."""
    REPLACED = "replaced"
    """Another graph was captured for the same key."""
    STALE = "stale"
    """Weights or a workspace moved, or a module changed its mode."""
    INVALIDATED = "invalidated"
    """``invalidate()`` declared it stale."""
    ASLEEP = "asleep"
    """``sleep()`` released all graphs."""
    DROPPED = "dropped"
    """Its owner no longer needed it."""


class Gain(NamedTuple):
    """The times of a full batch, measured once; on an asynchronous device, until its work is done."""

    eager_ms: float
    """An eager run, in milliseconds."""
    replay_ms: float
    """A replay, the copy of the inputs included, in milliseconds."""

    @property
    def ms(self) -> float:
        """By how much a replay is faster, in milliseconds."""
        return self.eager_ms - self.replay_ms

    def __str__(self) -> str:
        times = f"{milliseconds(self.replay_ms)} instead of {milliseconds(self.eager_ms)}"
        return f"gains {milliseconds(self.ms)} a full batch: {times}"


class _Counted(Unlocked):
    """Counters of calls, with the reasons of those that no graph served."""

    _derived: ClassVar[tuple[str, ...]]
    """The properties that ``to_dict`` gives beside the counters."""
    reasons: Counter[Reason]

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data, for JSON."""
        plain = {name: value for name, value in self.__getstate__().items() if not name.startswith("_")}
        for name, value in plain.items():
            if isinstance(value, Counter):
                plain[name] = {str(what): number for what, number in value.items()}
        return plain | {name: getattr(self, name) for name in self._derived}

    def _repr_html_(self) -> str:
        rows = [(reason.value, number, reason.text) for reason, number in self.reasons.copy().most_common()]
        return html_table(repr(self)[1:-1], ("reason of eager calls", "calls", "meaning"), rows)


@dataclass(slots=True, kw_only=True, eq=False)
class HitCounts:
    """What a hit adds to counters. Each field is a counter of ``CUDAGraphStats`` and a metric with its meaning, and the
    core counts it, too. ``ReplayPlan`` gives its value; a call in parts adds up those of its parts. One ``of_rows``
    says nothing where calls arrive padded."""

    hits: int = field(metadata={"meaning": "Calls that a graph served.", "of_rows": False})
    real_rows: int = field(metadata={"meaning": "Rows of hits before padding.", "of_rows": True})
    padding_rows: int = field(metadata={"meaning": "Padding rows that graphs computed in hits.", "of_rows": True})


COUNTED_BY_HITS = tuple(one.name for one in fields(HitCounts))
"""The names of the counters that hits add to."""


class CUDAGraphStats(HitCounts, _Counted):
    """What a set of graphs did: captures, replays, hits, misses, fallbacks, rows, and reasons.

    A graph serves a *hit*. A *verification* is a call for which there was a graph that had to be compared with eager
    first, and agreed; its answer is eager's. Every other call is a *miss*. A *fallback* is a miss that captured
    nothing. ``real_rows`` and ``padding_rows`` count the rows of hits, and those that padding added; ``reasons`` counts
    each call that was no hit.

    All shares are properties. ``graph_ratio`` leaves verifications out; ``hit_rate`` does not. Thread-safe if all
    graphs that count in it belong to one pool.

    Args:
        knows_rows: Whether calls show their real rows; False if they arrive padded.
    """

    _derived = (
        *("verifications", "misses", "fallbacks", "replays", "padded_rows"),
        *("hit_rate", "graph_ratio", "padding_ratio"),
    )
    __slots__ = ("_rows_of_eager", "_rows_of_hits", "reasons")

    def __init__(self, *, knows_rows: bool = True) -> None:
        self._lock = make_lock()
        self._knows_rows = knows_rows
        self.reset()

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.captures = self.capture_failures = self.evictions = self.evicted_bytes = 0
        self.capture_time_ms = 0.0
        self.state_changes: Counter[str] = Counter()
        """How often graphs stopped fitting since the callable's state had changed, by what changed first; the first 64
        different texts."""
        self.gains: dict[str, Gain] = {}
        """The times of a full batch by graph and eagerly, by mode and size, of each captured graph that was timed; the
        latest 4,096."""
        super().__init__(**dict.fromkeys(COUNTED_BY_HITS, 0))
        self.eviction_reasons: Counter[EvictionReason] = Counter()
        self.reasons: Counter[Reason] = Counter()
        """Of each call that was no hit."""
        # Two counters, since hits and other calls are counted under different locks.
        self._rows_of_hits: dict[int, int] = {}
        self._rows_of_eager: dict[int, int] = {}

    def record_eager(self, reason: Reason, rows: int = 0) -> bool:
        """Count a call whose answer is eager's.

        Args:
            reason: Why.
            rows: Its number of rows; 0 if unknown.

        Returns:
            Whether it is the first call for that reason.
        """
        if rows.__class__ is not int:
            rows = cells_of(rows)
        with self._lock:
            reasons, by_rows = self.reasons, self._rows_of_eager
            count = reasons[reason] = reasons[reason] + 1
            if rows in by_rows:
                by_rows[rows] += 1
            elif rows > 0 and len(by_rows) < MOST_ROWS:
                by_rows[rows] = 1
        return count == 1

    def record_capture(self, time_ms: float, graph: str = "", gain: Gain | None = None) -> None:
        """Count a successful capture.

        Args:
            time_ms: How long it took, in milliseconds.
            graph: The mode and size of the graph, such as ``FULL 8``.
            gain: What it gains, if it was timed.
        """
        with self._lock:
            if gain is not None:
                self.gains[graph] = gain
                if len(self.gains) > MOST_ROWS:
                    del self.gains[next(iter(self.gains))]
            self.captures += 1
            self.capture_time_ms += time_ms

    def record_state_change(self, what: str) -> None:
        """Count a change of the callable's state after which its graphs did not fit.

        Args:
            what: What changed, in words.
        """
        with self._lock:
            if what in self.state_changes or len(self.state_changes) < _MOST_CHANGES:
                self.state_changes[what] += 1

    def record_capture_failure(self) -> None:
        """Count a capture that made no entry."""
        with self._lock:
            self.capture_failures += 1

    def record_eviction(self, reason: EvictionReason, freed_bytes: int) -> None:
        """Count an evicted graph after its release.

        Args:
            reason: Why it was evicted.
            freed_bytes: The fall in the backend's figures; memory that it shared with other graphs is not freed.
        """
        with self._lock:
            self.evictions += 1
            self.evicted_bytes += freed_bytes
            self.eviction_reasons[reason] += 1

    @property
    def calls(self) -> int:
        """All calls."""
        return self.hits + self.reasons.total()

    @property
    def verifications(self) -> int:
        """Calls that compared a graph with eager, and agreed."""
        return self.reasons[Reason.VERIFIED_NOW]

    @property
    def misses(self) -> int:
        """Calls that no graph served, and for which none was compared."""
        return self.reasons.total() - self.verifications

    @property
    def fallbacks(self) -> int:
        """Misses that captured nothing."""
        return self.misses - self.reasons[Reason.CAPTURED_NOW]

    @property
    def replays(self) -> int:
        """Replays for calls: one for each hit, also where that was served in parts."""
        return self.hits

    @property
    def hit_rate(self) -> float:
        """The share of calls that a graph served, or was compared for; 0.0 before the first call."""
        return (self.hits + self.verifications) / self.calls if self.calls else 0.0

    @property
    def graph_ratio(self) -> float:
        """The share of calls that a graph served, without those that only compared one; 0.0 before the first call."""
        return self.hits / self.calls if self.calls else 0.0

    @property
    def knows_rows(self) -> bool:
        """Whether calls show their real rows; else ``real_rows`` and ``padding_rows`` say nothing."""
        return self._knows_rows

    @property
    def padded_rows(self) -> int:
        """All rows that graphs computed in hits."""
        return self.real_rows + self.padding_rows

    @property
    def padding_ratio(self) -> float:
        """Padding rows as a share of all rows that graphs computed; 0.0 before the first hit, or if real rows are not
        known."""
        return self.padding_rows / self.padded_rows if self.padded_rows else 0.0

    @property
    def hits_by_rows(self) -> dict[int, int]:
        """Hits by number of rows, if known; the first 4,096 different numbers."""
        return self._rows_of_hits.copy() if self._knows_rows else {}

    @property
    def rows(self) -> dict[int, int]:
        """Calls by number of rows, if known. Hits and other calls each count their first 4,096 different numbers."""
        if not self._knows_rows:
            return {}
        return dict(Counter(self._rows_of_hits.copy()) + Counter(self._rows_of_eager.copy()))

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data, for JSON."""
        plain = super().to_dict()
        return plain | {"gains": {graph: gain._asdict() for graph, gain in plain["gains"].items()}}

    def __repr__(self) -> str:
        return (
            f"<CUDAGraphStats {self.calls} calls, {100 * self.graph_ratio:.1f} % by graphs, "
            f"{self.captures} captures, {100 * self.padding_ratio:.1f} % padding>"
        )


class DispatchStats(_Counted):
    """What a dispatcher decided, or several: calls by mode, fallbacks with their reasons, and the time to decide.
    Thread-safe.

    A *fallback* is an eager call for which a graph was wanted; a call that compared a graph with eager is none.

    Args:
        parts: What it begins with: the sum of these.

    Attributes:
        eager: Calls that ran eagerly.
        graph: Calls that a full graph served.
        piecewise: Calls that a piecewise graph served.
        fallbacks: Eager calls for which a graph was wanted.
        dispatch_time_ns: The time of all decisions, in nanoseconds of wall-clock time.
        reasons: Eager calls by reason.
    """

    _derived = ("graph_ratio",)

    def __init__(self, parts: Sequence["DispatchStats"] = ()) -> None:
        self._lock = make_lock()
        self.eager: int = sum(part.eager for part in parts)
        self.graph: int = sum(part.graph for part in parts)
        self.piecewise: int = sum(part.piecewise for part in parts)
        self.fallbacks: int = sum(part.fallbacks for part in parts)
        self.dispatch_time_ns: int = sum(part.dispatch_time_ns for part in parts)
        self.reasons: Counter[Reason] = sum((part.reasons.copy() for part in parts), Counter())

    def record(self, mode: DispatchMode, reason: Reason, dispatch_ns: int) -> None:
        """Count one decided call.

        Args:
            mode: The mode that it ran in.
            reason: Why.
            dispatch_ns: The time that the decision took, in nanoseconds.
        """
        with self._lock:
            self.dispatch_time_ns += dispatch_ns
            if mode is DispatchMode.CUDAGRAPH:
                self.graph += 1
            elif mode is DispatchMode.PIECEWISE:
                self.piecewise += 1
            else:
                self.eager += 1
                self.reasons[reason] += 1
                if reason not in (Reason.DISABLED, Reason.POLICY, Reason.VERIFIED_NOW):
                    self.fallbacks += 1

    @property
    def hits(self) -> int:
        """Calls that a full or piecewise graph served."""
        return self.graph + self.piecewise

    @property
    def total(self) -> int:
        """All decided calls."""
        return self.eager + self.hits

    @property
    def graph_ratio(self) -> float:
        """The share of calls that a full or piecewise graph served, 0.0 before the first call."""
        return self.hits / self.total if self.total else 0.0

    @property
    def avg_dispatch_time_us(self) -> float:
        """The mean time to decide one call in microseconds, 0.0 before the first call."""
        return self.dispatch_time_ns / self.total / 1e3 if self.total else 0.0

    def __repr__(self) -> str:
        return (
            f"<DispatchStats {self.total} calls: {self.graph} graph, {self.piecewise} piecewise, "
            f"{self.eager} eager ({self.fallbacks} fallbacks)>"
        )
