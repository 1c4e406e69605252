"""Policies: the default one from plain data; the adaptive one on simulated devices, and with whatever it hears."""

import random
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch.demo import generate_trace
from graphdispatch.engines import AdaptiveDispatchPolicy, DefaultDispatchPolicy, DispatchKey, DispatchMode, named_sizes

from ..helpers import in_threads

EAGER, GRAPH, PIECEWISE = DispatchMode.EAGER, DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE
BOTH = (GRAPH, EAGER)
SIZES = named_sizes("vllm", 512)
CHANGE = 0.4

Cost = Callable[[int, float], float]

KEYS = [
    DispatchKey(step.num_tokens, step.num_reqs, max(step.positions) + 1, step.num_tokens > step.num_reqs)
    for step in generate_trace(20_000, 64, seed=1, window=360)
]


class Device(NamedTuple):
    """Milliseconds by tokens and progress, eager and by graph; ``noise`` is the spread of the logarithm."""

    eager: Cost
    graph: Cost
    noise: float = 0.05

    def costs(self, tokens: int, progress: float) -> dict[DispatchMode, float]:
        padded = SIZES[bisect_left(SIZES, tokens)]
        return {GRAPH: self.graph(padded, progress), EAGER: self.eager(tokens, progress)}


DEVICES = {
    "graphs always win": Device(lambda n, _: 6 + 0.02 * n, lambda n, _: 2 + 0.02 * n),
    "graphs always lose": Device(lambda n, _: 2 + 0.02 * n, lambda n, _: 3 + 0.03 * n),
    "cross-over in size": Device(lambda n, _: 4 + 0.02 * n, lambda n, _: 1.5 + 0.06 * n),
    "padding cliff": Device(lambda n, _: 3 + 0.02 * n, lambda n, _: 1 + 0.02 * n + 6 * (n > 48)),
    "graphs become slow": Device(lambda n, _: 4 + 0.02 * n, lambda n, t: (2 + 0.02 * n) * (3 if t > CHANGE else 1)),
    "graphs become fast": Device(lambda n, _: 4 + 0.02 * n, lambda n, t: (2 + 0.02 * n) * (1 if t > CHANGE else 3)),
    "noise, graphs win": Device(lambda n, _: 5 + 0.02 * n, lambda n, _: 4 + 0.02 * n, 0.5),
    "noise, graphs lose": Device(lambda n, _: 4 + 0.02 * n, lambda n, _: 5 + 0.02 * n, 0.5),
}


@pytest.mark.parametrize("name", DEVICES)
def test_total_is_near_the_best_mode_and_never_far_above_the_default(name: str) -> None:
    """Within 2 % of the best mode for each step, and at most 1.05 times the default, with late, shuffled records.

    The 2 % leave out a warm-up of a tenth of the steps, at the start and after a drift.
    """
    device, rng, policy = DEVICES[name], random.Random(7), AdaptiveDispatchPolicy()
    waiting: list[tuple[DispatchKey, DispatchMode, float]] = []
    spent = default = late = best = 0.0
    for step, key in enumerate(KEYS):
        progress = step / len(KEYS)
        costs = device.costs(key.num_tokens, progress)
        mode = policy.select_mode(key, BOTH)
        waiting.append((key, mode, costs[mode] * rng.lognormvariate(-(device.noise**2) / 2, device.noise)))
        if len(waiting) > 8:
            policy.record(*waiting.pop(rng.randrange(len(waiting))))
        spent += costs[mode]
        default += costs[GRAPH]
        if 0.1 <= progress < CHANGE or progress >= CHANGE + 0.1:
            late += costs[mode]
            best += min(costs.values())
    assert late <= 1.02 * best
    assert spent <= 1.05 * default


def feed(policy: AdaptiveDispatchPolicy, mode: DispatchMode, tokens: int, cost: float, times: int = 20) -> None:
    """Record one cost a few times."""
    for _ in range(times):
        policy.record(DispatchKey(tokens, 1), mode, cost)


def chosen(policy: AdaptiveDispatchPolicy, tokens: int) -> DispatchMode:
    """The preferred mode, without a trial: the first answer may be one."""
    policy.select_mode(DispatchKey(tokens, 1), BOTH)
    return policy.select_mode(DispatchKey(tokens, 1), BOTH)


HISTORIES: dict[str, tuple[int, list[tuple[DispatchMode, float, int]], DispatchMode]] = {
    "one outlier": (1000, [(EAGER, 2.0, 20), (GRAPH, 1.0, 20), (GRAPH, 100.0, 1)], GRAPH),
    "a change": (1000, [(EAGER, 2.0, 20), (GRAPH, 1.0, 20), (GRAPH, 100.0, 1), (GRAPH, 3.0, 3)], EAGER),
    "after latencies that never vary": (2, [(EAGER, 2.0, 20), (GRAPH, 1.0, 3000), (GRAPH, 5.0, 3)], EAGER),
    "half a percent": (10_000, [(EAGER, 0.995, 1), (GRAPH, 1.0, 1)] * 3000, GRAPH),
}
"""By name: how many records are kept, costs by mode with how often each was recorded, and the mode that is chosen."""


@pytest.mark.parametrize("name", HISTORIES)
def test_what_a_decision_follows(name: str) -> None:
    """A change, at once; neither a single stall of a hundred times the usual cost nor a small difference."""
    history_size, history, expected = HISTORIES[name]
    policy = AdaptiveDispatchPolicy(history_size)
    for mode, cost, times in history:
        feed(policy, mode, 8, cost, times)
    assert chosen(policy, 8) is expected


