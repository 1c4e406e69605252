"""``PrometheusCollector``: reads the counters of served callables when Prometheus asks, and never at a call."""

from collections.abc import Iterator

from .figures import Figures

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("PrometheusCollector needs prometheus_client; install graphdispatch[metrics]") from error

__all__ = ["PrometheusCollector"]


class PrometheusCollector(Figures, Collector):
    """The metrics ``graphdispatch_*`` of one or more served callables, each under its label ``callable``.

    ``prometheus_client.REGISTRY.register(PrometheusCollector(serve, name="decoder"))`` exports them; further callables
    of the process come in by ``add``, since a registry takes each metric from one collector. ``served`` is what
    ``graphed`` returns, a wrapper, a manager, a dispatcher, or a ``GraphedGeneration`` of transformers, of which steps
    are counted; it is kept alive. A scrape reads counters that are there anyway, and the allocator's figures; calls pay
    nothing for it. Counters of one scrape may be from slightly different moments. They start again at zero after
    ``stats.reset()``, as after a restart. Thread-safe.

    Raises ``ConfigError`` for an object without counters, and for a name that is taken.
    """

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The metrics now; a registry calls it at each scrape."""
        for metric in self.metrics():
            make = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            family = make(f"graphdispatch_{metric.name}", metric.told, labels=metric.labels)
            for labels, value in metric.samples:
                family.add_metric(labels, value)
            yield family
