"""A cache against a simple model: its limits hold, nothing alive is freed or lost, the counts agree."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphdispatch.engines import CUDAGraphEntry, EntryState, EvictionReason
from graphdispatch.memory.cache import GraphCache, Victim

from ..sized import entry

KEYS, BYTES = st.integers(0, 5), st.integers(0, 60)


class Cache(RuleBasedStateMachine):
    """``held`` is the model: what the cache must contain, by key."""

    @initialize(most=st.integers(1, 4), most_bytes=st.none() | st.integers(20, 100), min_replays=st.integers(0, 3))
    def start(self, most: int, most_bytes: int | None, min_replays: int) -> None:
        self.cache = GraphCache(most, most_bytes)
        self.cache.min_replays = min_replays
        self.held: dict[int, CUDAGraphEntry] = {}
        self.released = self.freed = 0

    @rule(key=KEYS, nbytes=BYTES, replays=st.integers(0, 4))
    def add(self, key: int, nbytes: int, replays: int) -> None:
        """Keep a new entry, and release what it displaces; an entry of the same key is always among that."""
        new = entry(nbytes, replays, key=key)
        old = self.held.get(key)
        victims = self.cache.add(key, new)
        if self.cache.max_bytes is not None and nbytes > self.cache.max_bytes:
            assert [(victim.entry, victim.reason) for victim in victims] == [(new, EvictionReason.BYTES)]
            self.released += 1
            self.freed += victims[0].release().freed_bytes
            return
        assert [victim.entry for victim in victims if victim.reason is EvictionReason.REPLACED] == [old] * bool(old)
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
    def remove(self, key: int) -> None:
        """Taken out by its owner, which is no eviction."""
        gone = self.cache.remove(key)
        assert gone is self.held.pop(key, None)
        if gone is not None:
            gone.release()

    @rule(key=KEYS)
    def retire(self, key: int) -> None:
        """Taken out as an eviction."""
        held = self.held.get(key)
        if held is not None:
            self.let_go(self.cache.retire(held, EvictionReason.STALE))
            assert key not in self.held

    @rule()
    def clear(self) -> None:
        """Everything."""
        assert self.cache.clear() == list(self.held.values())
        self.held.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        """The same entries under the same keys, all alive; limits and counts as they should be."""
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        assert {key: self.cache.get(key) for key in range(6) if self.cache.get(key)} == self.held
        assert all(one.state is not EntryState.EVICTED for one in self.held.values())
        stats = self.cache.stats
        assert (stats.evictions, stats.evicted_bytes) == (self.released, self.freed)
        assert len(stats.last_evictions) == min(self.released, 64)
        assert len(self.held) <= self.cache.max_graphs
        held = sum(one.nbytes for one in self.held.values())
        assert self.cache.max_bytes is None or held <= self.cache.max_bytes

    def let_go(self, victims: list[Victim]) -> None:
        """Release victims once each, with the model's books."""
        assert len({victim.entry for victim in victims}) == len(victims)
        for victim in victims:
            assert self.held.pop(victim.key) is victim.entry  # type: ignore[call-overload]
            self.released += 1
            self.freed += victim.entry.nbytes
            assert victim.release().freed_bytes >= 0


TestCache = Cache.TestCase
TestCache.settings = settings(stateful_step_count=40)
