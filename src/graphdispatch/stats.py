"""Counters of what happened, bounded in memory, with a reason for every step that no graph served."""

import threading
from collections import Counter, deque
from collections.abc import Hashable
from enum import StrEnum
from typing import Any, NamedTuple

from .descriptors import BatchDescriptor
from .modes import DispatchMode
from .reasons import Reason

__all__ = ["CUDAGraphStats", "DispatchStats", "Eviction", "EvictionReason"]

_MOST_ROWS = 4096  # different numbers of rows that are counted apart
_MOST_EVICTIONS = 64  # that are remembered one by one


class EvictionReason(StrEnum):
    """Why a graph was let go."""

    COUNT = "count"
    """There were as many graphs as may be kept."""
    BYTES = "bytes"
    """The graphs held as many bytes as they may."""
    REPLACED = "replaced"
    """Another graph was captured for its key."""
    STALE = "stale"
    """Weights or a workspace moved, or a module changed its mode."""
    INVALIDATED = "invalidated"
    """``invalidate()`` said that it is stale."""
    ASLEEP = "asleep"
    """``sleep()`` released all graphs."""
    OUT_OF_MEMORY = "out_of_memory"
    """A capture found no memory left on the device."""
    DROPPED = "dropped"
    """Its owner had no more use for it."""


class Eviction(NamedTuple):
    """A graph that was evicted: plain data, so that remembering it keeps no memory alive.

    ``freed_bytes`` is what the backend's figures fell by when it was released: of memory that graphs share, nothing.
    ``tag`` is what ``invalidate(tag)`` was told.
    """

    key: Hashable
    descriptor: BatchDescriptor
    replays: int
    capture_time_ms: float
    freed_bytes: int
    reason: EvictionReason
    tag: str = ""


