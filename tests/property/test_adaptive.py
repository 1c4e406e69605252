"""What holds for the adaptive policy whatever it is told."""

from hypothesis import given
from hypothesis import strategies as st

from graphdispatch.engines import AdaptiveDispatchPolicy, DispatchKey, DispatchMode

MODES = (DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE, DispatchMode.EAGER)

BUCKETS = {end << shift for shift in range(10) for end in range(1, 17)}
"""Eight for each power of two, up to 8,192 tokens."""
keys = st.builds(DispatchKey, st.integers(1, 10_000), st.integers(1, 4), st.just(0), st.booleans())
latencies = st.floats(0, 1e6, allow_nan=False)
histories = st.lists(st.tuples(keys, st.sampled_from(MODES), latencies), max_size=80)
capture_sizes = st.none() | st.sets(st.integers(1, 1000), min_size=1, max_size=8).map(
    lambda sizes: tuple(sorted(sizes))
)


def taught(history: list[tuple[DispatchKey, DispatchMode, float]], policy: AdaptiveDispatchPolicy) -> None:
    """Play ``history`` to ``policy``, as a dispatcher does."""
    for key, mode, latency in history:
        policy.select_mode(key, MODES)
        policy.record(key, mode, latency)


@given(histories, capture_sizes, keys, st.sets(st.sampled_from(MODES)))
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


@given(histories, capture_sizes, st.integers(1, 12))
def test_memory_depends_on_the_sizes_alone(
    history: list[tuple[DispatchKey, DispatchMode, float]], sizes: tuple[int, ...] | None, history_size: int
) -> None:
    """There is one cost for each kind, size and mode, and each weighs at most ``history_size`` latencies."""
    policy = AdaptiveDispatchPolicy(history_size, sizes=sizes, exploration=1.0)
    taught(history, policy)
    for costs in policy._costs.values():
        assert set(costs) <= BUCKETS | set(sizes or ())
        assert all(cost.count <= history_size for cost in costs.values())
    assert len(policy._trials) <= len(policy._buckets)


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
