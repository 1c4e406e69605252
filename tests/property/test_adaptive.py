"""What holds for the adaptive policy whatever it is told."""

import json

from hypothesis import given
from hypothesis import strategies as st

from graphdispatch.decide.adaptive import AdaptiveDispatchPolicy
from graphdispatch.decide.estimates import bucket_of
from graphdispatch.descriptors import DispatchKey
from graphdispatch.modes import DispatchMode

MODES = (DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE, DispatchMode.EAGER)

keys = st.builds(DispatchKey, st.integers(1, 10_000), st.integers(1, 4), st.just(0), st.booleans())
latencies = st.floats(0, 1e6, allow_nan=False)
histories = st.lists(st.tuples(keys, st.sampled_from(MODES), latencies), max_size=80)
size_sets = st.none() | st.sets(st.integers(1, 1000), min_size=1, max_size=8).map(lambda sizes: tuple(sorted(sizes)))


def taught(history: list[tuple[DispatchKey, DispatchMode, float]], policy: AdaptiveDispatchPolicy) -> None:
    """Play ``history`` to ``policy``, as a dispatcher does."""
    for key, mode, latency in history:
        policy.select_mode(key, MODES)
        policy.record(key, mode, latency)


@given(histories, size_sets, keys, st.sets(st.sampled_from(MODES)))
def test_it_selects_only_what_is_available(
    history: list[tuple[DispatchKey, DispatchMode, float]],
    sizes: tuple[int, ...] | None,
    key: DispatchKey,
    available: set[DispatchMode],
) -> None:
    """Whatever was recorded, the answer is one of the modes offered, or eager, which always can."""
    policy = AdaptiveDispatchPolicy(sizes=sizes, exploration=1.0)
    taught(history, policy)
    for step in (key, *(step for step, _, _ in history)):
        assert policy.select_mode(step, available) in available | {DispatchMode.EAGER}


@given(histories, size_sets, st.integers(3, 12))
def test_memory_is_bounded(
    history: list[tuple[DispatchKey, DispatchMode, float]], sizes: tuple[int, ...] | None, history_size: int
) -> None:
    """At most ``history_size`` estimates, places and ready decisions are kept."""
    policy = AdaptiveDispatchPolicy(history_size, sizes=sizes, exploration=1.0)
    taught(history, policy)
    state = policy.to_dict()
    assert sum(len(curve["cells"]) for curve in state["curves"]) <= history_size
    assert len(state["places"]) <= history_size
    assert len(policy._table) <= history_size
    assert len(policy._probes) <= 4


@given(histories, size_sets)
def test_state_survives_json(
    history: list[tuple[DispatchKey, DispatchMode, float]], sizes: tuple[int, ...] | None
) -> None:
    """A policy made from another's state, through JSON, has that state and those estimates."""
    policy = AdaptiveDispatchPolicy(sizes=sizes)
    taught(history, policy)
    again = AdaptiveDispatchPolicy.from_dict(json.loads(json.dumps(policy.to_dict())))
    assert again.to_dict() == policy.to_dict()
    assert [again.estimates(key) for key, _, _ in history] == [policy.estimates(key) for key, _, _ in history]


@given(histories, st.integers(1, 50), st.integers(0, 5000))
def test_thresholds_are_in_order_and_within_the_limits(
    history: list[tuple[DispatchKey, DispatchMode, float]], low: int, width: int
) -> None:
    """The thresholds lie within the limits and in order, except that 0 above says that no graph wins."""
    policy = AdaptiveDispatchPolicy(min_tokens_for_graph=low, max_tokens_for_graph=low + width)
    taught(history, policy)
    first, last = policy.min_tokens_for_graph, policy.max_tokens_for_graph
    assert low <= first
    assert last <= low + width
    assert last == 0 or first <= last


@given(st.integers(1, 100_000))
def test_buckets_are_monotone_and_tight(tokens: int) -> None:
    """A bucket ends at or above its tokens, by at most an eighth, and never before a smaller size's."""
    assert tokens <= bucket_of(tokens) <= tokens * 9 / 8
    assert bucket_of(tokens) <= bucket_of(tokens + 1)
