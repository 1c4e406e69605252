"""``MemoryBudget``: at most so many graphs and bytes, over one cache or over several."""

import threading
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable
from typing import TYPE_CHECKING, NamedTuple
from weakref import ReferenceType, ref

from ..errors import ConfigError, IntegrityError
from ..stats import Eviction, EvictionReason
from .accounting import bytes_of
from .entry import CUDAGraphEntry
from .eviction import EvictionPolicy, make_eviction

if TYPE_CHECKING:
    from .cache import GraphCache

__all__ = ["Choice", "MemoryBudget", "Victim"]

_AS_ASKED = (EvictionReason.INVALIDATED, EvictionReason.ASLEEP, EvictionReason.DROPPED)


class Victim(NamedTuple):
    """An entry that has left its cache and is to be released, outside of all locks of caches."""

    cache: "GraphCache"
    key: Hashable
    entry: CUDAGraphEntry
    reason: EvictionReason
    tag: str = ""

    def release(self) -> Eviction:
        """Release the entry, record in its cache's statistics what that freed, and tell its cache's admission, unless
        the user asked for it; waits for calls that use it.

        The freed bytes are the backend's figures before and after: of a pool that others use, nothing comes back.
        """
        entry = self.entry
        with entry.pool.lock:
            before = entry.nbytes + entry.pool.nbytes
            entry.release()
            freed = before - entry.nbytes - entry.pool.nbytes
        eviction = Eviction(
            self.key, entry.descriptor, entry.replay_count, entry.capture_time_ms, freed, self.reason, self.tag
        )
        self.cache.stats.record_eviction(eviction)
        if self.reason not in _AS_ASKED:
            self.cache.admission.left(self.key, entry.replay_count)
        return eviction


class Choice(NamedTuple):
    """The entries that have to go, with what each is worth, and whether there is room then."""

    victims: list[tuple[float, Victim]]
    is_enough: bool


