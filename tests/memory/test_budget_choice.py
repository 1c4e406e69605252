"""What a ``MemoryBudget`` chooses, against all subsets of small sets of entries; and how it is enforced afterwards."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from graphdispatch import MemoryBudget
from graphdispatch.backends.base import Graph, Pool
from graphdispatch.engines import CUDAGraphEntry, EntryState
from graphdispatch.memory.budget import Victim
from graphdispatch.memory.cache import GraphCache
from graphdispatch.stats import EvictionReason

from ..sized import Sized, entry, filled, gone


class Kind(NamedTuple):
    """What an entry holds for itself, which pool it is in, how much of that it needs, and whether it may go."""

    own: int
    pool: int = 0
    part: int = 0
    may_go: bool = True


class Part(Sized):
    """A graph that needs ``part`` bytes of its pool."""

    def __init__(self, own: int, part: int) -> None:
        super().__init__(own)
        self.part = part


class Shared(Pool):
    """A pool as large as the largest part that one of its graphs needs."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = False

    @property
    def nbytes(self) -> int:
        return 0

    def nbytes_of(self, graphs: Sequence[Graph]) -> int:
        return max((graph.part for graph in graphs if isinstance(graph, Part)), default=0)

    def order_after_last_use(self) -> None:
        """Nothing runs."""

    def is_idle(self) -> bool:
        return not self.busy

    def close(self) -> None:
        """There is nothing to release."""


def made(kinds: Iterable[Kind]) -> list[CUDAGraphEntry]:
    """Entries of these kinds; equal numbers of pools are one pool."""
    pools: dict[int, Shared] = {}
    entries = []
    for key, kind in enumerate(kinds):
        entries.append(entry(key=key))
        entries[-1].graph = Part(kind.own, kind.part)
        entries[-1].pool = pools.setdefault(kind.pool, Shared())
    return entries


def holds(kinds: Collection[Kind]) -> int:
    """The bytes that these hold together."""
    pools = {kind.pool for kind in kinds}
    return sum(kind.own for kind in kinds) + sum(max(k.part for k in kinds if k.pool == pool) for pool in pools)


def agrees(kinds: list[Kind], victims: set[int], is_enough: bool, fits: Callable[[list[Kind]], bool]) -> None:
    """``victims`` are what has to go, in the order of ``kinds``; or nothing that may go is enough."""

    def without(dropped: Collection[int]) -> bool:
        return fits([kind for index, kind in enumerate(kinds) if index not in dropped])

    allowed = [index for index, kind in enumerate(kinds) if kind.may_go]
    subsets = [subset for count in range(len(allowed) + 1) for subset in combinations(allowed, count)]
    assert is_enough is any(without(subset) for subset in subsets)
    assert victims <= set(allowed)
    if is_enough:
        assert without(victims)
        assert not any(without(victims - {index}) for index in victims)
        fewest = next(count for count in range(len(allowed) + 1) if without(allowed[:count]))
        assert victims <= set(allowed[:fewest])
        assert not fewest or allowed[fewest - 1] in victims
    else:
        assert victims == set(allowed)


KINDS = st.lists(st.builds(Kind, st.integers(0, 30), st.integers(0, 2), st.integers(0, 30), st.booleans()), max_size=6)
BYTES, COUNT = st.none() | st.integers(1, 90), st.none() | st.integers(1, 6)


@given(KINDS, st.none() | st.builds(Kind, st.integers(0, 30), st.integers(0, 2), st.integers(0, 30)), BYTES, COUNT)
@example([Kind(0), Kind(11)], None, 20, 2)
@example([Kind(1, may_go=False), Kind(1), Kind(30)], None, 40, None)
def test_room_is_made_if_there_can_be(
    kinds: list[Kind], newcomer: Kind | None, most_bytes: int | None, most: int | None
) -> None:
    """It is enough exactly if some set of entries that may go is, and then no more of them go than must.

    What is not known of a newcomer counts as the average of all entries before any of them goes.
    """
    kinds = sorted(kinds, key=lambda kind: not kind.may_go)  # those used last may not go
    *entries, new = made([*kinds, newcomer or Kind(0)])
    cache, budget = GraphCache(10, eviction="lru"), MemoryBudget(most_bytes, most, eviction="lru")
    for key, one in enumerate(entries):
        assert cache.add(key, one) == []
    budget.join(cache)
    since = next((one.last_used for one, kind in zip(entries, kinds, strict=True) if not kind.may_go), None)
    average = sum(kind.own for kind in kinds) // max(len(kinds), 1)

    def fits(kept: list[Kind]) -> bool:
        held = holds(kept) + average if newcomer is None else holds([*kept, newcomer])
        return (most is None or len(kept) < most) and (most_bytes is None or held <= most_bytes)

    choice = budget.choose(None if newcomer is None else new, since)
    agrees(kinds, {int(victim.entry.key) for _, victim in choice.victims}, choice.is_enough, fits)  # type: ignore[call-overload]
    is_count = most is not None and len(kinds) >= most
    reason = EvictionReason.COUNT if is_count else EvictionReason.BYTES
    assert all(victim.reason is reason for _, victim in choice.victims)
    assert len(cache) == len(kinds)


