"""What sizes will cost, before they are captured; capturing within a budget."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphdispatch.backends import get_backend
from graphdispatch.backends.base import Pool
from graphdispatch.backends.cpu.graph import CPUPool
from graphdispatch.call.padding import Pad
from graphdispatch.call.rules import make_rules
from graphdispatch.call.spec import CallSpec
from graphdispatch.config import CUDAGraphOptions
from graphdispatch.decide.decision import SizeTable
from graphdispatch.demo.decoder import PRESETS, Decoder
from graphdispatch.errors import CaptureError, ConfigError
from graphdispatch.memory.accounting import EntryMemory, MemoryReport
from graphdispatch.memory.cache import GraphCache
from graphdispatch.modes import CUDAGraphMode
from graphdispatch.reasons import Reason
from graphdispatch.serve.estimate import BudgetedCapture, MemoryEstimate, SizeEstimate, _extrapolate, estimate_memory
from graphdispatch.serve.graphs import GraphSet
from graphdispatch.serve.group import GraphGroup, Route
from graphdispatch.sizes import named_sizes

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
    assert estimate.per_size[2] == SizeEstimate(30, 30, 900)
    assert estimate.total == 100 + 1000 + 900 + 30 + 30


def test_a_growing_pool_is_expected_to_follow_the_rows() -> None:
    """What the second size adds to the pool, smaller ones add in proportion; at most as much, or nothing."""
    first, second = EntryMemory(8, "FULL", 80, 0, 8), EntryMemory(4, "FULL", 40, 0, 4)
    estimate = _extrapolate([8, 4, 2], [report(first, pool=1000), report(second, first, pool=1600)])
    assert estimate.per_size == {8: (80, 80, 80), 4: (640, 640, 640), 2: (20 + 300, 20, 40 + 600)}


def estimate_of(**per_size: int) -> MemoryEstimate:
    """100 bytes of inputs, a pool of 1000, and what each size adds."""
    added = {int(size[1:]): SizeEstimate(count, count, count) for size, count in per_size.items()}
    return MemoryEstimate(100, 1000, added)


def taken(plan: BudgetedCapture, real: dict[int, int], held: list[int]) -> list[int]:
    """The sizes that the plan lets through, each of which then holds what it really takes."""
    done = []
    for size, count in real.items():
        if plan.next(size):
            held.append(count)
            done.append(size)
    return done


def test_capturing_stops_at_the_budget() -> None:
    """Sizes are taken while they fit, and those that do not are named."""
    held: list[int] = []
    plan = BudgetedCapture(lambda: sum(held), 1260, estimate_of(s8=80, s4=60, s2=40, s1=10))
    assert plan.expected_bytes == 1290
    assert taken(plan, {8: 1180, 4: 60, 2: 40, 1: 10}, held) == [8, 4, 1]
    assert plan.left_out == (2,)
    assert sum(held) <= 1260
    assert plan.expected_bytes == 1250
    assert plan.taken == {8: 1180, 4: 60, 1: 10}


def test_captures_correct_what_is_expected() -> None:
    """After a size that took twice what was expected, the next is no longer let through."""
    held: list[int] = []
    plan = BudgetedCapture(lambda: sum(held), 1360, estimate_of(s8=80, s4=60, s2=60))
    assert taken(plan, {8: 1180, 4: 120}, held) == [8, 4]
    assert plan.expected_bytes == 1300 + 120
    assert not plan.next(2)


def test_a_largest_size_that_is_too_large_is_left_out() -> None:
    """A smaller one then brings a pool in proportion."""
    held: list[int] = []
    plan = BudgetedCapture(lambda: sum(held), 700, estimate_of(s8=80, s4=60, s2=60))
    assert taken(plan, {8: 1180, 4: 660, 2: 60}, held) == [4]
    assert plan.left_out == (8, 2)


def test_without_a_budget_all_is_captured() -> None:
    """And without an estimate the captures so far tell what the next will take."""
    assert BudgetedCapture(lambda: 10**12, None).next(4)
    held: list[int] = []
    plan = BudgetedCapture(lambda: sum(held), 1250)
    assert taken(plan, {8: 1000, 4: 100, 2: 100, 1: 100}, held) == [8, 4, 2]
    assert repr(plan) == "<BudgetedCapture 3 sizes taken, 1 left out, budget 1250>"


def test_a_budget_holds_with_real_graphs() -> None:
    """With the figures of a set, what is held stays within the budget, and something was left out."""
    graphs, group, leaves = graphs_of(lambda x: x * torch.arange(len(x) * 8.0).view(-1, 8), x=torch.randn(128, 8))
    estimate = estimate_memory(graphs, group, leaves, SIZES)
    budget = estimate.total * 2 // 3
    plan = BudgetedCapture(lambda: graphs.memory_bytes, budget, estimate)
    for size in SIZES:
        if plan.next(size):
            capture(graphs, group, leaves, size)
    assert 0 < len(plan.left_out) < len(SIZES)
    assert 0.8 * budget < graphs.memory_bytes <= budget
