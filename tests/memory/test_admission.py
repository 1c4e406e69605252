"""``Admission``: misses within a window; and what that does for a cache under scans and cycles."""

from collections.abc import Iterable

import pytest
import torch

from graphdispatch import Graphed, Reason, graphed
from graphdispatch.errors import ConfigError
from graphdispatch.memory.admission import Admission
from graphdispatch.memory.cache import GraphCache

from ..helpers import with_options
from ..sized import entry


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def missed(admission: Admission, clock: Clock, times: Iterable[int], key: str = "key") -> Admission:
    """The same object, after misses of ``key`` at these times."""
    for clock.now in times:
        admission.count_miss(key)
    return admission


def test_the_second_miss_captures() -> None:
    """The first leads to nothing; the second tells when the first was."""
    clock = Clock()
    admission = Admission(clock=clock)
    assert admission.since("key") is None
    missed(admission, clock, [10])
    clock.now = 15
    assert admission.since("key") == 10
    assert admission.since("other") is None


def test_the_latest_misses_count() -> None:
    """With ``capture_after=3`` the time reaches back to the last but one before now, not to the first ever."""
    clock = Clock()
    admission = missed(Admission(3, clock=clock), clock, [0, 100, 104])
    clock.now = 110
    assert admission.since("key") == 100


def test_a_miss_ages() -> None:
    """Beyond the window a miss counts no more."""
    clock = Clock()
    admission = missed(Admission(2, 50, clock=clock), clock, [0])
    clock.now = 50
    assert admission.since("key") == 0
    clock.now = 51
    assert admission.since("key") is None


def test_at_once_needs_no_miss_before() -> None:
    """``capture_after=1`` captures whatever comes, and remembers nothing."""
    clock = Clock()
    admission = missed(Admission(1, clock=clock), clock, [0, 1])
    assert admission.since("key") == 1
    assert admission.num_keys == 0


def test_a_captured_key_begins_anew() -> None:
    """After its eviction it must miss again as often."""
    clock = Clock()
    admission = missed(Admission(clock=clock), clock, [1])
    admission.forget("key")
    assert admission.since("key") is None


def test_memory_is_bounded_by_the_window() -> None:
    """Keys that last missed before it are forgotten."""
    clock = Clock()
    admission = Admission(2, 100, clock=clock)
    for clock.now in range(10_000):
        admission.count_miss(clock.now)
    assert admission.num_keys == 101


def test_a_full_cache_takes_only_what_comes_more_often() -> None:
    """The newcomer's two misses must be nearer to each other than now is to the last use of some entry."""
    admission = Admission()
    cache = GraphCache(1, admission=admission)
    held = entry(replays=1)
    cache.add("held", held)
    admission.count_miss("new")
    held.increment_replay()
    assert cache.admit("new") is Reason.CACHE_FULL
    admission.count_miss("new")
    assert cache.admit("new") is Reason.CAPTURED_NOW
    assert cache.admit("other") is Reason.FIRST_SIGHTING


@pytest.mark.parametrize(
    ("options", "named"),
    [((0,), "capture_after must be an integer >= 1, got 0"), ((2, 1.5), "capture_window must be an integer >= 1")],
)
def test_options_are_checked(options: tuple[int, ...], named: str) -> None:
    """Counts are whole and positive."""
    with pytest.raises(ConfigError, match=named):
        Admission(*options)


def served(sizes: Iterable[int], **options: object) -> Graphed[..., torch.Tensor]:
    """A step that was called once with a batch of each of these sizes, every answer compared with eager's."""
    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=tuple(range(1, 41)), **with_options(options))  # type: ignore[call-overload]
    for size in sizes:
        x = torch.randn(size, 2)
        assert torch.equal(step(x), x * 2)
    step.check_integrity()
    return step


def test_a_cycle_larger_than_the_cache_does_not_thrash() -> None:
    """Of ten sizes in turn, four keep their graphs, and nothing is evicted."""
    step = served(list(range(1, 11)) * 8, max_cached_graphs=4)
    assert (step.stats.captures, step.stats.evictions) == (4, 0)
    assert step.stats.hits == 4 * (8 - 3)
    assert step.stats.reasons[Reason.CACHE_FULL] > 0


def test_a_scan_of_odd_sizes_evicts_nothing() -> None:
    """Sizes that come twice, far apart, leave the graphs that are in use alone."""
    usual = [1, 2, 3] * 4
    scan = [size for odd in range(4, 40) for size in (odd, 1, 2, 3)]
    step = served(usual + scan * 2, max_cached_graphs=3)
    assert [entry.size for entry in step.entries] == [1, 2, 3]
    assert step.stats.evictions == 0


def test_new_habits_displace_old_ones() -> None:
    """When other sizes come from now on, the cache follows at their second miss."""
    step = served([1, 2, 3] * 20 + [7, 8, 9] * 4, max_cached_graphs=3)
    assert [entry.size for entry in step.entries] == [7, 8, 9]
    assert step.stats.evictions == 3


def test_an_evicted_size_begins_anew() -> None:
    """The misses that led to the graph it had do not count again."""
    step = served([1, 1, 2, 2, 1], max_cached_graphs=1)
    assert [entry.size for entry in step.entries] == [2]
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.FIRST_SIGHTING


def test_misses_outside_the_window_do_not_count() -> None:
    """``capture_window`` is respected by the front end."""
    step = served([5, *[1] * 30, 5], capture_window=10)
    assert [entry.size for entry in step.entries] == [1]


def test_a_full_cache_is_explained() -> None:
    """A size that finds no room says so, and what to raise."""
    step = served([1, 1, 1, 5, *[1] * 9], max_cached_graphs=1)
    told = step.explain(torch.randn(5, 2))
    assert "the cache is full of graphs that are used more often; raise max_cached_graphs" in told
