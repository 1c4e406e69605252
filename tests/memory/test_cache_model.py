"""Two caches under one budget against a simple model: limits hold, nothing alive is freed or lost, the counts agree."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphdispatch import MemoryBudget
from graphdispatch.engines import CUDAGraphEntry, EntryState, EvictionReason
from graphdispatch.memory.cache import GraphCache, Victim

from ..sized import entry

WHICH, KEYS, BYTES = st.integers(0, 1), st.integers(0, 5), st.integers(0, 60)
LIMITS = st.tuples(st.none() | st.integers(20, 150), st.none() | st.integers(1, 6))


class Caches(RuleBasedStateMachine):
    """``held`` is the model: what each cache must contain, by key."""

    @initialize(
        shared=LIMITS,
        own=st.tuples(*[st.tuples(st.integers(1, 4), st.none() | st.integers(20, 100))] * 2),
        min_replays=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    )
    def start(
        self,
        shared: tuple[int | None, int | None],
        own: tuple[tuple[int, int | None], tuple[int, int | None]],
        min_replays: tuple[int, int],
    ) -> None:
        self.budget = MemoryBudget(*shared)
        self.caches = [GraphCache(*limits, budget=self.budget) for limits in own]
        for cache, least in zip(self.caches, min_replays, strict=True):
            cache.min_replays = least
        self.limits = [cache.limit for cache in self.caches]
        self.held: list[dict[int, CUDAGraphEntry]] = [{}, {}]
        self.released: list[int] = [0, 0]
        self.freed: list[int] = [0, 0]

    @rule(which=WHICH, key=KEYS, nbytes=BYTES, replays=st.integers(0, 4))
    def add(self, which: int, key: int, nbytes: int, replays: int) -> None:
        """Keep a new entry, and release what it displaces; an entry of the same key is always among that."""
        new = entry(nbytes, replays, key=key)
        old = self.held[which].get(key)
        victims = self.caches[which].add(key, new)
        limits = (self.budget.memory_budget_bytes, self.limits[which].memory_budget_bytes)
        if nbytes > min(limit for limit in (nbytes, *limits) if limit is not None):
            assert [(victim.entry, victim.reason) for victim in victims] == [(new, EvictionReason.BYTES)]
            self.released[which] += 1
            self.freed[which] += victims[0].release().freed_bytes
            return
        assert [victim.entry for victim in victims if victim.reason is EvictionReason.REPLACED] == [old] * bool(old)
        self.let_go(victims)
        self.held[which][key] = new

    @rule(which=WHICH, is_recent=st.booleans())
    def make_room(self, which: int, is_recent: bool) -> None:
        """Room for one more of the average before, if ``has_room`` said so; none goes that was used after ``since``."""
        uses = sorted(one.last_used for one in self.entries())
        since = uses[len(uses) // 2] if uses and is_recent else None
        is_possible = self.caches[which].has_room(since)
        limits = [(self.budget, self.entries), (self.limits[which], lambda: list(self.held[which].values()))]
        averages = [sum(one.nbytes for one in held()) // max(len(held()), 1) for _, held in limits]
        victims = self.caches[which].make_room(since)
        assert since is None or all(victim.entry.last_used < since for victim in victims)
        self.let_go(victims)
        if is_possible:
            for (limit, held), average in zip(limits, averages, strict=True):
                most, room = limit.max_cached_graphs, limit.memory_budget_bytes
                assert most is None or len(held()) < most
                assert room is None or sum(one.nbytes for one in held()) + average <= room

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        """A hit."""
        data.draw(st.sampled_from(self.entries())).increment_replay()

    @rule(which=WHICH, key=KEYS)
    def remove(self, which: int, key: int) -> None:
        """Taken out by its owner, which is no eviction."""
        gone = self.caches[which].remove(key)
        assert gone is self.held[which].pop(key, None)
        if gone is not None:
            gone.release()

    @rule(which=WHICH, key=KEYS)
    def retire(self, which: int, key: int) -> None:
        """Taken out as an eviction."""
        held = self.held[which].get(key)
        if held is not None:
            self.let_go(self.caches[which].retire(held, EvictionReason.STALE))
            assert key not in self.held[which]

    @rule(which=WHICH)
    def clear(self, which: int) -> None:
        """Everything of one cache, and nothing of the other."""
        assert self.caches[which].clear() == list(self.held[which].values())
        self.held[which].clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        """The same entries under the same keys, all alive; limits and counts as they should be."""
        if not hasattr(self, "caches"):
            return
        for cache, held, released, freed in zip(self.caches, self.held, self.released, self.freed, strict=True):
            cache.check_integrity()
            assert {key: cache.get(key) for key in range(6) if cache.get(key)} == held
            assert all(one.state is not EntryState.EVICTED for one in held.values())
            assert (cache.stats.evictions, cache.stats.evicted_bytes) == (released, freed)
            assert len(cache.stats.last_evictions) == min(released, 64)
        for limit, held in [(self.budget, self.entries()), *zip(self.limits, map(dict.values, self.held), strict=True)]:
            most, room = limit.max_cached_graphs, limit.memory_budget_bytes
            assert most is None or len(held) <= most
            assert room is None or sum(one.nbytes for one in held) <= room

    def let_go(self, victims: list[Victim]) -> None:
        """Release victims once each, with the model's books."""
        assert len({victim.entry for victim in victims}) == len(victims)
        for victim in victims:
            which = [cache is victim.owner for cache in self.caches].index(True)
            assert self.held[which].pop(victim.key) is victim.entry  # type: ignore[call-overload]
            self.released[which] += 1
            self.freed[which] += victim.entry.nbytes
            assert victim.release().freed_bytes >= 0

    def entries(self) -> list[CUDAGraphEntry]:
        return [one for held in self.held for one in held.values()]


TestCaches = Caches.TestCase
TestCaches.settings = settings(stateful_step_count=40)
