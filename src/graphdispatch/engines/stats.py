"""Counters of what the dispatchers decided."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..copying import Unlocked, make_lock
from ..reasons import Reason
from ..showing import html_table
from .policies import DispatchMode

__all__ = ["DispatchStats"]


class DispatchStats(Unlocked):
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
    def total(self) -> int:
        """All decided calls."""
        return self.eager + self.graph + self.piecewise

    @property
    def graph_ratio(self) -> float:
        """The share of calls that a full or piecewise graph served, 0.0 before the first call."""
        return (self.graph + self.piecewise) / self.total if self.total else 0.0

    @property
    def avg_dispatch_time_us(self) -> float:
        """The mean time to decide one call in microseconds, 0.0 before the first call."""
        return self.dispatch_time_ns / self.total / 1e3 if self.total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data, for JSON."""
        with self._lock:
            plain = {k: v for k, v in vars(self).items() if not k.startswith("_")}
            plain["reasons"] = {reason.value: n for reason, n in self.reasons.items()}
        return plain | {"graph_ratio": self.graph_ratio}

    def _repr_html_(self) -> str:
        rows = [(reason.value, number, reason.text) for reason, number in self.reasons.copy().most_common()]
        return html_table(repr(self)[1:-1], ("reason of eager calls", "calls", "meaning"), rows)

    def __repr__(self) -> str:
        return (
            f"<DispatchStats {self.total} calls: {self.graph} graph, {self.piecewise} piecewise, "
            f"{self.eager} eager ({self.fallbacks} fallbacks)>"
        )
