"""``Figures``: what served callables count, as metrics for any system; read when it asks, never at a call."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

from ..api.stats import DispatchStats
from ..errors import ConfigError, shown
from ..memory.accounting import MemoryReport, memory_report
from ..stats import CUDAGraphStats

__all__ = ["Figures", "Metric"]

_CALLABLE = "callable"
_COUNTED = {
    "hits": "Calls that a graph served.",
    "real_rows": "Rows of hits before padding.",
    "padding_rows": "Padding rows that graphs computed in hits.",
    "captures": "Graphs that were captured.",
    "capture_failures": "Captures that made no graph.",
    "capture_seconds": "Time spent in successful captures.",
    "evicted_bytes": "Bytes that evictions freed.",
    "dispatch_seconds": "Time that a dispatcher took to decide.",
}
# What counters of whole requests tell of steps.
_OF_REQUESTS = ("hits", "captures", "capture_failures", "capture_seconds", "reasons")
_BY_CAUSE = {
    "eager_steps": ("Calls whose answer is eager's, by reason.", "reason"),
    "evictions": ("Graphs that were evicted, by cause.", "cause"),
}


class Metric(NamedTuple):
    """One metric now: its samples, each with a text for each of ``labels``. A counter only grows, a gauge does not."""

    name: str
    told: str
    labels: tuple[str, ...]
    is_counter: bool
    samples: Sequence[tuple[tuple[str, ...], float]]


class Figures:
    """The metrics of one or more served callables, each under its label ``callable``. Thread-safe."""

    def __init__(self, served: Any, name: str = "default") -> None:
        self._served: dict[str, Any] = {}
        self.add(served, name)

    def add(self, served: Any, name: str) -> Self:
        """Export the metrics of one more callable, under the label ``callable=name``; returns the same object."""
        if not isinstance(name, str) or not name or name in self._served:
            taken = ", ".join(map(repr, self._served)) or "none"
            raise ConfigError(f"name must be a text that no other callable has, got {shown(name)}; taken: {taken}")
        _stats(served)
        self._served = self._served | {name: served}  # a scrape may be going over the old one
        return self

    def metrics(self) -> Iterator[Metric]:
        """All metrics now, always the same ones in the same order."""
        served = self._served.items()
        counted = {name: _counters(_stats(one)) for name, one in served}
        for metric, told in _COUNTED.items():
            found = [((name,), counters[metric]) for name, counters in counted.items() if metric in counters]
            yield Metric(metric, told, (_CALLABLE,), True, found)
        for metric, (told, label) in _BY_CAUSE.items():
            causes = [
                ((name, str(cause)), number)
                for name, counters in counted.items()
                for cause, number in counters.get(metric, {}).items()
            ]
            yield Metric(metric, told, (_CALLABLE, label), True, causes)
        graphs, memory = [], []
        for name, one in served:
            report = _memory(one)
            if report is None:
                continue
            for (size, mode), number in Counter((entry.size, entry.mode) for entry in report.entries).items():
                graphs.append(((name, str(size), mode), number))
            for kind in ("pool", "input", "ring", "entry", "driver"):
                memory.append(((name, kind), getattr(report, f"{kind}_bytes")))
        yield Metric(
            "graphs", "Graphs that are held now, by size and mode.", (_CALLABLE, "size", "mode"), False, graphs
        )
        yield Metric("bytes", "Bytes that graphs hold now, by kind.", (_CALLABLE, "kind"), False, memory)


def _stats(served: Any) -> Any:
    """The counters of a door. A wrapper's attributes are its runnable's, so its own method is asked first."""
    ask = getattr(type(served), "get_stats", None)
    stats = ask(served) if ask is not None else getattr(served, "stats", None)
    if not isinstance(stats, CUDAGraphStats | DispatchStats) and not all(hasattr(stats, name) for name in _OF_REQUESTS):
        raise ConfigError(
            "served must be what graphed() returns, a wrapper, a manager, a dispatcher or a served model of "
            f"transformers, got {shown(served)}; it has no counters"
        )
    return stats


def _counters(stats: Any) -> dict[str, Any]:
    """The counters by the metric that shows them."""
    if isinstance(stats, DispatchStats):
        hits, seconds = stats.graph + stats.piecewise, stats.dispatch_time_ns * 1e-9
        return {"hits": hits, "eager_steps": stats.to_dict()["reasons"], "dispatch_seconds": seconds}
    if not isinstance(stats, CUDAGraphStats):
        plain = {name: getattr(stats, name) for name in _OF_REQUESTS}
        return plain | {"eager_steps": {reason.value: number for reason, number in plain.pop("reasons").items()}}
    plain = stats.to_dict()
    shown_as_they_are = ("hits", "real_rows", "captures", "capture_failures", "evicted_bytes")
    return {name: plain[name] for name in shown_as_they_are} | {
        "padding_rows": plain["padded_rows"] - plain["real_rows"],
        "capture_seconds": plain["capture_time_ms"] * 1e-3,
        "eager_steps": plain["reasons"],
        "evictions": plain["eviction_reasons"],
    }


def _memory(served: Any) -> MemoryReport | None:
    """What a door's graphs hold; those of a dispatcher are other doors', so it counts them alone. None if it cannot
    tell."""
    ask = getattr(type(served), "memory_report", None)
    if ask is None:
        entries = getattr(served, "entries", None)
        return None if entries is None else memory_report({entry for _, entry in entries})
    report: MemoryReport = ask(served)
    return report