@given(KINDS, BYTES, COUNT)
def test_limits_are_enforced_afterwards(kinds: list[Kind], most_bytes: int | None, most: int | None) -> None:
    """As much goes as must, of what may: what is to be kept may not, nor what holds nothing where bytes are over."""
    entries = made(kinds)
    cache, budget = GraphCache(10, eviction="lru"), MemoryBudget(most_bytes, most, eviction="lru")
    for key, one in enumerate(entries):
        cache.add(key, one)
    budget.join(cache)
    is_many = most is not None and len(kinds) > most
    useful = [kind._replace(may_go=kind.may_go and (is_many or kind.own + kind.part > 0)) for kind in kinds]

    def fits(kept: list[Kind]) -> bool:
        return (most is None or len(kept) <= most) and (most_bytes is None or holds(kept) <= most_bytes)

    victims = budget.enforce([one for one, kind in zip(entries, kinds, strict=True) if not kind.may_go])
    kept = [kinds[int(one.key)] for one in cache]  # type: ignore[call-overload]
    agrees(useful, {int(victim.key) for victim in victims}, fits(kept), fits)  # type: ignore[call-overload]
    assert {*gone(victims), *cache} == set(entries)
    assert budget.enforce(list(cache)) == []


def joined(*sizes: int, limit: int) -> tuple[MemoryBudget, list[GraphCache], list[CUDAGraphEntry]]:
    """A budget that two finished caches have joined, each with entries of these sizes."""
    budget = MemoryBudget(limit, eviction="lru")
    caches = [GraphCache(10), GraphCache(10, budget=MemoryBudget())]
    entries = [one for cache in caches for one in filled(cache, *sizes)]
    for cache in caches:
        budget.join(cache)
    return budget, caches, entries


def test_a_joined_cache_is_bounded_with_the_others() -> None:
    """The least recently used of all goes, is released, and counts with its own cache."""
    budget, (first, second), entries = joined(30, 30, limit=100)
    entries[0].increment_replay()
    (victim,) = budget.enforce()
    victim.release()
    assert (victim.entry, victim.reason) == (entries[1], EvictionReason.BYTES)
    assert (len(first), first.stats.evictions, second.stats.evictions) == (1, 1, 0)
    budget.check_integrity()


def test_a_cache_joins_once() -> None:
    """Its graphs count once, however often it joins."""
    budget, caches, _ = joined(30, limit=100)
    budget.join(caches[0])
    assert (budget.num_graphs, budget.nbytes) == (2, 60)


def test_an_entry_in_two_caches_counts_once_and_goes_from_both() -> None:
    """One that somebody registered elsewhere is released by its owner's victim alone."""
    budget, caches, entries = joined(40, limit=100)
    caches[1].add("again", entries[0], owns=False)
    assert (budget.num_graphs, budget.enforce()) == (2, [])
    budget.memory_budget_bytes = 50
    victims = budget.enforce()
    assert gone(victims) == [entries[0]] * 2
    assert [victim.owns for victim in victims] == [True, False]
    assert sum(victim.release().freed_bytes for victim in victims) == 40
    assert entries[0].state is EntryState.EVICTED


def test_a_replay_in_flight_keeps_its_graph() -> None:
    """Then the budget may still be exceeded."""
    cache, budget = GraphCache(10), MemoryBudget(10)
    (one,) = made([Kind(40)])
    cache.add(0, one)
    budget.join(cache)
    pool: Any = one.pool
    pool.busy = True
    assert budget.enforce() == []
    pool.busy = False
    assert gone(budget.enforce()) == [one]


class Replaces(GraphCache):
    """A cache in which another entry takes the place of a victim at the last moment, as another thread may do it."""

    def drop(self, victim: Victim) -> bool:
        """Replace it first."""
        self.add(victim.key, entry(5))
        return super().drop(victim)


def test_what_another_thread_took_meanwhile_is_not_dropped_again() -> None:
    """An entry that is replaced between the choice and its end stays out of the victims, and its successor stays."""
    cache, budget = Replaces(10), MemoryBudget(10)
    filled(cache, 40)
    budget.join(cache)
    assert budget.enforce() == []
    assert (len(cache), cache.nbytes) == (1, 5)
