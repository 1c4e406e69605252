"""``GraphCache``: limits by count and bytes, eviction of the least recently used, integrity."""

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch.backends import Graph
from graphdispatch.cache import GraphCache
from graphdispatch.capture.entry import CUDAGraphEntry
from graphdispatch.capture.foreign import entry_around
from graphdispatch.errors import ConfigError, IntegrityError
from graphdispatch.testing import MockCUDAGraph


class Sized(Graph):
    """A graph that does nothing and holds ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def replay(self) -> None:
        """Nothing to run."""

    def reset(self) -> None:
        self._size = 0

    @property
    def nbytes(self) -> int:
        return self._size


def entry(nbytes: int = 0) -> CUDAGraphEntry:
    """An entry whose graph holds ``nbytes`` bytes."""
    made = entry_around(MockCUDAGraph(), "key")
    made.graph = Sized(nbytes)
    return made


def filled(cache: GraphCache, *sizes: int) -> list[CUDAGraphEntry]:
    """Put entries of these sizes into the cache under the keys 0, 1, 2, ..."""
    entries = [entry(nbytes) for nbytes in sizes]
    for key, made in enumerate(entries):
        assert cache.add(key, made) == []
    return entries


def test_the_least_recently_used_goes() -> None:
    """Recency is the last replay, not the time of adding."""
    cache = GraphCache(2)
    first, second = filled(cache, 0, 0)
    first.increment_replay()
    assert cache.add(2, entry()) == [second]
    assert cache.get(0) is first
    assert cache.get(1) is None


def test_room_is_made_before_adding() -> None:
    """At capacity one entry goes ahead of the capture, so that adding displaces nothing."""
    cache = GraphCache(2)
    first, _ = filled(cache, 0, 0)
    assert cache.make_room() == [first]
    assert cache.add(2, entry()) == []


def test_room_below_capacity_costs_nothing() -> None:
    """Nobody goes while there is room."""
    cache = GraphCache(2)
    filled(cache, 0)
    assert cache.make_room() == []


def test_bytes_are_a_limit() -> None:
    """As many of the least recently used go as the newcomer needs."""
    cache = GraphCache(10, max_bytes=100)
    first, second, third = filled(cache, 40, 30, 30)
    assert cache.add("new", entry(60)) == [first, second]
    assert list(cache) == [third, cache.get("new")]
    assert cache.nbytes == 90


def test_one_entry_over_the_budget_is_kept_alone() -> None:
    """The graph that was asked for is never a victim of itself."""
    cache = GraphCache(10, max_bytes=100)
    small = filled(cache, 10, 10)
    big = entry(500)
    assert cache.add("big", big) == small
    assert list(cache) == [big]
    cache.check_integrity()


def test_adding_a_key_again_displaces_its_entry() -> None:
    """The old entry of the key is returned for release, and no other."""
    cache = GraphCache(2)
    first, second = filled(cache, 0, 0)
    again = entry()
    assert cache.add(0, again) == [first]
    assert list(cache) == [second, again]


def test_removed_entries_are_returned() -> None:
    """Whoever removes an entry releases it; a key without one gives nothing."""
    cache = GraphCache(4)
    first, second, third = filled(cache, 0, 0, 0)
    assert cache.remove(1) is second
    assert cache.remove(1) is None
    assert cache.clear() == [first, third]
    assert len(cache) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=30), st.integers(1, 4))
def test_no_sequence_of_additions_breaks_the_limits(additions: list[tuple[Hashable, int]], max_graphs: int) -> None:
    """After each addition count and bytes are within the limits, and every entry is kept or returned."""
    cache = GraphCache(max_graphs, max_bytes=100)
    returned = 0
    for count, (key, nbytes) in enumerate(additions, 1):
        returned += len(cache.add(key, entry(nbytes)))
        cache.check_integrity()
        assert cache.get(key) is not None
        assert len(cache) + returned == count


def test_a_released_entry_in_the_cache_is_found() -> None:
    """An entry that was released and is still looked up would fail each call."""
    cache = GraphCache(2)
    filled(cache, 0)[0].release()
    with pytest.raises(IntegrityError, match="was released and is still in the cache"):
        cache.check_integrity()


def test_an_entry_under_two_keys_is_found() -> None:
    """Evicting one key would release the graph of the other."""
    cache = GraphCache(2)
    (first,) = filled(cache, 0)
    cache.add("other", first)
    with pytest.raises(IntegrityError, match="two keys"):
        cache.check_integrity()


def test_too_many_entries_are_found() -> None:
    """A limit that was lowered behind the cache's back shows."""
    cache = GraphCache(2)
    filled(cache, 0, 0)
    cache.max_graphs = 1
    with pytest.raises(IntegrityError, match="2 entries, more than max_cached_graphs=1"):
        cache.check_integrity()


def test_too_many_bytes_are_found() -> None:
    """An entry that grew after it was added shows."""
    cache = GraphCache(2, max_bytes=100)
    first, _ = filled(cache, 10, 10)
    first.graph = Sized(95)
    with pytest.raises(IntegrityError, match="105 bytes, more than memory_budget_bytes=100"):
        cache.check_integrity()


@pytest.mark.parametrize(
    ("limits", "named"), [((0, None), "max_cached_graphs must be .* got 0"), ((1, 0), "memory_budget_bytes .* got 0")]
)
def test_limits_must_be_positive(limits: tuple[int, int | None], named: str) -> None:
    """A cache that can hold nothing is a mistake."""
    with pytest.raises(ConfigError, match=named):
        GraphCache(*limits)


def test_repr_is_a_status_line() -> None:
    """Count, bytes and limits."""
    cache = GraphCache(4, max_bytes=100)
    filled(cache, 30, 20)
    assert repr(cache) == "<GraphCache 2 of 4 graphs, 50 of 100 bytes>"
