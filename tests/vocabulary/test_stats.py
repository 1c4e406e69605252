"""The counters: what is a hit, a miss and a fallback, and what the rates are before anything was counted."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from graphdispatch import CUDAGraphStats, Reason, graphed
from graphdispatch.engines import DispatchMode, DispatchStats
from graphdispatch.runtime.replay import count_hit
from graphdispatch.sizes import Axis, pack

from ..helpers import AT_ONCE, hit

QUICK = AT_ONCE.replace(gc_disable=False)


@pytest.mark.parametrize(
    ("reason", "fallbacks", "verifications"),
    [(Reason.ABOVE_LARGEST_SIZE, 1, 0), (Reason.CAPTURED_NOW, 0, 0), (Reason.VERIFIED_NOW, 0, 1)],
)
def test_a_miss_is_a_fallback_unless_it_worked_on_a_graph(reason: Reason, fallbacks: int, verifications: int) -> None:
    """A call that captured a graph is a miss, but no fallback; one that compared a graph is counted apart."""
    stats = CUDAGraphStats()
    stats.record_eager(reason)
    assert (stats.calls, stats.misses) == (1, 1 - verifications)
    assert (stats.fallbacks, stats.verifications) == (fallbacks, verifications)
    assert stats.reasons == {reason: 1}


def test_counters_as_data_and_as_a_line() -> None:
    """Hits with the share of padded rows, in data that JSON can hold, in a status line; a reset forgets all."""
    stats = CUDAGraphStats()
    count_hit(stats, hit(3, 4))
    count_hit(stats, hit(5, 8))
    assert (stats.hits, stats.replays, stats.hit_rate) == (2, 2, 1.0)
    assert stats.padding_ratio == pytest.approx(4 / 12)
    stats.record_eager(Reason.NO_ROWS)
    stats.record_eager(Reason.FIRST_SIGHTING)
    plain = json.loads(json.dumps(stats.to_dict()))
    assert (plain["hits"], plain["hit_rate"], plain["padding_ratio"]) == (2, 0.5, stats.padding_ratio)
    assert plain["reasons"] == {"no_rows": 1, "first_sighting": 1}
    assert repr(stats) == "<CUDAGraphStats 4 calls, 50.0 % by graphs, 0 captures, 33.3 % padding>"
    stats.reset()
    assert stats.to_dict() == CUDAGraphStats().to_dict()
    assert (stats.hit_rate, stats.padding_ratio) == (0.0, 0.0)


def test_captures_evictions_and_failures_are_counted_separately() -> None:
    """Work on the cache is no call."""
    step = graphed(lambda x: x * (2 if len(x) > 1 else x.item()), dynamic={"x": 0}, sizes=(1, 4), options=QUICK)
    for number in range(70):
        step(torch.randn(4, 1))
        step.invalidate(str(number))
    step(torch.randn(1, 1))
    stats = step.stats
    assert (stats.captures, stats.capture_failures, stats.evictions, stats.calls) == (70, 1, 70, 71)
    assert stats.capture_time_ms > 0
    assert stats.to_dict()["eviction_reasons"] == {"invalidated": 70}
    assert stats.evicted_bytes > 0


def test_calls_are_counted_by_rows_in_bounded_memory() -> None:
    """Hits and misses of known rows count together, several lengths by their product; beyond 4,096 numbers of each,
    sums alone go on."""
    stats = CUDAGraphStats()
    stats.record_eager(Reason.NO_ROWS, pack((Axis("rows", 0, 255), Axis("length", 8, 255)), (3, 5)))
    assert stats.rows == {15: 1}
    stats.reset()
    count_hit(stats, hit(3, 4))
    stats.record_eager(Reason.FIRST_SIGHTING, 3)
    stats.record_eager(Reason.NO_ROWS)
    assert stats.rows == {3: 2}
    for rows in range(1, 10_001):
        count_hit(stats, hit(rows, rows))
        stats.record_eager(Reason.ABOVE_LARGEST_SIZE, 10_000 + rows)
    assert (len(stats.rows), stats.rows[3], stats.hits, stats.misses) == (8191, 3, 10_001, 10_002)
    stats.reset()
    assert stats.rows == {}


def test_no_count_is_lost_between_threads() -> None:
    """Misses are counted from any thread, and add up."""
    stats = CUDAGraphStats()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: stats.record_eager(Reason.FIRST_SIGHTING), range(4000)))
    assert (stats.misses, stats.fallbacks) == (4000, 4000)


def test_dispatch_counters_give_ratio_and_mean_time() -> None:
    """The ratio counts full and piecewise graphs, the time is a mean in microseconds."""
    stats = DispatchStats()
    assert (stats.graph_ratio, stats.avg_dispatch_time_us) == (0.0, 0.0)
    stats.record(DispatchMode.CUDAGRAPH, Reason.EXACT, 1000)
    stats.record(DispatchMode.PIECEWISE, Reason.EXACT, 2000)
    stats.record(DispatchMode.EAGER, Reason.POLICY, 3000)
    assert (stats.total, stats.graph_ratio, stats.avg_dispatch_time_us) == (3, 2 / 3, 2.0)
    plain = json.loads(json.dumps(stats.to_dict()))
    assert (plain["eager"], plain["dispatch_time_ns"], plain["graph_ratio"]) == (1, 6000, 2 / 3)
    assert plain["reasons"] == {"policy": 1}
    assert repr(stats) == "<DispatchStats 3 calls: 1 graph, 1 piecewise, 1 eager (0 fallbacks)>"
