"""``GraphCache``: what ``test_cache_model.py`` does not model: replays, pools, records, integrity."""

from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest

from graphdispatch.engines import EvictionReason
from graphdispatch.errors import ConfigError, IntegrityError
from graphdispatch.memory.cache import GraphCache

from ..sized import Sized, Unused, entry, filled, gone


class Grown(Unused):
    """A pool that holds 90 bytes as long as it has a graph, and ``more`` that captures left behind."""

    more = 0

    @property
    def nbytes(self) -> int:
        return 90 + self.more


def test_a_pool_that_grew_over_the_budget_is_emptied() -> None:
    """It shrinks only when its last graph goes, so that all of its graphs go, and those of other pools stay."""
    cache, pool = GraphCache(10, max_bytes=100), Grown()
    (other,) = filled(cache, 5)
    old, new = entry(1, key="old"), entry(1)
    old.pool = new.pool = pool
    assert cache.add("old", old) == []
    pool.more = 50
    assert gone(cache.add("new", new)) == [new, old]
    assert list(cache) == [other]
    cache.check_integrity()


def test_an_entry_in_a_replay_of_this_thread_stays() -> None:
    """A break that leads to a capture runs half-way through a replay, whose graph must not go."""
    cache = GraphCache(1)
    (first,) = filled(cache, 0)
    first.pool.replaying_on = get_ident()
    assert not cache.has_room()
    assert cache.make_room() == []
    first.pool.replaying_on = None
    assert gone(cache.make_room()) == [first]


def test_out_of_memory_costs_the_least_recently_used() -> None:
    """``evict_one`` drops one graph though the limits hold, and not one in a replay of this thread."""
    cache = GraphCache(10)
    assert cache.evict_one(EvictionReason.OUT_OF_MEMORY) == []
    inside, oldest, _ = filled(cache, 0, 0, 0)
    inside.pool.replaying_on = get_ident()
    (victim,) = cache.evict_one(EvictionReason.OUT_OF_MEMORY)
    assert (victim.entry, victim.reason, len(cache)) == (oldest, EvictionReason.OUT_OF_MEMORY, 2)


def test_a_release_is_reported_as_it_was() -> None:
    """The record has the entry's history, the bytes that came back, and why; it holds no memory."""
    cache = GraphCache(1)
    old = entry(70, replays=3, capture_ms=5.0)
    cache.add("old", old)
    (victim,) = cache.make_room()
    assert cache.stats.evictions == 0
    freed = victim.release()
    assert (freed.key, freed.replays, freed.capture_time_ms, freed.freed_bytes) == ("old", 3, 5.0, 70)
    assert freed.reason is EvictionReason.COUNT
    assert cache.stats.last_evictions == (freed,)
    assert (cache.stats.evictions, cache.stats.evicted_bytes) == (1, 70)


def test_an_entry_is_retired_by_itself_and_not_by_its_key() -> None:
    """Retiring an entry that another has replaced does nothing to the other."""
    cache = GraphCache(2)
    (first,) = filled(cache, 0)
    again = entry(key=0)
    cache.add(0, again)
    assert cache.retire(first, EvictionReason.DROPPED) == []
    assert gone(cache.retire(again, EvictionReason.DROPPED)) == [again]


def _release(cache: GraphCache) -> None:
    cache.get(0).release()  # type: ignore[union-attr]


def _grow(cache: GraphCache) -> None:
    cache.get(0).graph = Sized(95)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (_release, "was released and is still in the cache"),
        (lambda cache: cache.add("other", cache.get(0)), "two keys"),
        (lambda cache: setattr(cache, "max_graphs", 1), "2 entries, more than max_cached_graphs=1"),
        (_grow, "105 bytes, more than memory_budget_bytes=100"),
    ],
    ids=["released", "twice", "many", "large"],
)
def test_a_fault_behind_the_cache_s_back_is_found(fault: Callable[[GraphCache], Any], told: str) -> None:
    """Entries that were released, stand twice, are too many or grew."""
    cache = GraphCache(3, max_bytes=100)
    filled(cache, 10, 10)
    cache.check_integrity()
    assert repr(cache) == "<GraphCache 2 of 3 graphs, 20 of 100 bytes>"
    fault(cache)
    with pytest.raises(IntegrityError, match=told):
        cache.check_integrity()


@pytest.mark.parametrize(
    ("limits", "named"), [((0, None), "max_cached_graphs must be .* got 0"), ((1, 0), "memory_budget_bytes .* got 0")]
)
def test_limits_must_be_positive(limits: tuple[int, int | None], named: str) -> None:
    """A cache that can hold nothing is a mistake."""
    with pytest.raises(ConfigError, match=named):
        GraphCache(*limits)