class MemoryBudget:
    """At most ``max_cached_graphs`` graphs and ``memory_budget_bytes`` bytes; None sets no limit.

    The bytes are those of pools, static inputs, output buffers and graphs, shared ones counted once. Give a budget to
    several wrappers, ``graphed`` callables or managers, and the least worth of all their graphs goes (``eviction``),
    whosever it is; the limits of each of them hold besides. A graph that another one's capture evicted is captured anew
    when it comes again. A graph that is larger than the budget by itself is not kept. Thread-safe.
    """

    def __init__(
        self,
        memory_budget_bytes: int | None = None,
        max_cached_graphs: int | None = None,
        *,
        eviction: str | EvictionPolicy = "frecency",
    ) -> None:
        for name, value in (("max_cached_graphs", max_cached_graphs), ("memory_budget_bytes", memory_budget_bytes)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be at least 1 or None, got {value!r}")
        self.memory_budget_bytes = memory_budget_bytes
        self.max_cached_graphs = max_cached_graphs
        self.eviction = make_eviction(eviction)
        self.lock = threading.Lock()
        """Guards the content of all members."""
        self._references: tuple[ReferenceType[GraphCache], ...] = ()

    def join(self, cache: "GraphCache") -> None:
        """Let a cache share the budget; its constructor does that."""
        with self.lock:
            self._references = (*(known for known in self._references if known() is not None), ref(cache))

    @property
    def _members(self) -> list["GraphCache"]:
        return [cache for known in self._references if (cache := known()) is not None]

    def choose(
        self, newcomer: CUDAGraphEntry | None = None, since: int | None = None, gone: Collection[CUDAGraphEntry] = ()
    ) -> Choice:
        """What has to go for ``newcomer``, or for one more graph that holds as much for itself as others on average.

        Only entries whose last use was before ``since`` (None: any) may go; ``gone`` go anyway. What shares the memory
        of others stays if letting it go would not free what is missing. Called with ``lock`` held; changes nothing.
        """
        held = [victim for victim in self.held() if victim.entry not in gone]
        kept = {victim.entry for victim in held}
        if self._fits(kept, newcomer):
            return Choice([], True)
        ranked = [(worth, victim) for worth, victim in self._by_worth(held) if _may_go(victim.entry, since)]
        if not self._fits(kept - _entries(ranked), newcomer):
            return Choice(ranked, False)
        # As few measurements as can be: what is held falls with every victim.
        count = bisect_left(range(len(ranked)), True, key=lambda n: self._fits(kept - _entries(ranked[:n]), newcomer))
        victims = ranked[:count]
        for pair in victims[-2::-1]:
            fewer = [other for other in victims if other is not pair]
            if self._fits(kept - _entries(fewer), newcomer):
                victims = fewer
        if self.max_cached_graphs is not None and len(held) >= self.max_cached_graphs:
            victims = [(worth, victim._replace(reason=EvictionReason.COUNT)) for worth, victim in victims]
        return Choice(victims, True)

    def held(self) -> list[Victim]:
        """What the members keep, as it would be evicted for its bytes. Called with ``lock`` held."""
        return [
            Victim(cache, key, entry, EvictionReason.BYTES)
            for cache in self._members
            for key, entry in cache.entries.items()
        ]

    def is_kept(self) -> bool:
        """Whether the members hold no more bytes than they may. Called with ``lock`` held."""
        return self.memory_budget_bytes is None or self.nbytes <= self.memory_budget_bytes

    def _fits(self, kept: set[CUDAGraphEntry], newcomer: CUDAGraphEntry | None) -> bool:
        """Whether these entries and one more are within the limits."""
        if self.max_cached_graphs is not None and len(kept) >= self.max_cached_graphs:
            return False
        if self.memory_budget_bytes is None:
            return True
        if newcomer is not None:
            return bytes_of({*kept, newcomer}) <= self.memory_budget_bytes
        average = sum(entry.nbytes for entry in kept) // max(len(kept), 1)
        return bytes_of(kept) + average <= self.memory_budget_bytes

    def _by_worth(self, held: list[Victim]) -> Iterable[tuple[float, Victim]]:
        worths = self.eviction.worths([victim.entry for victim in held])
        return sorted(zip(worths, held, strict=True), key=lambda pair: (pair[0], pair[1].entry.last_used))

    @property
    def num_graphs(self) -> int:
        """How many graphs the members keep."""
        return sum(len(cache) for cache in self._members)

    @property
    def nbytes(self) -> int:
        """Bytes that the members' graphs hold, everything that they share counted once."""
        return bytes_of(entry for cache in self._members for entry in cache)

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the members hold more than the limits allow."""
        with self.lock:
            entries = [entry for cache in self._members for entry in cache]
        if self.max_cached_graphs is not None and len(entries) > self.max_cached_graphs:
            raise IntegrityError(f"{len(entries)} entries, more than max_cached_graphs={self.max_cached_graphs}")
        if self.memory_budget_bytes is not None:
            held = bytes_of(entries)
            if held > self.memory_budget_bytes:
                raise IntegrityError(f"{held} bytes, more than memory_budget_bytes={self.memory_budget_bytes}")

    def __repr__(self) -> str:
        most = "" if self.max_cached_graphs is None else f" of {self.max_cached_graphs}"
        limit = "" if self.memory_budget_bytes is None else f" of {self.memory_budget_bytes}"
        return f"<MemoryBudget {self.num_graphs}{most} graphs, {self.nbytes}{limit} bytes, {len(self._members)} caches>"


def _may_go(entry: CUDAGraphEntry, since: int | None) -> bool:
    # A break that makes this call runs on a thread that is half-way through a replay of its own.
    return (since is None or entry.last_used < since) and not entry.pool.is_inside_replay()


def _entries(ranked: list[tuple[float, Victim]]) -> set[CUDAGraphEntry]:
    return {victim.entry for _, victim in ranked}
