"""Counters of what happened, bounded in memory, with a reason for every step that no graph served."""

import threading
from collections import Counter
from typing import Any

from .modes import DispatchMode
from .reasons import Reason

__all__ = ["CUDAGraphStats", "DispatchStats"]


class CUDAGraphStats:
    """What a set of graphs did: captures, replays, hits, misses, fallbacks, rows, and reasons.

    A *hit* is a call that a graph served; every other call is a *miss*, and a *fallback* is a miss that ran
    eagerly instead of capturing. ``real_rows`` and ``padded_rows`` count the rows of hits before and after
    padding. Thread-safe, where all graphs that count in it are of one pool.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
        self.verifications = 0
        self.real_rows = 0
        self.padded_rows = 0
        self.reasons: Counter[Reason] = Counter()

    def record_hit(self, real_rows: int, padded_rows: int) -> None:
        """Count a call that a graph served. The caller holds the lock of the graph's pool, so that it takes none."""
        self.hits += 1
        self.replays += 1
        self.real_rows += real_rows
        self.padded_rows += padded_rows

    def record_miss(self, reason: Reason) -> None:
        """Count a call that no graph served, and why."""
        with self._lock:
            self.misses += 1
            self.reasons[reason] += 1
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

    def record_evictions(self, count: int) -> None:
        """Count entries released to make room."""
        with self._lock:
            self.evictions += count

    @property
    def calls(self) -> int:
        """All calls."""
        return self.hits + self.misses

    def hit_rate(self) -> float:
        """The share of calls that a graph served; 0.0 before the first call."""
        return self.hits / self.calls if self.calls else 0.0

    def padding_ratio(self) -> float:
        """Padding rows as a share of all rows that graphs computed; 0.0 before the first hit."""
        return 1.0 - self.real_rows / self.padded_rows if self.padded_rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data, for JSON."""
        with self._lock:
            plain = {k: v for k, v in vars(self).items() if not k.startswith("_")}
            plain["reasons"] = {reason.value: n for reason, n in self.reasons.items()}
        return plain | {"hit_rate": self.hit_rate(), "padding_ratio": self.padding_ratio()}

    def __repr__(self) -> str:
        return (
            f"<CUDAGraphStats {self.calls} calls, {100 * self.hit_rate():.1f} % hits, "
            f"{self.captures} captures, {100 * self.padding_ratio():.1f} % padding>"
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
