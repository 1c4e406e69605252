"""``OpenTelemetryMetrics``: the same metrics, read when a reader of OpenTelemetry asks."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from .figures import Figures

try:
    from opentelemetry.metrics import Meter, Observation, get_meter
except ImportError as error:
    raise ImportError("OpenTelemetryMetrics needs opentelemetry; install graphdispatch[otel]") from error

__all__ = ["OpenTelemetryMetrics"]

_UNITS = {"bytes": "By", "seconds": "s"}


class OpenTelemetryMetrics(Figures):
    """The metrics ``graphdispatch.*`` of one or more served callables, as observable instruments of ``meter``.

    ``meter`` is that of the global provider by default. The instruments, their attributes and their values are those of
    ``PrometheusCollector``. Make one object for a meter and ``add`` further callables, each under its attribute
    ``callable``; they are kept alive. A reader's collection reads counters that are there anyway; calls pay nothing for
    it. Thread-safe. Raises ``ConfigError`` for an object without counters, and for a name that is taken.
    """

    def __init__(self, served: Any, name: str = "default", *, meter: Meter | None = None) -> None:
        super().__init__(served, name)
        meter = get_meter("graphdispatch") if meter is None else meter
        for place, metric in enumerate(self.metrics()):
            make = meter.create_observable_counter if metric.is_counter else meter.create_observable_gauge
            unit = _UNITS.get(metric.name.rpartition("_")[2], "1")
            make(f"graphdispatch.{metric.name}", [partial(self._observe, place)], unit, metric.told)

    def _observe(self, place: int, _: Any) -> Iterator[Observation]:
        metric = next(islice(self.metrics(), place, None))
        for labels, value in metric.samples:
            yield Observation(value, dict(zip(metric.labels, labels, strict=True)))
