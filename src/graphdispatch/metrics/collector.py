"""``PrometheusCollector``: reads the counters of served callables when Prometheus asks, and never at a call."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

from ..api.stats import DispatchStats
from ..errors import ConfigError, shown
from ..memory.accounting import MemoryReport, memory_report
from ..stats import CUDAGraphStats

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("graphdispatch.metrics needs prometheus_client; install graphdispatch[metrics]") from error

__all__ = ["PrometheusCollector"]

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
_OF_REQUESTS = ("hits", "captures", "capture_failures", "reasons")  # what counters of whole requests tell of steps
_BY_CAUSE = {
    "eager_steps": ("Calls whose answer is eager's, by reason.", "reason"),
    "evictions": ("Graphs that were evicted, by cause.", "cause"),
}


class PrometheusCollector(Collector):
    """The metrics ``graphdispatch_*`` of one or more served callables, each under its label ``callable``.

    ``prometheus_client.REGISTRY.register(PrometheusCollector(serve, name="decoder"))`` exports them; further callables
    of the process come in by ``add``, since a registry takes each metric from one collector. ``served`` is what
    ``graphed`` returns, a wrapper, a manager, a dispatcher, or a ``GraphedGeneration`` or ``GraphedBatching`` of
    transformers, of which steps are counted; it is kept alive. A scrape reads counters that are there
    anyway, and the allocator's figures; calls pay nothing for it. Counters of one scrape may be from slightly different
    moments. They start again at zero after ``stats.reset()``, as after a restart. Thread-safe.

    Raises ``ConfigError`` for an object without counters, and for a name that is taken.
    """

    def __init__(self, served: Any, name: str = "default") -> None:
        self._served: dict[str, Any] = {}
        self.add(served, name)

    def add(self, served: Any, name: str) -> Self:
        """Export the metrics of one more callable, under the label ``callable=name``; returns the collector."""
        if not isinstance(name, str) or not name or name in self._served:
            taken = ", ".join(map(repr, self._served)) or "none"
            raise ConfigError(f"name must be a text that no other callable has, got {shown(name)}; taken: {taken}")
        _stats(served)
        self._served = self._served | {name: served}  # a scrape may be going over the old one
        return self

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The metrics now; a registry calls it at each scrape."""
        served = self._served.items()
        counted = {name: _counters(_stats(one)) for name, one in served}
        for metric, told in _COUNTED.items():
            family = CounterMetricFamily(f"graphdispatch_{metric}", told, labels=[_CALLABLE])
            for name, counters in counted.items():
                if metric in counters:
                    family.add_metric([name], counters[metric])
            yield family
        for metric, (told, label) in _BY_CAUSE.items():
            family = CounterMetricFamily(f"graphdispatch_{metric}", told, labels=[_CALLABLE, label])
            for name, counters in counted.items():
                for cause, number in counters.get(metric, {}).items():
                    family.add_metric([name, str(cause)], number)
            yield family
        graphs = GaugeMetricFamily(
            "graphdispatch_graphs", "Graphs that are held now, by size and mode.", labels=[_CALLABLE, "size", "mode"]
        )
        memory = GaugeMetricFamily(
            "graphdispatch_bytes", "Bytes that graphs hold now, by kind.", labels=[_CALLABLE, "kind"]
        )
        for name, one in served:
            report = _memory(one)
            for (size, mode), number in Counter((entry.size, entry.mode) for entry in report.entries).items():
                graphs.add_metric([name, str(size), mode], number)
            for kind in ("pool", "input", "ring", "entry", "driver"):
                memory.add_metric([name, kind], getattr(report, f"{kind}_bytes"))
        yield from (graphs, memory)


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


def _memory(served: Any) -> MemoryReport:
    """What a door's graphs hold; those of a dispatcher are other doors', so it counts them alone."""
    ask = getattr(type(served), "memory_report", None)
    entries = () if ask is not None else getattr(served, "entries", ())
    report: MemoryReport = memory_report({entry for _, entry in entries}) if ask is None else ask(served)
    return report
