"""The simulator: production's own objects on a device whose costs are known exactly."""

import itertools
from collections.abc import Collection

import numpy as np
import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason, graphed
from graphdispatch.engines import (
    AdaptiveDispatchPolicy,
    CudagraphKeyDispatcher,
    DefaultDispatchPolicy,
    DispatchKey,
    DispatchMode,
)
from graphdispatch.errors import ConfigError
from graphdispatch.memory.admission import Admission
from graphdispatch.memory.cache import GraphCache
from graphdispatch.plan import CostModel, Workload
from graphdispatch.simulation.simulator import simulate

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
COST = CostModel.of(
    lambda n: 10.0 + n,
    lambda n: 1.0 + n,
    lambda n: 3.0 + n,
    capture_ms=50.0,
    graph_bytes=100.0,
    pool_bytes=lambda n: 4.0 * n,
)


def dispatcher(mode: CUDAGraphMode, sizes: tuple[int, ...] = (2, 4, 8)) -> CudagraphKeyDispatcher:
    """The keys of one mode."""
    keys = CudagraphKeyDispatcher(capture_sizes=sizes, max_num_reqs=sizes[-1])
    keys.initialize_cudagraph_keys(mode)
    return keys


def random_workload(seed: int, steps: int = 400) -> Workload:
    """Steps of 1 to 10 tokens, four in five of them uniform decode."""
    rng = np.random.default_rng(seed)
    return Workload.from_steps(rng.integers(1, 11, steps), rng.random(steps) < 0.8)


def test_time_padding_and_hits_are_those_of_the_sizes() -> None:
    """With every graph captured first, a step costs what the next larger size costs, or eager above the largest."""
    workload = random_workload(0)
    result = simulate(workload, COST, dispatcher(FULL))
    assert workload.steps is not None
    tokens = workload.steps.num_tokens
    hits = tokens[tokens <= 8]
    padded = np.array((2, 4, 8))[np.searchsorted((2, 4, 8), hits)]
    assert (result.stats.hits, result.stats.captures) == (len(hits), 3)
    assert result.stats.padding_ratio == pytest.approx(1 - hits.sum() / padded.sum())
    assert result.step_ms == pytest.approx((1.0 + padded).sum() + (10.0 + tokens[tokens > 8]).sum())
    assert result.eager_shares() == {Reason.ABOVE_LARGEST_SIZE: pytest.approx(1 - len(hits) / 400)}
    assert (result.capture_ms, result.peak_bytes) == (150.0, 300 + 4 * 8)


def test_decode_and_mixed_steps_run_in_their_modes() -> None:
    """FULL serves uniform decode, PIECEWISE the rest, and each costs what its mode costs."""
    workload = Workload.from_steps([4, 4, 4], [1, 0, 0], [4, 2, 2])
    result = simulate(workload, COST, dispatcher(CUDAGraphMode.FULL_AND_PIECEWISE))
    assert result.steps == {FULL: 1, PIECEWISE: 2}
    assert result.step_ms == pytest.approx(5.0 + 2 * 7.0)


def test_uniform_steps_of_several_tokens_are_told_by_their_requests() -> None:
    """Four tokens of two requests are uniform decode of query length 2, and no graph of length 1 serves them."""
    workload = Workload.from_steps([4, 4], [1, 1], [2, 4])
    result = simulate(workload, COST, dispatcher(CUDAGraphMode.FULL_DECODE_ONLY))
    assert result.steps == {FULL: 1, NONE: 1}


def test_a_graph_is_admitted_captured_compared_and_then_serves() -> None:
    """The steps on the way to a graph are eager and carry production's reasons; the comparison costs both."""
    result = simulate(Workload.from_steps([8] * 6), COST, dispatcher(FULL), admission=Admission(2))
    reasons = dict.fromkeys((Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW, Reason.VERIFIED_NOW), 1)
    assert (result.stats.reasons, result.stats.hits) == (reasons, 3)
    assert result.step_ms == pytest.approx(3 * 18.0 + 9.0 + 3 * 9.0)


def test_the_cache_evicts_as_in_production() -> None:
    """More sizes than room: graphs come and go, never more than allowed, and every capture is counted."""
    cache = GraphCache(2, eviction="lru")
    sizes = list(itertools.chain.from_iterable([size] * 10 for size in (2, 4, 8)))
    result = simulate(Workload.from_steps(sizes), COST, dispatcher(FULL), cache=cache, admission=Admission(2))
    cache.check_integrity()
    assert (result.stats.captures, result.stats.evictions, len(cache)) == (3, 1, 2)
    assert result.peak_bytes == 200 + 4 * 8


def test_what_does_not_fit_is_not_captured_first() -> None:
    """Without admission the largest graphs that fit are captured, and the rest stays eager for want of room."""
    result = simulate(Workload.from_steps([2, 8]), COST, dispatcher(FULL), cache=GraphCache(2))
    assert (result.stats.captures, result.stats.hits) == (2, 1)
    assert result.stats.reasons == {Reason.CACHE_FULL: 1}


