"""What served callables count, for Prometheus and OpenTelemetry; read when they collect, and never at a call.

``PrometheusCollector`` needs the extra ``metrics``, ``OpenTelemetryMetrics`` the extra ``otel``.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from .errors import ConfigError, shown
from .runtime.memory import MemoryReport, memory_report
from .stats import HitCounts

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, Observation
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
else:
    Collector = object  # a registry calls no more of it than ``collect``

_UNITS = {"bytes": "By", "seconds": "s"}


class Metric(NamedTuple):
    """One metric: an attribute of the counters of what is served or, for a gauge, of the report on its memory.

    ``of``: the attribute, if it has another name. ``make``: what makes of it the value, or the values by label.
    ``labels``: those besides ``callable``. A counter only grows, a gauge does not.
    """

    name: str
    meaning: str
    of: str = ""
    make: Callable[[Any], Any] = copy
    labels: tuple[str, ...] = ()
    is_counter: bool = True


def _by_kind(to_dict: Callable[[], dict[str, Any]]) -> dict[str, int]:
    """The figures of a report on memory that are bytes."""
    return {name.removesuffix("_bytes"): held for name, held in to_dict().items() if name.endswith("_bytes")}


METRICS = (
    *(Metric(one.name, one.metadata["meaning"]) for one in fields(HitCounts)),
    Metric("eager_steps", "Calls whose answer is eager's, by reason.", "reasons", labels=("reason",)),
    Metric("captures", "Graphs that were captured."),
    Metric("capture_failures", "Captures that made no graph."),
    Metric("capture_seconds", "Time spent in successful captures.", "capture_time_ms", lambda ms: ms * 1e-3),
    Metric("evictions", "Graphs that were evicted, by cause.", "eviction_reasons", labels=("cause",)),
    Metric("evicted_bytes", "Bytes that evictions freed."),
    Metric("dispatch_seconds", "Time that a dispatcher took to decide.", "dispatch_time_ns", lambda ns: ns * 1e-9),
    Metric("graphs", "Graphs that are held now, by size and mode.", "", Counter, ("size", "mode"), False),
    Metric("bytes", "Bytes that graphs hold now, by kind.", "to_dict", _by_kind, ("kind",), False),
)
"""All of them. A front end that does not count one has no samples of it, nor one whose calls arrive padded of rows."""
_OF_ROWS = [one.name for one in fields(HitCounts) if one.metadata["of_rows"]]


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

    def _samples(self, *metrics: Metric) -> Iterator[tuple[Metric, list[str], float]]:
        """The samples of metrics now, each with a text for the callable and for each label."""
        served = self._served.items()
        counted = {name: _stats(one) for name, one in served}
        held = {name: _memory(one) for name, one in served if not all(metric.is_counter for metric in metrics)}
        for metric in metrics:
            for name, source in (counted if metric.is_counter else held).items():
                value = getattr(source, metric.of or metric.name, None)
                if value is not None and (metric.name not in _OF_ROWS or getattr(source, "knows_rows", True)):
                    values = metric.make(value) if metric.labels else {(): metric.make(value)}
                    for labels, number in values.items():
                        texts = labels if isinstance(labels, tuple) else (labels,)
                        yield metric, [name, *map(str, texts)], number


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
        families = {}
        for metric in METRICS:
            make = self._families.CounterMetricFamily if metric.is_counter else self._families.GaugeMetricFamily
            labels = "callable", *metric.labels
            families[metric] = make(f"graphdispatch_{metric.name}", metric.meaning, labels=labels)
        for metric, texts, number in self._samples(*METRICS):
            families[metric].add_metric(texts, number)
        yield from families.values()


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
        for metric in METRICS:
            make = meter.create_observable_counter if metric.is_counter else meter.create_observable_gauge
            unit = _UNITS.get(metric.name.rpartition("_")[2], "1")
            make(f"graphdispatch.{metric.name}", [partial(self._observe, metric)], unit, metric.meaning)

    def _observe(self, metric: Metric, _: Any) -> "Iterator[Observation]":
        for _metric, texts, number in self._samples(metric):
            yield self._api.Observation(number, dict(zip(("callable", *metric.labels), texts, strict=True)))


def _library(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"these metrics need {name.partition('.')[0]}; pip install '.[{extra}]'") from error


def _stats(served: Any) -> Any:
    """The counters of a front end. A wrapper's attributes are its runnable's, so its own method goes first."""
    read = getattr(type(served), "get_stats", None)
    stats = read(served) if read is not None else getattr(served, "stats", None)
    if not isinstance(getattr(stats, "reasons", None), Counter):
        raise ConfigError(
            "served must be what graphed() returns, a wrapper, a manager, a dispatcher or a served model of "
            f"transformers, got {shown(served)}; it has no counters"
        )
    return stats


def _memory(served: Any) -> MemoryReport | None:
    """What a front end's graphs hold; a dispatcher's are others', so it counts them alone. None if it is not known."""
    read = getattr(type(served), "memory_report", None)
    if read is None:
        entries = getattr(served, "entries", None)
        return None if entries is None else memory_report({entry for _, entry in entries})
    report: MemoryReport = read(served)
    return report
