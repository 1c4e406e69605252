"""The metrics for OpenTelemetry: those of Prometheus, read by a real reader of the SDK."""

from typing import Any

import pytest
import torch

import graphdispatch as gd

from .test_metrics import exported, served

sdk = pytest.importorskip("opentelemetry.sdk.metrics")


def read(reader: Any) -> dict[str, Any]:
    """The metrics of one collection by name."""
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


def test_the_figures_are_those_of_the_counters() -> None:
    """Each reading has what Prometheus would scrape at that moment; counters are monotonic sums."""
    from opentelemetry.sdk.metrics.export import Gauge, InMemoryMetricReader, Sum

    one, other, reader = served(), served(), InMemoryMetricReader()
    meter = sdk.MeterProvider([reader]).get_meter("served")
    assert gd.metrics.OpenTelemetryMetrics(one, "one", meter=meter).add(other, "other")
    one(torch.randn(7, 4))
    found = read(reader)
    points = {
        (name.replace(".", "_"), *point.attributes.values()): point.value
        for name, metric in found.items()
        for point in metric.data.data_points
    }
    scraped = exported(gd.metrics.PrometheusCollector(one, "one").add(other, "other"))
    assert points == {(name.removesuffix("_total"), *labels): value for (name, *labels), value in scraped.items()}
    assert isinstance(found["graphdispatch.hits"].data, Sum)
    assert found["graphdispatch.hits"].data.is_monotonic
    assert isinstance(found["graphdispatch.graphs"].data, Gauge)
    assert (found["graphdispatch.bytes"].unit, found["graphdispatch.capture_seconds"].unit) == ("By", "s")


def test_without_a_provider_nothing_happens() -> None:
    """The global provider may be none; and what has no counters is refused."""
    assert gd.metrics.OpenTelemetryMetrics(served(), "alone")
    with pytest.raises(gd.ConfigError, match="has no counters"):
        gd.metrics.OpenTelemetryMetrics(torch.nn.ReLU())
