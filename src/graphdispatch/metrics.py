"""What served callables count, for Prometheus and OpenTelemetry; read when they ask, and never at a call.

``PrometheusCollector`` needs the extra ``metrics``, ``OpenTelemetryMetrics`` the extra ``otel``.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from .errors import ConfigError, shown
from .runtime.cache import MemoryReport, memory_report
from .stats import CUDAGraphStats, DispatchStats

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, Observation
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
else:
    Collector = object  # a registry asks it for no more than ``collect``

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
_BY_CAUSE = {
    "eager_steps": ("Calls whose answer is eager's, by reason.", "reason"),
    "evictions": ("Graphs that were evicted, by cause.", "cause"),
}
_OF_REQUESTS = ("hits", "captures", "capture_failures", "capture_seconds", "reasons")
"""What the counters of a served model of transformers say of its steps."""
_MEMORY = ("pool", "input", "entry", "driver")
_UNITS = {"bytes": "By", "seconds": "s"}


class _Metric(NamedTuple):
    """One metric now: its samples, each with a text for each of ``labels``. A counter only grows, a gauge does not."""

    name: str
    meaning: str
    labels: tuple[str, ...]
    is_counter: bool
    samples: Sequence[tuple[tuple[str, ...], float]]


class _Metrics:
    """The metrics of one or more served callables, each under its label ``callable``. Thread-safe."""

    def __init__(self, served: Any, name: str = "default") -> None:
        self._served: dict[str, Any] = {}
        self.add(served, name)

    def add(self, served: Any, name: str) -> Self:
        """Export the metrics of one more callable.

        Args:
            served: What has counters, as for the constructor; it is kept alive.
            name: Its label ``callable``, which no other one has.

        Returns:
            The same object.

        Raises:
            ConfigError: If ``served`` has no counters, or the name is taken or no text.
        """
        if not isinstance(name, str) or not name or name in self._served:
            taken = ", ".join(map(repr, self._served)) or "none"
            raise ConfigError(f"name must be a text that no other callable has, got {shown(name)}; taken: {taken}")
        _stats(served)
        self._served = self._served | {name: served}  # a scrape may be going over the old one
        return self

    def _metrics(self) -> Iterator[_Metric]:
        """All metrics now, always the same ones in the same order."""
        served = self._served.items()
        counted = {name: _counters(_stats(one)) for name, one in served}
        for metric, meaning in _COUNTED.items():
            found = [((name,), counters[metric]) for name, counters in counted.items() if metric in counters]
            yield _Metric(metric, meaning, ("callable",), True, found)
        for metric, (meaning, label) in _BY_CAUSE.items():
            causes = [
                ((name, str(cause)), number)
                for name, counters in counted.items()
                for cause, number in counters.get(metric, {}).items()
            ]
            yield _Metric(metric, meaning, ("callable", label), True, causes)
        reports = [(name, report) for name, one in served if (report := _memory(one)) is not None]
        graphs = [
            ((name, str(size), mode), number)
            for name, report in reports
            for (size, mode), number in Counter(report.graphs).items()
        ]
        yield _Metric(
            "graphs", "Graphs that are held now, by size and mode.", ("callable", "size", "mode"), False, graphs
        )
        held = [((name, kind), getattr(report, f"{kind}_bytes")) for name, report in reports for kind in _MEMORY]
        yield _Metric("bytes", "Bytes that graphs hold now, by kind.", ("callable", "kind"), False, held)


class PrometheusCollector(_Metrics, Collector):
    """The metrics ``graphdispatch_*`` of one or more served callables, each under its label ``callable``.

    ``prometheus_client.REGISTRY.register(PrometheusCollector(serve, name="decoder"))`` exports them; further callables
    of the process come in by ``add``, since a registry takes each metric from one collector. A scrape reads counters
    that are there anyway, and the allocator's figures; calls pay nothing for it. Counters of one scrape may be from
    slightly different moments. They start again at zero after ``stats.reset()``, as after a restart. Thread-safe.

    Args:
        served: What ``graphed`` returns, a wrapper, a manager, a dispatcher, or a ``GraphedGeneration`` of
            transformers, of which steps are counted; it is kept alive.
        name: Its label ``callable``.

    Raises:
        ConfigError: If ``served`` has no counters, or the name is no text.
        ImportError: If prometheus_client is not installed.
    """

    def __init__(self, served: Any, name: str = "default") -> None:
        self._families = _library("prometheus_client.core", "metrics")
        super().__init__(served, name)

    def collect(self) -> "Iterator[CounterMetricFamily | GaugeMetricFamily]":
        """The metrics now; a registry calls it at each scrape."""
        for metric in self._metrics():
            make = self._families.CounterMetricFamily if metric.is_counter else self._families.GaugeMetricFamily
            family = make(f"graphdispatch_{metric.name}", metric.meaning, labels=metric.labels)
            for labels, value in metric.samples:
                family.add_metric(labels, value)
            yield family


class OpenTelemetryMetrics(_Metrics):
    """The metrics ``graphdispatch.*`` of one or more served callables, as observable instruments of a meter.

    The instruments, their attributes and their values are those of ``PrometheusCollector``. Make one object for a meter
    and ``add`` further callables, each under its attribute ``callable``. A reader's collection reads counters that are
    there anyway; calls pay nothing for it. Thread-safe.

    Args:
        served: What has counters, as for ``PrometheusCollector``; it is kept alive.
        name: Its attribute ``callable``.
        meter: Where the instruments are made; by default a meter of the global provider.

    Raises:
        ConfigError: If ``served`` has no counters, or the name is no text.
        ImportError: If opentelemetry is not installed.
    """

    def __init__(self, served: Any, name: str = "default", *, meter: "Meter | None" = None) -> None:
        self._api = _library("opentelemetry.metrics", "otel")
        super().__init__(served, name)
        meter = self._api.get_meter("graphdispatch") if meter is None else meter
        for place, metric in enumerate(self._metrics()):
            make = meter.create_observable_counter if metric.is_counter else meter.create_observable_gauge
            unit = _UNITS.get(metric.name.rpartition("_")[2], "1")
            make(f"graphdispatch.{metric.name}", [partial(self._observe, place)], unit, metric.meaning)

    def _observe(self, place: int, _: Any) -> "Iterator[Observation]":
        metric = next(islice(self._metrics(), place, None))
        for labels, value in metric.samples:
            yield self._api.Observation(value, dict(zip(metric.labels, labels, strict=True)))


def _library(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"these metrics need {name.partition('.')[0]}; pip install '.[{extra}]'") from error


def _stats(served: Any) -> Any:
    """The counters of a front end. A wrapper's attributes are its runnable's, so its own method goes first."""
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
    return plain | {
        "padding_rows": plain["padded_rows"] - plain["real_rows"],
        "capture_seconds": plain["capture_time_ms"] * 1e-3,
        "eager_steps": plain["reasons"],
        "evictions": plain["eviction_reasons"],
    }


def _memory(served: Any) -> MemoryReport | None:
    """What a front end's graphs hold; a dispatcher's are others', so it counts them alone. None if it is not known."""
    ask = getattr(type(served), "memory_report", None)
    if ask is None:
        entries = getattr(served, "entries", None)
        return None if entries is None else memory_report({entry for _, entry in entries})
    report: MemoryReport = ask(served)
    return report