class CUDAGraphStats:
    """What a set of graphs did: captures, replays, hits, misses, fallbacks, rows, and reasons.

    A *hit* is a call that a graph served; every other call is a *miss*, and a *fallback* is a miss that ran
    eagerly instead of capturing. ``real_rows`` and ``padded_rows`` count the rows of hits before and after
    padding. ``knows_rows=False`` says that calls arrive padded, so that their real rows are unknown. Thread-safe, where
    all graphs that count in it are of one pool.
    """

    def __init__(self, *, knows_rows: bool = True) -> None:
        self._lock = threading.Lock()
        self._knows_rows = knows_rows
        self.reset()

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.captures = 0
        self.capture_failures = 0
        self.capture_time_ms = 0.0
        self.replays = 0
        self.hits = 0
        self.misses = 0
        self.fallbacks = 0
        self.evictions = 0
        self.evicted_bytes = 0
        self._last_evictions: deque[Eviction] = deque(maxlen=_MOST_EVICTIONS)
        self.verifications = 0
        self.real_rows = 0
        self.padded_rows = 0
        self.reasons: Counter[Reason] = Counter()
        # Two, since hits and misses are counted under different locks.
        self._rows_of_hits: dict[int, int] = {}
        self._rows_of_misses: dict[int, int] = {}

    def record_hit(self, real_rows: int, padded_rows: int) -> None:
        """Count a call that a graph served. The caller holds the lock of the graph's pool, so that it takes none."""
        self.hits += 1
        self.replays += 1
        self.real_rows += real_rows
        self.padded_rows += padded_rows
        try:
            self._rows_of_hits[real_rows] += 1
        except KeyError:
            if len(self._rows_of_hits) < _MOST_ROWS:
                self._rows_of_hits[real_rows] = 1

    def record_miss(self, reason: Reason, rows: int = 0) -> None:
        """Count a call that no graph served, and why; ``rows`` is its number of rows, if known."""
        with self._lock:
            self.misses += 1
            self.reasons[reason] += 1
            if rows > 0 and (rows in self._rows_of_misses or len(self._rows_of_misses) < _MOST_ROWS):
                self._rows_of_misses[rows] = self._rows_of_misses.get(rows, 0) + 1
            if reason is Reason.VERIFIED_NOW:
                self.verifications += 1
            elif reason is not Reason.CAPTURED_NOW:
                self.fallbacks += 1

    def record_capture(self, time_ms: float) -> None:
        """Count a successful capture."""
        with self._lock:
            self.captures += 1
            self.capture_time_ms += time_ms

    def record_capture_failure(self) -> None:
        """Count a capture that made no entry."""
        with self._lock:
            self.capture_failures += 1

    def record_eviction(self, eviction: Eviction) -> None:
        """Count a graph that was released since it was evicted."""
        with self._lock:
            self.evictions += 1
            self.evicted_bytes += eviction.freed_bytes
            self._last_evictions.append(eviction)

    @property
    def last_evictions(self) -> tuple[Eviction, ...]:
        """The latest 64 evictions, the oldest first."""
        with self._lock:
            return tuple(self._last_evictions)

    @property
    def calls(self) -> int:
        """All calls."""
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float:
        """The share of calls that a graph served; 0.0 before the first call."""
        return self.hits / self.calls if self.calls else 0.0

    @property
    def padding_ratio(self) -> float:
        """Padding rows as a share of all rows that graphs computed; 0.0 before the first hit."""
        return 1.0 - self.real_rows / self.padded_rows if self.padded_rows else 0.0

    @property
    def rows(self) -> dict[int, int]:
        """Calls by number of rows, where that is known: the first 4,096 different numbers of hits, and of misses."""
        if not self._knows_rows:
            return {}
        return dict(Counter(self._rows_of_hits.copy()) + Counter(self._rows_of_misses.copy()))

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data, for JSON."""
        with self._lock:
            plain = {k: v for k, v in vars(self).items() if not k.startswith("_")}
            plain["reasons"] = {reason.value: n for reason, n in self.reasons.items()}
        return plain | {"hit_rate": self.hit_rate, "padding_ratio": self.padding_ratio}

    def __repr__(self) -> str:
        return (
            f"<CUDAGraphStats {self.calls} calls, {100 * self.hit_rate:.1f} % hits, "
            f"{self.captures} captures, {100 * self.padding_ratio:.1f} % padding>"
        )


class DispatchStats:
    """What a dispatcher decided: calls by mode, fallbacks with their reasons, and the time to decide.

    A *fallback* is an eager call for which a graph was wanted. Times are wall time in nanoseconds. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.eager = 0
        self.graph = 0
        self.piecewise = 0
        self.fallbacks = 0
        self.dispatch_time_ns = 0
        self.reasons: Counter[Reason] = Counter()

    def record(self, mode: DispatchMode, reason: Reason, dispatch_ns: int) -> None:
        """Count one decided call."""
        with self._lock:
            self.dispatch_time_ns += dispatch_ns
            if mode is DispatchMode.CUDAGRAPH:
                self.graph += 1
            elif mode is DispatchMode.PIECEWISE:
                self.piecewise += 1
            else:
                self.eager += 1
                self.reasons[reason] += 1
                if reason not in (Reason.DISABLED, Reason.POLICY):
                    self.fallbacks += 1

    @property
    def total(self) -> int:
        """All decided calls."""
        return self.eager + self.graph + self.piecewise

    @property
    def graph_ratio(self) -> float:
        """The share of calls that a full or piecewise graph served; 0.0 before the first call."""
        return (self.graph + self.piecewise) / self.total if self.total else 0.0

    @property
    def avg_dispatch_time_us(self) -> float:
        """Mean time to decide one call, in microseconds; 0.0 before the first call."""
        return self.dispatch_time_ns / self.total / 1e3 if self.total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data, for JSON."""
        with self._lock:
            plain = {k: v for k, v in vars(self).items() if not k.startswith("_")}
            plain["reasons"] = {reason.value: n for reason, n in self.reasons.items()}
        return plain | {"graph_ratio": self.graph_ratio}

    def __repr__(self) -> str:
        return (
            f"<DispatchStats {self.total} calls: {self.graph} graph, {self.piecewise} piecewise, "
            f"{self.eager} eager ({self.fallbacks} fallbacks)>"
        )