def test_trials_stay_within_their_budget() -> None:
    """Trials of a mode that costs fifty times as much cost at most a hundredth, and one trial more."""
    policy = AdaptiveDispatchPolicy()
    key, trials = DispatchKey(8, 1), 0
    for _ in range(20_000):
        mode = policy.select_mode(key, BOTH)
        trials += mode is EAGER
        policy.record(key, mode, 50.0 if mode is EAGER else 1.0)
    extra, total = 49.0 * trials, 20_000 + 49.0 * trials
    assert 0 < extra <= 0.01 * total + 49.0


def test_prefill_and_decode_are_learnt_separately() -> None:
    """A prefill batch for which eager is faster leaves decode batches of the same size on the graph."""
    policy = AdaptiveDispatchPolicy()
    feed(policy, GRAPH, 8, 1.0)
    feed(policy, EAGER, 8, 3.0)
    prefill = DispatchKey(8, 1, 8, True)
    for _ in range(20):
        policy.record(prefill, GRAPH, 3.0)
        policy.record(prefill, EAGER, 1.0)
    policy.select_mode(prefill, BOTH)  # the trial that may be due
    assert not policy.should_use_graph(prefill, True)
    assert policy.should_use_graph(DispatchKey(8, 1), True)


def test_thresholds_follow_the_measurements() -> None:
    """They are the smallest and the largest measured size whose graph wins; there may be none."""
    policy = AdaptiveDispatchPolicy()
    for tokens in (8, 32, 128, 512):
        feed(policy, EAGER, tokens, 4.0)
        feed(policy, GRAPH, tokens, 1.0 if tokens in (32, 128) else 9.0)
    assert (policy.min_tokens_for_graph, policy.max_tokens_for_graph) == (32, 128)
    none = AdaptiveDispatchPolicy()
    for mode, cost in ((GRAPH, 2.0), (EAGER, 1.0)):
        feed(none, mode, 8, cost)
    assert (none.min_tokens_for_graph, none.max_tokens_for_graph) == (1, 0)


def test_threads_may_select_and_record_at_once() -> None:
    """Eight threads that select and record lose no record and raise nothing."""
    policy = AdaptiveDispatchPolicy()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(500):
            key = DispatchKey(rng.randint(1, 600), 1)
            policy.record(key, policy.select_mode(key, BOTH), rng.random())

    in_threads(*(partial(work, seed) for seed in range(8)))
    assert sum(bucket.records for bucket in policy._buckets.values()) == 4000


def test_all_kinds_of_graphs_are_tried() -> None:
    """A piecewise graph that is the fastest is found, and a full one serves again where there is no other."""
    policy, key = AdaptiveDispatchPolicy(), DispatchKey(8, 1)
    costs = {GRAPH: 2.0, PIECEWISE: 1.0, EAGER: 3.0}
    for _ in range(50):
        mode = policy.select_mode(key, MODES)
        policy.record(key, mode, costs[mode])
    assert policy.select_mode(key, MODES) is PIECEWISE
    assert policy.select_mode(key, BOTH) is GRAPH


MODES = (GRAPH, PIECEWISE, EAGER)
keys = st.builds(DispatchKey, st.integers(1, 10_000), st.integers(1, 4), st.just(0), st.booleans())
latencies = st.floats(0, 1e6, allow_nan=False)
histories = st.lists(st.tuples(keys, st.sampled_from(MODES), latencies), max_size=80)


def taught(history: list[tuple[DispatchKey, DispatchMode, float]], policy: AdaptiveDispatchPolicy) -> None:
    """Play ``history`` to ``policy``, as a dispatcher does."""
    for key, mode, latency in history:
        policy.select_mode(key, MODES)
        policy.record(key, mode, latency)


@given(histories, keys, st.sets(st.sampled_from(MODES)))
def test_it_selects_only_what_is_available(
    history: list[tuple[DispatchKey, DispatchMode, float]], key: DispatchKey, available: set[DispatchMode]
) -> None:
    """Whatever was recorded, the answer is one of the modes offered, or eager, which always can."""
    policy = AdaptiveDispatchPolicy()
    taught(history, policy)
    for step in (key, *(step for step, _, _ in history)):
        assert policy.select_mode(step, available) in available | {EAGER}


@given(histories)
def test_memory_depends_on_the_sizes_alone(history: list[tuple[DispatchKey, DispatchMode, float]]) -> None:
    """Four sizes for each power of two, of prefill and of decode."""
    policy = AdaptiveDispatchPolicy()
    taught(history, policy)
    assert {size for _, size in policy._buckets} <= {end << shift for shift in range(12) for end in range(1, 9)}


@pytest.mark.parametrize(
    ("available", "prefer_piecewise", "chosen"),
    [
        ((GRAPH, PIECEWISE, EAGER), False, GRAPH),
        ((GRAPH, PIECEWISE, EAGER), True, PIECEWISE),
        ((GRAPH, EAGER), True, GRAPH),
        ((PIECEWISE, EAGER), False, PIECEWISE),
        ((EAGER,), False, EAGER),
        ((), False, EAGER),
    ],
)
def test_by_default_a_graph_goes_before_eager(
    available: tuple[DispatchMode, ...], prefer_piecewise: bool, chosen: DispatchMode
) -> None:
    """The preferred kind of graph, then the other, then eager."""
    policy = DefaultDispatchPolicy(prefer_piecewise=prefer_piecewise)
    assert policy.select_mode(DispatchKey(8, 1), available) is chosen


@pytest.mark.parametrize(("tokens", "chosen"), [(3, EAGER), (4, GRAPH), (16, GRAPH), (17, EAGER)])
def test_the_limits_are_inclusive(tokens: int, chosen: DispatchMode) -> None:
    """A batch of exactly the fewest or the most tokens is served by a graph, one beyond is not."""
    policy = DefaultDispatchPolicy(4, 16)
    assert policy.select_mode(DispatchKey(tokens, 1), (GRAPH, EAGER)) is chosen
