"""The one cache of entries: looked up without a lock, within a limit of its own and, if given, a shared budget."""

from collections.abc import Hashable, Iterator

from ..capture.entry import CUDAGraphEntry
from ..config import CUDAGraphConfig
from ..errors import IntegrityError
from ..modes import EntryState
from ..stats import CUDAGraphStats, EvictionReason
from .accounting import bytes_of
from .budget import MemoryBudget, Victim
from .eviction import EvictionPolicy

__all__ = ["GraphCache", "make_cache"]


class GraphCache:
    """Entries by key, at most ``max_graphs`` of them and ``max_bytes`` bytes, and within ``budget``. Thread-safe.

    Methods that make room *return* the victims; the caller releases them (``Victim.release``), outside of the cache's
    lock, since releasing waits for calls in flight. A lookup takes no lock. Which entry goes is the policy
    ``eviction``'s choice; under a shared ``budget`` victims may be those of another cache, and count in its ``stats``.
    There is intentionally no ``__contains__``: between the question and the use another thread may evict.
    """

    def __init__(
        self,
        max_graphs: int,
        max_bytes: int | None = None,
        *,
        eviction: str | EvictionPolicy = "frecency",
        budget: MemoryBudget | None = None,
        stats: CUDAGraphStats | None = None,
    ) -> None:
        self.limit = MemoryBudget(max_bytes, max_graphs, eviction=eviction)
        self.budget = budget
        self.stats = stats or CUDAGraphStats()
        """Where evictions of this cache's entries are recorded."""
        self.entries: dict[Hashable, CUDAGraphEntry] = {}
        """Read anywhere; changed only by this class, with the lock held."""
        self._budgets = (self.limit,) if budget is None else (self.limit, budget)
        self._lock = self._budgets[-1].lock
        for each in self._budgets:
            each.join(self)

    def get(self, key: Hashable) -> CUDAGraphEntry | None:
        """The entry of ``key``, or None."""
        return self.entries.get(key)

    def has_room(self, since: int | None = None) -> bool:
        """Whether there is room for one more entry, or would be without entries whose last use was before ``since``."""
        with self._lock:
            gone: set[CUDAGraphEntry] = set()
            for budget in self._budgets:
                choice = budget.choose(since=since, gone=gone)
                gone |= {victim.entry for _, victim in choice.victims}
                if not choice.is_enough:
                    return False
            return True

    @property
    def is_full(self) -> bool:
        """Whether one more entry would displace another."""
        return not self.has_room(0)

    def make_room(self, since: int | None = None) -> list[Victim]:
        """Drop what must go before one more entry is captured, of those whose last use was before ``since``.

        What it will hold for itself is not known yet, and expected to be as much as the others do on average.
        """
        with self._lock:
            return self._evict(since=since)

    def add(self, key: Hashable, entry: CUDAGraphEntry) -> list[Victim]:
        """Keep a complete entry; returns what it displaces (an entry of the same key, others if over a limit).

        The new entry itself is never among them: one graph over the budget is kept, and no other with it.
        """
        with self._lock:
            victims = self._evict(entry, leaving=self.entries.get(key))
            displaced = self._take(key, EvictionReason.REPLACED)
            self.entries[key] = entry
            return displaced + victims

    def remove(self, key: Hashable) -> CUDAGraphEntry | None:
        """Drop one entry and return it for release, or None."""
        with self._lock:
            return self.entries.pop(key, None)

    def retire(self, entry: CUDAGraphEntry, reason: EvictionReason, tag: str = "") -> list[Victim]:
        """Drop this entry, if it is still what its key stands for, so that its release counts as an eviction."""
        with self._lock:
            return self._take(entry.key, reason, tag) if self.entries.get(entry.key) is entry else []

    def clear(self) -> list[CUDAGraphEntry]:
        """Drop all entries and return them for release."""
        with self._lock:
            dropped = list(self.entries.values())
            self.entries.clear()
            return dropped

    def _take(self, key: Hashable, reason: EvictionReason, tag: str = "") -> list[Victim]:
        entry = self.entries.pop(key, None)
        return [] if entry is None else [Victim(self, key, entry, reason, tag)]

    def _evict(
        self, newcomer: CUDAGraphEntry | None = None, since: int | None = None, leaving: CUDAGraphEntry | None = None
    ) -> list[Victim]:
        victims: list[Victim] = []
        for budget in self._budgets:
            gone = {victim.entry for victim in victims} | ({leaving} if leaving is not None else set())
            for worth, victim in budget.choose(newcomer, since, gone).victims:
                budget.eviction.evicted(victim.entry, worth)
                victims.append(victim)
        for victim in victims:
            del victim.cache.entries[victim.key]
        return victims

    @property
    def nbytes(self) -> int:
        """Bytes that the entries hold, everything that they share counted once."""
        return bytes_of(self)

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the content breaks what this class promises."""
        for budget in self._budgets:
            budget.check_integrity()
        with self._lock:
            entries = list(self.entries.values())
        if len({id(entry) for entry in entries}) != len(entries):
            raise IntegrityError("an entry stands under two keys")
        for entry in entries:
            if entry.state is EntryState.EVICTED:
                raise IntegrityError(f"{entry!r} was released and is still in the cache")

    def __iter__(self) -> Iterator[CUDAGraphEntry]:
        return iter(list(self.entries.values()))

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        limit = "" if self.limit.memory_budget_bytes is None else f" of {self.limit.memory_budget_bytes}"
        return f"<GraphCache {len(self)} of {self.limit.max_cached_graphs} graphs, {self.nbytes}{limit} bytes>"


def make_cache(
    config: CUDAGraphConfig, budget: MemoryBudget | None = None, stats: CUDAGraphStats | None = None
) -> GraphCache:
    """The cache that a configuration describes."""
    return GraphCache(
        config.max_cached_graphs, config.memory_budget_bytes, eviction=config.eviction, budget=budget, stats=stats
    )