def test_a_policy_chooses_among_the_graphs_there_are() -> None:
    """A policy may prefer the piecewise graph of a decode batch, or eager."""
    workload = Workload.from_steps([4, 8], [1, 1])
    keys = dispatcher(CUDAGraphMode.FULL_AND_PIECEWISE)
    piecewise = simulate(workload, COST, keys, policy=DefaultDispatchPolicy(prefer_piecewise=True))
    assert piecewise.steps == {PIECEWISE: 2}
    small = simulate(workload, COST, keys, policy=DefaultDispatchPolicy(max_tokens_for_graph=4))
    assert (small.steps, small.stats.reasons) == ({FULL: 1, NONE: 1}, {Reason.POLICY: 1})


def test_a_policy_that_refuses_graphs_is_asked_no_more() -> None:
    """As in a dispatcher: ``select_mode`` is not asked after a no, and the step counts as eager."""

    class Refusing(DefaultDispatchPolicy):
        def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
            return False

        def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
            raise AssertionError(key)

    result = simulate(Workload.from_steps([4, 8]), COST, dispatcher(FULL), policy=Refusing())
    assert (result.steps, result.stats.reasons) == ({NONE: 2}, {Reason.POLICY: 2})


def test_a_learning_policy_learns_the_simulated_times() -> None:
    """Where graphs are slower than eager, the adaptive policy turns to eager after some trials."""
    slow = CostModel.of(lambda n: 5.0 + n, lambda n: 20.0 + n)
    result = simulate(random_workload(1, 2000), slow, dispatcher(FULL), policy=AdaptiveDispatchPolicy(sizes=(2, 4, 8)))
    assert result.steps[NONE] > 0.8 * 2000


@pytest.mark.parametrize("room", [3, 2])
def test_it_counts_what_graphed_counts(room: int) -> None:
    """The same batches through ``graphed`` on the CPU backend, padded ones among them, give the same hits, misses,
    reasons, rows and evictions."""
    sizes = np.repeat(np.random.default_rng(3).integers(1, 10, 100), 4).tolist()
    step = graphed(
        lambda x: x * 2,
        dynamic={"x": 0},
        sizes=(2, 4, 8),
        max_size=8,
        options=CUDAGraphOptions(max_cached_graphs=room, eviction="lru"),
    )
    for number, size in enumerate(sizes):
        step(torch.arange(number, number + 2.0 * size).reshape(size, 2))
    cache = GraphCache(room, eviction="lru")
    result = simulate(Workload.from_steps(sizes), COST, dispatcher(FULL), cache=cache, admission=Admission(2))
    names = ("hits", "misses", "captures", "verifications", "evictions", "real_rows", "padded_rows", "reasons", "rows")
    assert {name: getattr(result.stats, name) for name in names} == {name: getattr(step.stats, name) for name in names}
    simulated, real = (
        [(one.descriptor.num_tokens, one.replays, one.reason) for one in stats.last_evictions]
        for stats in (result.stats, step.stats)
    )
    assert simulated == real
    assert bool(real) is (room < 3)


def test_it_is_deterministic() -> None:
    """The same traffic, costs and objects give the same result to the last digit."""
    first, second = (
        simulate(
            random_workload(2),
            COST,
            dispatcher(CUDAGraphMode.FULL_AND_PIECEWISE),
            policy=AdaptiveDispatchPolicy(sizes=(2, 4, 8)),
            cache=GraphCache(3),
            admission=Admission(),
        ).to_dict()
        for _ in range(2)
    )
    assert first == second


def test_the_result_reads_as_a_report() -> None:
    """Share of graphs, padding, captures and the reasons are all in the text."""
    text = str(simulate(Workload.from_steps([3, 9]), COST, dispatcher(FULL)))
    assert "2 steps in 0.02 s: 50.00 % by graphs, 25.00 % padding" in text
    assert "3 captures in 0.15 s, 0 evictions" in text
    assert "eager, 50.00 %: the batch is larger than the largest graph" in text


def test_what_cannot_be_simulated_is_refused() -> None:
    """No order, a cache that served before, or a mode of unknown cost: one clear error."""
    used = GraphCache(3)
    simulate(Workload.from_steps([2]), COST, dispatcher(FULL), cache=used)
    with pytest.raises(ConfigError, match="cache must be new"):
        simulate(Workload.from_steps([2]), COST, dispatcher(FULL), cache=used)
    with pytest.raises(ConfigError, match="workload must have ordered steps"):
        simulate(Workload.from_histogram({2: 1}), COST, dispatcher(FULL))
    with pytest.raises(ConfigError, match="cost must know graphs of mode PIECEWISE"):
        simulate(Workload.from_steps([2]), CostModel.of(9.0, 1.0), dispatcher(PIECEWISE))
