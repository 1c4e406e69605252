"""``GraphCache`` against a simple model; and what that leaves out: replays, pools, records, integrity."""

from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphdispatch.engines import CUDAGraphEntry, EntryState, EvictionReason
from graphdispatch.errors import ConfigError, IntegrityError
from graphdispatch.runtime.cache import GraphCache, Victim

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
    assert cache.add(old) == []
    pool.more = 50
    assert gone(cache.add(new)) == [new, old]
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


def test_an_entry_that_goes_during_the_check_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may evict while the figures are compared."""
    cache = GraphCache(3, max_bytes=100)
    (entry,) = filled(cache, 10)

    def is_small(*_: Any) -> bool:
        for victim in cache.retire([entry], EvictionReason.STALE):
            victim.release()
        return True

    monkeypatch.setattr(cache, "_is_small", is_small)
    cache.check_integrity()
    assert entry.is_released


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda cache: next(iter(cache)).release(), "was released and is still in the cache"),
        (lambda cache: setattr(cache, "max_graphs", 1), "2 entries, more than max_cached_graphs=1"),
        (lambda cache: setattr(next(iter(cache)), "graph", Sized(95)), "105 bytes, more than memory_budget_bytes=100"),
    ],
    ids=["released", "many", "large"],
)
def test_a_fault_behind_the_cache_s_back_is_found(fault: Callable[[GraphCache], Any], message: str) -> None:
    """Entries that were released, are too many or grew."""
    cache = GraphCache(3, max_bytes=100)
    filled(cache, 10, 10)
    cache.check_integrity()
    assert repr(cache) == "<GraphCache 2 of 3 graphs, 20 of 100 bytes>"
    fault(cache)
    with pytest.raises(IntegrityError, match=message):
        cache.check_integrity()


@pytest.mark.parametrize(("limits", "named"), [((0, None), "max_cached_graphs"), ((1, 0), "memory_budget_bytes")])
def test_limits_must_be_positive(limits: tuple[int, int | None], named: str) -> None:
    """A cache that can hold nothing is a mistake."""
    with pytest.raises(ConfigError, match=f"{named} must be .* got 0"):
        GraphCache(*limits)


KEYS, BYTES = st.integers(0, 5), st.integers(0, 60)


class Cache(RuleBasedStateMachine):
    """``held`` is the model: what the cache must contain. The key of an entry tells which one takes its place."""

    @initialize(most=st.integers(1, 4), most_bytes=st.none() | st.integers(20, 100), min_replays=st.integers(0, 3))
    def start(self, most: int, most_bytes: int | None, min_replays: int) -> None:
        self.cache = GraphCache(most, most_bytes)
        self.cache.min_replays = min_replays
        self.held: dict[int, CUDAGraphEntry] = {}
        self.released = self.freed = 0

    @rule(key=KEYS, nbytes=BYTES, replays=st.integers(0, 4))
    def add(self, key: int, nbytes: int, replays: int) -> None:
        """Keep a new entry, and release what it displaces: the one whose place it takes is always among that."""
        new = entry(nbytes, replays, key=key)
        old = self.held.get(key)
        victims = self.cache.add(new, old)
        if self.cache.max_bytes is not None and nbytes > self.cache.max_bytes:
            assert [(victim.entry, victim.reason) for victim in victims] == [(new, EvictionReason.BYTES)]
            self.released += 1
            self.freed += new.nbytes
            victims[0].release()
            return
        assert [victim.entry for victim in victims if victim.reason is EvictionReason.REPLACED] == [old] * bool(old)
        assert old is None or self.cache.retire([old], EvictionReason.DROPPED) == []  # it is gone already
        self.let_go(victims)
        self.held[key] = new

    @rule(is_recent=st.booleans())
    def make_room(self, is_recent: bool) -> None:
        """Room for one more of the average before, if ``has_room`` said so; none goes that was used after ``since``."""
        uses = sorted(one.last_used for one in self.held.values())
        since = uses[len(uses) // 2] if uses and is_recent else None
        is_possible = self.cache.has_room(since)
        average = sum(one.nbytes for one in self.held.values()) // max(len(self.held), 1)
        victims = self.cache.make_room(since)
        assert since is None or all(victim.entry.last_used < since for victim in victims)
        self.let_go(victims)
        if is_possible:
            assert len(self.held) < self.cache.max_graphs
            held = sum(one.nbytes for one in self.held.values()) + average
            assert self.cache.max_bytes is None or held <= self.cache.max_bytes

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        """A hit."""
        data.draw(st.sampled_from(list(self.held.values()))).increment_replay()

    @rule(key=KEYS)
    def discard(self, key: int) -> None:
        """Taken out by its owner, which is no eviction."""
        gone = self.held.pop(key, None)
        if gone is not None:
            self.cache.discard(gone)
            gone.release()

    @rule(key=KEYS)
    def retire(self, key: int) -> None:
        """Taken out as an eviction."""
        held = self.held.get(key)
        if held is not None:
            self.let_go(self.cache.retire([held], EvictionReason.STALE))
            assert key not in self.held

    @invariant()
    def agrees_with_the_model(self) -> None:
        """The same entries, all alive; limits and counts as they should be."""
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        assert set(self.cache) == set(self.held.values())
        assert all(one.state is not EntryState.EVICTED for one in self.held.values())
        stats = self.cache.stats
        assert (stats.evictions, stats.evicted_bytes) == (self.released, self.freed)
        assert len(self.held) <= self.cache.max_graphs
        held = sum(one.nbytes for one in self.held.values())
        assert self.cache.max_bytes is None or held <= self.cache.max_bytes

    def let_go(self, victims: list[Victim]) -> None:
        """Release victims once each, with the model's books."""
        assert len({victim.entry for victim in victims}) == len(victims)
        for victim in victims:
            one, stats = victim.entry, self.cache.stats
            assert self.held.pop(one.key) is one  # type: ignore[call-overload]
            assert stats.evictions == self.released
            self.released += 1
            self.freed += one.nbytes
            counted = stats.eviction_reasons[victim.reason]
            victim.release()
            assert stats.eviction_reasons[victim.reason] == counted + 1


TestCache = Cache.TestCase
TestCache.settings = settings(stateful_step_count=40)
