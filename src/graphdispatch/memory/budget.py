"""``MemoryBudget``: a limit on graphs and bytes, over one cache or over several, and what is evicted for it."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, ref

from ..copying import Shared
from ..errors import ConfigError, IntegrityError, shown
from ..forking import make_rlock
from ..stats import Eviction, EvictionReason
from .accounting import bytes_of
from .entry import CUDAGraphEntry

if TYPE_CHECKING:
    from .cache import GraphCache
    from .eviction import EvictionPolicy

__all__ = ["Choice", "MemoryBudget", "Victim"]

_Fits = Callable[[set[CUDAGraphEntry]], bool]


class Victim(NamedTuple):
    """An entry that has left its cache and is to be released, outside of all locks of caches."""

    owner: "GraphCache"
    key: Hashable
    entry: CUDAGraphEntry
    reason: EvictionReason
    tag: str = ""
    owns: bool = True
    """Whether the graph is the cache's own to release; else somebody else captured it and goes on using it."""

    def release(self) -> Eviction:
        """Release the entry, if it is the cache's own, and tell the cache what that freed; waits for calls that use it.

        The freed bytes are the backend's figures before and after: of a pool that others use, nothing comes back.
        """
        entry, freed = self.entry, 0
        if self.owns:
            with entry.pool.lock:
                before = entry.nbytes + entry.pool.nbytes
                entry.release()
                freed = before - entry.nbytes - entry.pool.nbytes
        eviction = Eviction(
            self.key, entry.descriptor, entry.replay_count, entry.capture_time_ms, freed, self.reason, self.tag
        )
        self.owner.record(eviction)
        return eviction


class Choice(NamedTuple):
    """The entries that have to go, with their scores, and whether there is room then."""

    victims: list[tuple[float, Victim]]
    is_enough: bool


