"""What sizes will cost, before they are captured; capturing within a budget."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Pad, Reason, graphed
from graphdispatch.backends import get_backend
from graphdispatch.backends.base import Pool
from graphdispatch.backends.cpu.graph import CPUPool
from graphdispatch.call.rules import make_rules
from graphdispatch.call.spec import CallSpec
from graphdispatch.decide.decision import SizeTable
from graphdispatch.demo.decoder import PRESETS, Decoder
from graphdispatch.engines import named_sizes
from graphdispatch.errors import CaptureError, ConfigError
from graphdispatch.memory.accounting import EntryMemory, MemoryReport
from graphdispatch.memory.cache import GraphCache
from graphdispatch.serve.estimate import _extrapolate, estimate_memory
from graphdispatch.serve.graphs import GraphSet
from graphdispatch.serve.group import GraphGroup, Route

SIZES = sorted(named_sizes("vllm", 128), reverse=True)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def graphs_of(
    fn: Callable[..., Any], pad: Any = None, **values: torch.Tensor
) -> tuple[GraphSet, GraphGroup, list[Any]]:
    """An empty set on the CPU backend with one group, of calls with these values, whose dimension 0 is the batch."""
    graphs = GraphSet(fn, CUDAGraphOptions(padding_writes="allow"), GraphCache(64), backend=get_backend("cpu"))
    rules = make_rules(fn, dict.fromkeys(values, 0), pad or {}, ())
    route = Route(0, SizeTable.of_one(SIZES[0], CUDAGraphMode.FULL, pads=True), rules)
    made = graphs.make_group(0, route, CallSpec(fn, 0, tuple(values)), list(values.values()))
    assert isinstance(made, tuple)
    return graphs, *made


def decoder() -> tuple[Decoder, GraphSet, GraphGroup, list[Any]]:
    """The demo's decoder, and rows in places of their own."""
    model = Decoder(PRESETS["tiny"], slots=8)
    row = torch.arange(SIZES[0])
    values = {"token_ids": torch.zeros_like(row), "slots": row // 64, "positions": row % 64}
    return model, *graphs_of(model, {"slots": Pad.value(model.scratch_slot)}, **values)


def capture(graphs: GraphSet, group: GraphGroup, leaves: list[Any], size: int) -> None:
    """Capture one size and leave nothing else."""
    outcome = graphs.capture(group, group.resized(leaves, size), size, size, keep_effects=False)
    assert outcome.entry is not None, outcome.detail


@pytest.mark.parametrize("model", ["decoder", "constants", "ascending"])
def test_an_estimate_is_near_what_is_measured(model: str) -> None:
    """From two captures follows, within 15 %, what all sizes hold; the truth is between the least and the most."""
    if model == "decoder":
        _, graphs, group, leaves = decoder()
    else:
        fns = {
            "constants": lambda x: x * torch.arange(len(x) * 8.0).view(-1, 8),  # a constant of each size's own
            "ascending": lambda x: x.cumsum(0),
        }
        graphs, group, leaves = graphs_of(fns[model], x=torch.randn(SIZES[0], 8))
    estimate = estimate_memory(graphs, group, leaves, SIZES)
    for size in SIZES:
        capture(graphs, group, leaves, size)
    assert estimate.total == pytest.approx(graphs.memory_bytes, rel=0.15)
    assert estimate.low <= graphs.memory_bytes <= estimate.high
    assert list(estimate.per_size) == SIZES
    assert json.loads(json.dumps(estimate.to_dict()))["total"] == estimate.total


def test_an_estimate_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """State, random numbers, statistics, cache and pool are as before; nothing was counted, and the pool of the trial
    was closed, without which a device would not give it back."""
    closed: list[Pool] = []
    monkeypatch.setattr(CPUPool, "close", lambda pool: closed.append(pool))
    model, graphs, group, leaves = decoder()
    cache, rng = model.cache_keys.normal_().clone(), torch.get_rng_state()
    estimate_memory(graphs, group, leaves, SIZES)
    assert torch.equal(model.cache_keys, cache)
    assert torch.equal(torch.get_rng_state(), rng)
    assert (graphs.memory_bytes, len(graphs.cache), graphs.stats.captures) == (0, 0, 0)
    assert [pool is graphs.pool for pool in closed] == [False]
    assert (group.entries, len(group.failures), group.rule, group.misses.total()) == ({}, 0, None, 0)


def test_what_cannot_be_captured_has_no_estimate() -> None:
    """The error has the reason of the capture, and names the size."""
    graphs, group, leaves = graphs_of(lambda x: x * x.sum().item(), x=torch.randn(128, 8))
    with pytest.raises(CaptureError, match=r"no graph of 128 rows, so no estimate: .*item") as caught:
        estimate_memory(graphs, group, leaves, SIZES)
    assert caught.value.reason is Reason.CAPTURE_UNSAFE
    assert graphs.stats.capture_failures == 0


@pytest.mark.parametrize("sizes", [[], [0, 4]])
def test_sizes_must_be_sizes(sizes: list[int]) -> None:
    """No sizes, or none of at least one row, is one error."""
    graphs, group, leaves = graphs_of(lambda x: x * 2, x=torch.randn(128, 8))
    with pytest.raises(ConfigError, match="sizes must be one or more sizes of at least 1 row"):
        estimate_memory(graphs, group, leaves, sizes)


def test_one_size_is_measured() -> None:
    """With a single size there is nothing to guess."""
    graphs, group, leaves = graphs_of(lambda x: x * 2, x=torch.randn(128, 8))
    estimate = estimate_memory(graphs, group, leaves, [4])
    capture(graphs, group, leaves, 4)
    assert estimate.low == estimate.total == estimate.high == graphs.memory_bytes


def report(*entries: EntryMemory, pool: int) -> MemoryReport:
    """What a trial measured, with 100 bytes of static inputs."""
    own, driver = (sum(getattr(entry, what) for entry in entries) for what in ("own", "driver"))
    return MemoryReport(entries, pool, 100, 0, own, driver)


def test_what_the_driver_does_once_is_not_expected_again() -> None:
    """A large first share of the driver raises the most that is possible, and not what is expected."""
    first, second = EntryMemory(8, "FULL", 0, 900, 8), EntryMemory(4, "FULL", 0, 30, 4)
    estimate = _extrapolate([8, 4, 2], [report(first, pool=1000), report(second, first, pool=1000)])
    assert estimate.per_size == {8: 900, 4: 30, 2: 30}
    assert estimate.total == estimate.low == 100 + 1000 + 900 + 30 + 30
    assert estimate.high == 100 + 1000 + 900 + 30 + 900


def test_a_growing_pool_is_expected_to_follow_the_rows() -> None:
    """What the second size adds to the pool, smaller ones add in proportion; at most as much, or nothing."""
    first, second = EntryMemory(8, "FULL", 80, 0, 8), EntryMemory(4, "FULL", 40, 0, 4)
    estimate = _extrapolate([8, 4, 2], [report(first, pool=1000), report(second, first, pool=1600)])
    assert estimate.per_size == {8: 80, 4: 640, 2: 20 + 300}
    measured = 100 + 1000 + 80 + 640
    assert (estimate.low, estimate.high) == (measured + 20, measured + 40 + 600)


def constants(x: torch.Tensor) -> torch.Tensor:
    """A constant of each size's own, in proportion to it."""
    return x * torch.arange(len(x) * 8.0).view(-1, 8)


def surprise(x: torch.Tensor) -> torch.Tensor:
    """For batches below the two largest sizes, a constant that their graphs do not have."""
    return x + (0 * torch.arange(2.0**15)[:8] if len(x) <= 4 else 0)


def needs_large(x: torch.Tensor) -> torch.Tensor:
    """No graph can hold it at the largest size."""
    return surprise(x) if len(x) < 16 else x * x.sum().item()


def prewarmed(
    fn: Callable[..., Any], sizes: Sequence[int], budget: int | None
) -> tuple[tuple[int, ...], list[int], int]:
    """The sizes that a prewarm captures within a budget, those that do not fit, and the bytes held."""
    step = graphed(fn, dynamic={"x": 0}, sizes=sorted(sizes), backend="cpu")
    done = step.prewarm(x=torch.randn(max(sizes), 8), max_bytes=budget)
    left_out = [size for (_, size), why in done.left_out.items() if "would not fit" in why]
    return done.captured[CUDAGraphMode.FULL], left_out, done.memory_bytes


def test_capturing_stops_before_the_budget() -> None:
    """What is held stays within the budget, most of which is used, and the sizes that did not fit are named."""
    *_, budget = prewarmed(constants, SIZES, None)
    budget = budget * 2 // 3
    captured, left_out, held = prewarmed(constants, SIZES, budget)
    assert sorted([*captured, *left_out], reverse=True) == SIZES
    assert left_out
    assert 0.8 * budget < held <= budget


def test_a_largest_size_that_is_too_large_is_left_out() -> None:
    """A smaller one then brings a pool in proportion."""
    captured, left_out, held = prewarmed(constants, [64, 2, 1], prewarmed(constants, [64], None)[2] - 1)
    assert (captured, left_out) == ((2, 1), [64])
    assert held


@pytest.mark.parametrize("fn", [surprise, needs_large])
def test_captures_correct_what_is_expected(fn: Callable[..., Any]) -> None:
    """After a size that took far more than was expected, or without an estimate, the next one must have room for as
    much."""
    sizes = [16, 8, 4, 2, 1]
    *_, enough = prewarmed(fn, sizes, None)
    without_last = prewarmed(fn, sizes[:-1], None)[2]
    assert enough - without_last > 2**15
    captured, left_out, held = prewarmed(fn, sizes, (enough + without_last) // 2)
    assert captured[-2:] == (4, 2)
    assert left_out == [1]
    assert held == without_last
