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
    """Each reading has the counters of that moment, by reason and by callable; counters are monotonic sums."""
    from opentelemetry.sdk.metrics.export import Gauge, InMemoryMetricReader, Sum

    one, other, reader = served(), served(), InMemoryMetricReader()
    meter = sdk.MeterProvider([reader]).get_meter("served")
    assert gd.metrics.OpenTelemetryMetrics(one, "one", meter=meter).add(other, "other")
    one(torch.randn(7, 4))
    found = read(reader)
    hits = {point.attributes["callable"]: point.value for point in found["graphdispatch.hits"].data.data_points}
    assert hits == {"one": one.stats.hits, "other": other.stats.hits}
    reasons = {
        point.attributes["reason"]: point.value
        for point in found["graphdispatch.eager_steps"].data.data_points
        if point.attributes["callable"] == "one"
    }
    assert reasons == {reason.value: number for reason, number in one.stats.reasons.items()}
    held = sum(p.value for p in found["graphdispatch.bytes"].data.data_points if p.attributes["callable"] == "one")
    assert held == one.memory_report().total
    assert isinstance(found["graphdispatch.hits"].data, Sum)
    assert found["graphdispatch.hits"].data.is_monotonic
    assert isinstance(found["graphdispatch.graphs"].data, Gauge)
    assert (found["graphdispatch.bytes"].unit, found["graphdispatch.capture_seconds"].unit) == ("By", "s")
    names = {name.removesuffix("_total") for name, *_ in exported(gd.metrics.PrometheusCollector(one))}
    assert {name.replace(".", "_") for name in found} == names


def test_without_a_provider_nothing_happens() -> None:
    """The global provider may be none; and what has no counters is refused."""
    assert gd.metrics.OpenTelemetryMetrics(served(), "alone")
    with pytest.raises(gd.ConfigError, match="has no counters"):
        gd.metrics.OpenTelemetryMetrics(torch.nn.ReLU())