class MemoryBudget(Shared):
    """A limit on the graphs and bytes of several callables together.

    Give one budget to several wrappers, ``graphed`` callables or managers (``CUDAGraphOptions(budget=...)``). When it
    is full, the graph of the lowest score among all of theirs goes, and each of them keeps its own limits as well. A
    graph that another one's capture evicted is captured anew when it comes again. A graph that is larger than the
    budget by itself is not kept. The budget keeps no callable alive. Thread-safe.

    Args:
        memory_budget_bytes: The most bytes of pools, static inputs, output buffers and graphs; shared memory counts
            once. None: no limit.
        max_cached_graphs: The most graphs. None: no limit.
        eviction: Which graph goes: the name of a policy, or an ``EvictionPolicy``.

    Raises:
        ConfigError: A limit or the policy is wrong.
    """

    def __init__(
        self,
        memory_budget_bytes: int | None = None,
        max_cached_graphs: int | None = None,
        *,
        eviction: "str | EvictionPolicy" = "frecency",
    ) -> None:
        for name, value in (("max_cached_graphs", max_cached_graphs), ("memory_budget_bytes", memory_budget_bytes)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be at least 1 or None, got {shown(value)}")
        self.memory_budget_bytes = memory_budget_bytes
        self.max_cached_graphs = max_cached_graphs
        if eviction != "frecency":
            from .eviction import make_eviction

            self.eviction = make_eviction(eviction)
        self.lock = make_rlock()
        """Guards the policy, and the content of the caches that were made with this budget."""
        self._references: tuple[ReferenceType[GraphCache], ...] = ()

    @cached_property
    def eviction(self) -> "EvictionPolicy":
        """Who has to go. The usual policy is made, and loaded, when somebody has to. Called with ``lock`` held."""
        from .eviction import Frecency

        return Frecency()

    def join(self, cache: "GraphCache") -> None:
        """Count the graphs of ``cache`` from now on; nothing is evicted yet.

        A cache that was made with this budget has joined it, and makes room in it before each capture. Any other member
        adds graphs without a check; call ``enforce`` afterwards. The budget keeps no cache alive.

        Args:
            cache: The cache.
        """
        with self.lock:
            self._references = (*(known for known in self._references if known() not in (None, cache)), ref(cache))

    @property
    def _members(self) -> "list[GraphCache]":
        return [cache for known in self._references if (cache := known()) is not None]

    def choose(
        self, newcomer: CUDAGraphEntry | None = None, since: int | None = None, gone: Collection[CUDAGraphEntry] = ()
    ) -> Choice:
        """Which graphs have to go to make room for one more. Changes nothing; call it with ``lock`` held.

        The lowest scores go first, but an entry stays if it fits beside all others that stay: one whose end frees
        nothing does not go for its bytes.

        Args:
            newcomer: The entry that needs room. None: one more graph, as large as those here are on average.
            since: Only entries whose last use was before this use may go. None: any.
            gone: Entries that go in any case.

        Returns:
            The entries that have to go, with their scores, and whether there is room then.
        """
        held = [victim for victim in self.candidates() if victim.entry not in gone]
        # The average is taken before anything goes. That of the entries that stay rises when small ones go, so that
        # fewer entries might not fit where more do, and no search for the fewest victims would be right.
        average = sum(victim.entry.nbytes for victim in held) // max(len(held), 1)

        def fits(kept: set[CUDAGraphEntry]) -> bool:
            if self._is_many(len(kept) + 1):
                return False
            return self._is_small(kept, average) if newcomer is None else self._is_small(kept | {newcomer})

        reason = EvictionReason.COUNT if self._is_many(len(held) + 1) else EvictionReason.BYTES
        return self._choose(held, reason, fits, lambda entry: since is None or entry.last_used < since)

    def enforce(self, keep: Collection[CUDAGraphEntry] = ()) -> list[Victim]:
        """Drop entries until the limits hold, whichever cache has them.

        Where only bytes exceed the limit, entries that hold none stay. So the limits may still be exceeded afterwards.
        Thread-safe; locks one member at a time.

        Args:
            keep: Entries that stay. Those with a replay in flight stay as well.

        Returns:
            What was dropped; the caller releases it.
        """
        with self.lock:
            held = self.candidates()
            reason = EvictionReason.COUNT if self._is_many(len(held)) else EvictionReason.BYTES

            def fits(kept: set[CUDAGraphEntry]) -> bool:
                return not self._is_many(len(kept)) and self._is_small(kept)

            def may_go(entry: CUDAGraphEntry) -> bool:
                is_use = reason is EvictionReason.COUNT or bytes_of([entry]) > 0
                return is_use and entry not in keep and entry.pool.is_idle()

            choice = self._choose(held, reason, fits, may_go)
        dropped = [(score, victim) for score, victim in choice.victims if victim.owner.drop(victim)]
        with self.lock:
            for score, victim in dropped:
                self.eviction.evicted(victim.entry, score)
        return [victim for _, victim in dropped]

    def candidates(self) -> list[Victim]:
        """What the members keep, as it would be evicted for its bytes. Called with ``lock`` held."""
        return [victim for cache in self._members for victim in cache.candidates()]

    def holds(self) -> bool:
        """Whether the members keep no more bytes than they may. Called with ``lock`` held."""
        return self._is_small({victim.entry for victim in self.candidates()})

    def _choose(
        self, held: Sequence[Victim], reason: EvictionReason, fits: _Fits, may_go: Callable[[CUDAGraphEntry], bool]
    ) -> Choice:
        """The entries of the lowest scores, as many as must go before the rest fits, without those that fit beside it.

        If entries fit, any part of them must fit too. If nothing is enough, all that may go are chosen.
        """
        places: dict[CUDAGraphEntry, list[Victim]] = {}  # one entry may be in several caches, and goes from all of them
        for victim in held:
            places.setdefault(victim.entry, []).append(victim)
        if fits(set(places)):
            return Choice([], True)
        # A break that makes this call runs on a thread that is half-way through a replay of its own.
        free = [entry for entry in places if may_go(entry) and not entry.pool.is_inside_replay()]
        is_enough = fits(set(places).difference(free))
        scores = dict(zip(places, self.eviction.scores(list(places)), strict=True)) if free else {}
        ranked = sorted(free, key=lambda entry: (scores[entry], entry.last_used))
        if is_enough:
            # As few measurements as can be: what is held falls with every victim.
            count = bisect_left(range(len(ranked)), True, key=lambda n: fits(set(places).difference(ranked[:n])))
            ranked = ranked[:count]
            for entry in ranked[-2::-1]:
                fewer = [other for other in ranked if other is not entry]
                if fits(set(places).difference(fewer)):
                    ranked = fewer
        leaving = [(scores[entry], victim._replace(reason=reason)) for entry in ranked for victim in places[entry]]
        return Choice(leaving, is_enough)

    def _is_many(self, graphs: int) -> bool:
        return self.max_cached_graphs is not None and graphs > self.max_cached_graphs

    def _is_small(self, kept: set[CUDAGraphEntry], more: int = 0) -> bool:
        return self.memory_budget_bytes is None or bytes_of(kept) + more <= self.memory_budget_bytes

    @property
    def num_graphs(self) -> int:
        """How many graphs the members keep."""
        return len({entry for cache in self._members for entry in cache})

    @property
    def nbytes(self) -> int:
        """Bytes that the members' graphs hold, everything that they share counted once."""
        return bytes_of({entry for cache in self._members for entry in cache})

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the members hold more than the limits allow."""
        with self.lock:
            entries = {entry for cache in self._members for entry in cache}
        if self._is_many(len(entries)):
            raise IntegrityError(f"{len(entries)} entries, more than max_cached_graphs={self.max_cached_graphs}")
        if not self._is_small(entries):
            held = bytes_of(entries)
            raise IntegrityError(f"{held} bytes, more than memory_budget_bytes={self.memory_budget_bytes}")

    def __reduce__(self) -> Any:
        return partial(MemoryBudget, eviction=self.eviction), (self.memory_budget_bytes, self.max_cached_graphs)

    def __repr__(self) -> str:
        most = "" if self.max_cached_graphs is None else f" of {self.max_cached_graphs}"
        limit = "" if self.memory_budget_bytes is None else f" of {self.memory_budget_bytes}"
        return f"<MemoryBudget {self.num_graphs}{most} graphs, {self.nbytes}{limit} bytes, {len(self._members)} caches>"
