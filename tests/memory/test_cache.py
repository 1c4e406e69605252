"""``GraphCache``: limits by count and bytes, which entry goes, what an eviction reports, integrity."""

from collections.abc import Hashable
from threading import get_ident

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch.backends.base import Pool
from graphdispatch.engines import EntryState
from graphdispatch.errors import ConfigError, IntegrityError
from graphdispatch.memory.cache import GraphCache
from graphdispatch.stats import EvictionReason

from ..sized import Sized, entry, filled, gone


def test_the_least_recently_used_goes() -> None:
    """Recency is the last replay, not the time of adding."""
    cache = GraphCache(2)
    first, second = filled(cache, 0, 0)
    first.increment_replay()
    assert gone(cache.add(2, entry())) == [second]
    assert cache.get(0) is first
    assert cache.get(1) is None


def test_room_is_made_before_adding() -> None:
    """At capacity one entry goes ahead of the capture, so that adding displaces nothing."""
    cache = GraphCache(2)
    first, _ = filled(cache, 0, 0)
    assert gone(cache.make_room()) == [first]
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
    assert gone(cache.add("new", entry(60))) == [first, second]
    assert list(cache) == [third, cache.get("new")]
    assert cache.nbytes == 90


def test_one_entry_over_the_budget_is_not_kept() -> None:
    """It is the only one that is returned for release, and displaces nothing, an entry of its key neither."""
    cache = GraphCache(10, max_bytes=100)
    small = filled(cache, 10, 10)
    big = entry(500)
    assert gone(cache.add(0, big)) == [big]
    assert list(cache) == small
    cache.check_integrity()


class Grown(Pool):
    """A pool that holds 90 bytes as long as it has a graph, and ``more`` that captures left behind."""

    more = 0

    @property
    def nbytes(self) -> int:
        return 90 + self.more

    def order_after_last_use(self) -> None:
        """Nothing runs."""

    def is_idle(self) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to release."""


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


def test_adding_a_key_again_displaces_its_entry() -> None:
    """The old entry of the key is returned for release, and no other."""
    cache = GraphCache(2)
    first, second = filled(cache, 0, 0)
    again = entry()
    (replaced,) = cache.add(0, again)
    assert (replaced.entry, replaced.reason) == (first, EvictionReason.REPLACED)
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


def test_room_is_made_for_the_bytes_to_come() -> None:
    """Before a capture, as many bytes are freed as the entries there hold on average."""
    cache = GraphCache(10, max_bytes=100)
    first, _, _ = filled(cache, 30, 40, 20)
    assert gone(cache.make_room()) == [first]
    assert cache.add(3, entry(40)) == []


def test_only_what_was_not_used_since_may_go() -> None:
    """With ``since`` an entry that was used later stays, and there is no room if all were."""
    cache = GraphCache(2)
    first, second = filled(cache, 0, 0)
    first.increment_replay()
    assert not cache.has_room(second.last_used)
    assert cache.has_room(first.last_used)
    assert gone(cache.make_room(first.last_used)) == [second]
    assert cache.has_room(0)
    assert not cache.is_full


def test_asking_for_room_changes_nothing() -> None:
    """``has_room`` and ``is_full`` evict nothing and age nothing."""
    cache = GraphCache(2)
    filled(cache, 0, 0)
    assert cache.is_full
    assert [cache.has_room() for _ in range(3)] == [True] * 3
    assert len(cache) == 2
    assert gone(cache.make_room())[0].key == 0


def test_what_frees_nothing_stays() -> None:
    """Where bytes are short, an entry without bytes of its own is no victim, though its score is the lowest."""
    cache = GraphCache(10, max_bytes=100)
    empty, large = filled(cache, 0, 90)
    assert gone(cache.add(2, entry(50))) == [large]
    assert cache.get(0) is empty


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
    """``evict_one`` drops one graph though the limits hold: not one in a replay of this thread, nor a borrowed one."""
    cache = GraphCache(10, eviction="lfu")
    assert cache.evict_one(EvictionReason.OUT_OF_MEMORY) == []
    cache.add("borrowed", entry(), owns=False)
    inside, oldest, _ = filled(cache, 0, 0, 0)
    oldest.replay_count = 99
    inside.pool.replaying_on = get_ident()
    (victim,) = cache.evict_one(EvictionReason.OUT_OF_MEMORY)
    assert (victim.entry, victim.reason, len(cache)) == (oldest, EvictionReason.OUT_OF_MEMORY, 3)


@pytest.mark.parametrize("how", ["replaced", "evicted", "refused", "retired"])
def test_a_borrowed_graph_is_forgotten_and_never_released(how: str) -> None:
    """Whoever captured it goes on using it; the eviction is counted, and freed nothing."""
    cache = GraphCache(1, max_bytes=100)
    borrowed = entry(500 if how == "refused" else 70, key="key")
    victims = cache.add("key", borrowed, owns=False)
    if how == "replaced":
        victims = cache.add("key", entry())
    elif how == "evicted":
        victims = cache.make_room()
    elif how == "retired":
        victims = cache.retire(borrowed, EvictionReason.STALE)
    (victim,) = victims
    assert (victim.entry, victim.release().freed_bytes) == (borrowed, 0)
    assert borrowed.state is not EntryState.EVICTED
    assert (cache.stats.evictions, cache.stats.evicted_bytes) == (1, 0)


def test_a_key_is_borrowed_no_longer_than_its_entry_stands() -> None:
    """An entry of the cache's own under the same key is released as any other."""
    cache = GraphCache(2)
    cache.add("key", entry(), owns=False)
    cache.remove("key")
    own = entry(70)
    cache.add("key", own)
    assert cache.make_room() == []
    (victim,) = cache.evict_one(EvictionReason.OUT_OF_MEMORY)
    assert victim.release().freed_bytes == 70


def test_clear_leaves_borrowed_graphs_to_their_owners() -> None:
    """They are forgotten, and not among what the caller has to release."""
    cache = GraphCache(4)
    cache.add("borrowed", entry(), owns=False)
    own = filled(cache, 0, 0)
    assert cache.clear() == own
    assert len(cache) == 0


def test_a_borrowed_graph_may_be_released_by_its_owner() -> None:
    """That is no fault of this cache, whichever keys it stands under."""
    cache = GraphCache(4)
    borrowed = entry()
    cache.add("borrowed", borrowed, owns=False)
    cache.add("again", borrowed, owns=False)
    borrowed.release()
    cache.check_integrity()


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


def test_the_reason_says_which_limit() -> None:
    """Bytes and count are told apart."""
    cache = GraphCache(10, max_bytes=100)
    filled(cache, 90)
    assert [victim.reason for victim in cache.add(1, entry(50))] == [EvictionReason.BYTES]


def test_an_entry_is_retired_by_itself_and_not_by_its_key() -> None:
    """Retiring an entry that another has replaced does nothing to the other."""
    cache = GraphCache(2)
    (first,) = filled(cache, 0)
    again = entry(key=0)
    cache.add(0, again)
    assert cache.retire(first, EvictionReason.DROPPED) == []
    assert gone(cache.retire(again, EvictionReason.DROPPED)) == [again]


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
    cache.limit.max_cached_graphs = 1
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
