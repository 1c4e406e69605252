"""The metrics for Prometheus and OpenTelemetry: every counter as it is, from every front end."""

import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch.stats import HitCounts

from ..helpers import check_rows, in_threads, with_options

prometheus = pytest.importorskip("prometheus_client")
MONITORING = Path(__file__).resolve().parents[2] / "contrib" / "monitoring"


def served(**options: Any) -> gd.Graphed[..., Any]:
    """A callable with room for two graphs, which has captured, padded, evicted and refused."""
    layer = torch.nn.Linear(4, 4).eval().requires_grad_(False)
    serve = gd.graphed(layer, dynamic={"input": 0}, sizes=(2, 4, 8), **with_options(options, max_cached_graphs=2))
    serve.prewarm(torch.randn(8, 4), sizes=[8, 4])
    check_rows(serve, 3, 3, 7, 2, 2, 2, 2, 9, width=4, rtol=1e-5, atol=1e-6)  # processors add up otherwise
    return serve


def exported(collector: Any) -> dict[tuple[str, ...], float]:
    """The samples by name and labels' values."""
    samples = [sample for family in collector.collect() for sample in family.samples]
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def values(found: dict[tuple[str, ...], float], metric: str, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a metric and a callable, by their other labels."""
    return {key[2:]: value for key, value in found.items() if key[:2] == (f"graphdispatch_{metric}", name)}


def test_every_counter_is_exported_as_it_is() -> None:
    """Calls, reasons, rows, captures, evictions, bytes and graphs are those of ``stats`` and ``memory_report``."""
    serve = served()
    stats, memory = serve.stats, serve.memory_report()
    found = exported(gd.metrics.PrometheusCollector(serve, name="decoder"))
    one = {name.removeprefix("graphdispatch_"): value for (name, *_), value in found.items()}
    assert stats.hits > 0
    assert (one["hits_total"], one["captures_total"]) == (stats.hits, stats.captures)
    assert (one["real_rows_total"], one["padding_rows_total"]) == (stats.real_rows, stats.padded_rows - stats.real_rows)
    assert one["capture_seconds_total"] == pytest.approx(stats.capture_time_ms / 1e3)
    assert one["capture_failures_total"] == 0
    assert values(found, "eager_steps_total", "decoder") == {(reason.value,): n for reason, n in stats.reasons.items()}
    assert found["graphdispatch_eager_steps_total", "decoder", "above_largest_size"] == 1
    assert found["graphdispatch_evictions_total", "decoder", "count"] == stats.evictions == 1
    assert sum(values(found, "bytes", "decoder").values()) == memory.total
    assert values(found, "graphs", "decoder") == {(str(size), "FULL"): 1 for size, _ in memory.graphs}


def test_every_front_end_is_exported() -> None:
    """A wrapper, also around a module that has ``stats`` of its own, a manager and a dispatcher, by one collector."""
    layer = torch.nn.Linear(4, 4).eval().requires_grad_(False)
    layer.stats = "its own"  # type: ignore[assignment]
    wrapper, manager = gd.CUDAGraphWrapper(layer), gd.CUDAGraphManager()
    dispatcher = gd.CudagraphDispatcher(layer)
    entry = manager.capture_graph(4, 1, layer, inputs={"input": torch.randn(4, 4)})
    dispatcher.register_graph(gd.DispatchKey(4, 4), entry)
    for _ in range(4):
        wrapper(torch.randn(4, 4), batch_descriptor=gd.BatchDescriptor(4), cudagraph_runtime_mode=gd.CUDAGraphMode.FULL)
        manager.execute_or_capture(4, 1, layer, {"input": torch.randn(4, 4)})
        dispatcher.dispatch(gd.DispatchKey(4, 4), torch.randn(4, 4))
    collector = gd.metrics.PrometheusCollector(wrapper, "wrapper").add(manager, "manager").add(dispatcher, "dispatcher")
    found = exported(collector)
    assert {key[1:]: value for key, value in found.items() if key[0] == "graphdispatch_hits_total"} == {
        ("wrapper",): wrapper.get_stats().hits,
        ("manager",): manager.stats.hits,
        ("dispatcher",): dispatcher.stats.graph,
    }
    for name in ("wrapper", "manager", "dispatcher"):
        assert sum(values(found, "bytes", name).values()) > 0
        assert sum(values(found, "graphs", name).values()) == 1
    assert [*values(found, "graphs", "wrapper")] == [("4", "FULL")]
    of_rows = [f"graphdispatch_{one.name}_total" for one in fields(HitCounts) if one.metadata["of_rows"]]
    assert {key[1] for key in found if key[0] in of_rows} == {"manager"}, "a wrapper's calls arrive padded"


def test_a_served_model_of_transformers_is_exported() -> None:
    """The steps of its requests, by graphs and eagerly, are those of its counters."""
    transformers = pytest.importorskip("transformers")
    from graphdispatch.integrations.transformers import GraphedGeneration

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=100, pad_token_id=0
    )
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.randint(1, 100, (2, 5))
    with GraphedGeneration(model, cache_lengths=(32,), max_batch_size=2) as served_model:
        collector = gd.metrics.PrometheusCollector(served_model, "llama")
        for _ in range(2):
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        found, stats, memory = exported(collector), served_model.stats, served_model.memory_report()
    assert found["graphdispatch_hits_total", "llama"] == stats.hits > 0
    assert found["graphdispatch_captures_total", "llama"] == stats.captures == 1
    assert found["graphdispatch_capture_seconds_total", "llama"] == stats.capture_time_ms * 1e-3 > 0
    assert sum(values(found, "bytes", "llama").values()) == memory.total > 0
    assert sum(values(found, "graphs", "llama").values()) == 1
    assert values(found, "eager_steps_total", "llama") == {(reason.value,): n for reason, n in stats.reasons.items()}
    of_requests = {"requests", "served", "not_served", "steps"}
    assert {field.name for field in fields(stats)} - of_requests <= {*gd.CUDAGraphStats().to_dict()}, (
        "the others add up"
    )


@pytest.mark.parametrize("name", ["decoder", "", None, 3])
def test_a_name_is_a_text_of_its_own(name: Any) -> None:
    """The error names those that are taken."""
    collector = gd.metrics.PrometheusCollector(served(), "decoder")
    with pytest.raises(gd.ConfigError, match=r"name must be a text that no other callable has.*taken: 'decoder'"):
        collector.add(served(), name)


@pytest.mark.parametrize("other", [torch.nn.Linear(2, 2), None, gd.CUDAGraphConfig()])
def test_what_counts_nothing_is_refused(other: Any) -> None:
    """At once, and not at the first scrape."""
    with pytest.raises(gd.ConfigError, match="served must be what graphed"):
        gd.metrics.PrometheusCollector(other)


def test_a_scrape_waits_for_no_call() -> None:
    """It takes none of the locks that calls and captures hold, and counts nothing."""
    serve = served()
    collector = gd.metrics.PrometheusCollector(serve)
    before = serve.stats.to_dict()
    with serve._server.lock, serve._graph_cache.pool.lock:
        assert in_threads(lambda: exported(collector))
    assert serve.stats.to_dict() == before


def exported_name(metric: gd.metrics.Metric) -> str:
    """The name of a metric as Prometheus has it."""
    return f"graphdispatch_{metric.name}" + "_total" * metric.is_counter


def test_each_counter_has_a_metric() -> None:
    """Each that ``stats`` has: but for what is the sum of a counter by cause, and what cannot be a label, since it is a
    text without end."""
    stats = served().stats
    shown = {metric.of or metric.name for metric in gd.metrics.METRICS}
    assert {*stats.to_dict()} - {*stats._derived} - shown == {"evictions", "state_changes", "gains"}


def test_each_metric_is_documented() -> None:
    """The table in the page on production settings is that of the metrics, word for word."""
    page = (MONITORING.parents[1] / "docs" / "howto" / "production.md").read_text()
    rows = []
    for metric in gd.metrics.METRICS:
        name, labels = exported_name(metric).removeprefix("graphdispatch_"), ", ".join(f"`{x}`" for x in metric.labels)
        rows.append(f"| `{name}` | {labels} | {metric.meaning} |".replace("|  |", "| |"))
    assert [row for row in rows if row not in page.splitlines()] == []


def test_the_dashboard_shows_every_metric() -> None:
    """Its queries and those of the alert rules name all that there are, and no others."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    queries = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    names = {exported_name(metric) for metric in gd.metrics.METRICS}
    assert set(re.findall(r"graphdispatch_\w+", queries)) == names
    assert set(re.findall(r"graphdispatch_\w+", (MONITORING / "alerts.yml").read_text())) <= names


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a collector is made; the module itself needs neither library."""
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    for make, extra in ((gd.metrics.PrometheusCollector, "metrics"), (gd.metrics.OpenTelemetryMetrics, "otel")):
        with pytest.raises(ImportError, match=rf"pip install '.\[{extra}\]'"):
            make(served())


def test_the_figures_of_opentelemetry_are_those_of_the_counters() -> None:
    """Each reading has what Prometheus would scrape at that moment; counters are monotonic sums."""
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    one, other, reader = served(), served(), sdk.export.InMemoryMetricReader()
    meter = sdk.MeterProvider([reader]).get_meter("served")
    assert gd.metrics.OpenTelemetryMetrics(one, "one", meter=meter).add(other, "other")
    one(torch.randn(7, 4))
    ((scope,),) = (resource.scope_metrics for resource in reader.get_metrics_data().resource_metrics)
    found = {metric.name: metric for metric in scope.metrics}
    points = {
        (name.replace(".", "_"), *point.attributes.values()): point.value
        for name, metric in found.items()
        for point in metric.data.data_points
    }
    scraped = exported(gd.metrics.PrometheusCollector(one, "one").add(other, "other"))
    assert points == {(name.removesuffix("_total"), *labels): value for (name, *labels), value in scraped.items()}
    assert isinstance(found["graphdispatch.hits"].data, sdk.export.Sum)
    assert found["graphdispatch.hits"].data.is_monotonic
    assert isinstance(found["graphdispatch.graphs"].data, sdk.export.Gauge)
    assert (found["graphdispatch.bytes"].unit, found["graphdispatch.capture_seconds"].unit) == ("By", "s")


def test_without_a_provider_nothing_happens() -> None:
    """The global provider may be none; and what has no counters is refused."""
    pytest.importorskip("opentelemetry.sdk.metrics")
    assert gd.metrics.OpenTelemetryMetrics(served(), "alone")
    with pytest.raises(gd.ConfigError, match="has no counters"):
        gd.metrics.OpenTelemetryMetrics(torch.nn.ReLU())
