"""The one cache of entries: looked up without a lock, within a limit of its own and, if given, a shared budget."""

import logging
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..backends.base import Pool
from ..config import CUDAGraphOptions
from ..errors import ConfigError, IntegrityError, shown
from ..modes import EntryState
from ..reasons import Reason
from ..stats import CUDAGraphStats, Eviction, EvictionReason
from .accounting import bytes_of
from .admission import Admission
from .budget import Choice, MemoryBudget, Victim
from .entry import CUDAGraphEntry

if TYPE_CHECKING:
    from .eviction import EvictionPolicy

_log = logging.getLogger("graphdispatch")

__all__ = ["GraphCache", "StateKey", "make_cache"]

_AS_ASKED = (EvictionReason.INVALIDATED, EvictionReason.ASLEEP, EvictionReason.DROPPED)


class StateKey(NamedTuple):
    """The key of a further entry of ``key``, captured in another state of the callable; ``number`` is unique."""

    key: Hashable
    number: int


class GraphCache:
    """Entries by key, at most ``max_graphs`` of them and ``max_bytes`` bytes, and within ``budget``. Thread-safe.

    Methods that make room *return* the victims; the caller releases them (``Victim.release``), outside of the cache's
    lock, since releasing waits for calls in flight. A lookup takes no lock. The policy ``eviction`` says which entry
    goes; under a shared ``budget`` victims may be those of another cache, and count in its ``stats``. There is
    intentionally no ``__contains__``: between the question and the use another thread may evict.
    """

    def __init__(
        self,
        max_graphs: int,
        max_bytes: int | None = None,
        *,
        eviction: "str | EvictionPolicy" = "frecency",
        budget: MemoryBudget | None = None,
        stats: CUDAGraphStats | None = None,
        admission: Admission | None = None,
    ) -> None:
        if budget is not None and not isinstance(budget, MemoryBudget):
            raise ConfigError(
                f"budget must be a MemoryBudget or None, got {shown(budget)}; memory_budget_bytes= takes a number of "
                "bytes, and a MemoryBudget bounds several callables together"
            )
        self.limit = MemoryBudget(max_bytes, max_graphs, eviction=eviction)
        self.stats = stats or CUDAGraphStats()
        """Where evictions of this cache's entries are recorded."""
        self.admission = admission or Admission(1)
        """Says which keys are captured; learns of evictions that the user did not ask for."""
        self._entries: dict[Hashable, CUDAGraphEntry] = {}  # read anywhere, changed with the lock held
        self._borrowed: dict[Hashable, CUDAGraphEntry] = {}  # those among them that somebody else captured
        self._budgets = (self.limit,) if budget is None else (self.limit, budget)
        self._lock = self._budgets[-1].lock
        for each in self._budgets:
            each.join(self)

    def get(self, key: Hashable) -> CUDAGraphEntry | None:
        """The entry of ``key``, or None."""
        return self._entries.get(key)

    def has_room(self, since: int | None = None) -> bool:
        """Whether there is room for one more entry, or would be without entries whose last use was before ``since``."""
        with self._lock:
            return all(choice.is_enough for _, choice in self._choose(since=since))

    def admit(self, key: Hashable) -> Reason:
        """What becomes of a call whose key has no graph: ``CAPTURED_NOW``, or why it runs eagerly. Changes nothing."""
        if self.admission.still_to_wait(key):
            return Reason.BACKING_OFF
        since = self.admission.since(key)
        if since is None:
            return Reason.FIRST_SIGHTING
        return Reason.CAPTURED_NOW if self.has_room(since) else Reason.CACHE_FULL

    @property
    def is_full(self) -> bool:
        """Whether one more entry would displace another."""
        return not self.has_room(0)

    def make_room(self, since: int | None = None) -> list[Victim]:
        """Drop what must go before one more entry is captured, of those whose last use was before ``since``.

        What it will hold for itself is not known yet; the average of the entries here is expected.
        """
        with self._lock:
            return self._drop(self._choose(since=since))

    def add(self, key: Hashable, entry: CUDAGraphEntry, *, owns: bool = True) -> list[Victim]:
        """Keep a complete entry; returns what it displaces (an entry of the same key, others if over a limit).

        If there is no room for it even without all others, the entry is not kept: it is the first of what is returned,
        and displaces nothing. Others of its pool go with it only if its capture made the pool grow over a limit, since
        a pool keeps its memory as long as it has a graph.

        ``owns=False`` is for a graph that somebody else captured and keeps using: when it has to go it is forgotten
        here, and never released.
        """
        with self._lock:
            choices = self._choose(entry, leaving=self._entries.get(key))
            if not all(choice.is_enough for _, choice in choices):
                refused = Victim(self, key, entry, EvictionReason.BYTES, owns=owns)
                return [refused, *self._drop_over_limit(entry.pool)]
            displaced = self._take(key, EvictionReason.REPLACED)
            if not owns:  # first: others read both without this lock
                self._borrowed[key] = entry
            self._entries[key] = entry
            return displaced + self._drop(choices)

    def evict_one(self, reason: EvictionReason) -> list[Victim]:
        """Drop the least recently used entry that is the cache's own and in no replay of this thread, if there is one.

        For a capture that ran out of memory although the limits hold.
        """
        with self._lock:
            free = [v for v in self.candidates() if v.owns and not v.entry.pool.is_inside_replay()]
            oldest = min(free, key=lambda victim: victim.entry.last_used, default=None)
            return [] if oldest is None else self._take(oldest.key, reason)

    @property
    def max_bytes(self) -> int | None:
        """The bytes that all limits allow, or None."""
        given = [b.memory_budget_bytes for b in self._budgets if b.memory_budget_bytes is not None]
        return min(given, default=None)

    def remove(self, key: Hashable) -> CUDAGraphEntry | None:
        """Drop one entry and return it, for release by whoever captured it; or None."""
        with self._lock:
            self._borrowed.pop(key, None)
            return self._entries.pop(key, None)

    def retire(self, entry: CUDAGraphEntry, reason: EvictionReason, tag: str = "") -> list[Victim]:
        """Drop this entry, if it is still what its key stands for, so that its release counts as an eviction."""
        with self._lock:
            return self._take(entry.place, reason, tag) if self._entries.get(entry.place) is entry else []

    def clear(self) -> list[CUDAGraphEntry]:
        """Drop all entries and return the cache's own for release."""
        with self._lock:
            dropped = [victim.entry for victim in self.candidates() if victim.owns]
            self._entries.clear()
            self._borrowed.clear()
            return dropped

    def candidates(self) -> list[Victim]:
        """Every entry, as it would be evicted for its bytes."""
        entries, borrowed = list(self._entries.items()), self._borrowed
        return [Victim(self, key, one, EvictionReason.BYTES, "", borrowed.get(key) is not one) for key, one in entries]

    def drop(self, victim: Victim) -> bool:
        """Forget the entry of a victim; False if it is no longer what its key stands for."""
        with self._lock:
            return self._entries.get(victim.key) is victim.entry and bool(self._take(victim.key, victim.reason))

    def record(self, eviction: Eviction) -> None:
        """Count a release in ``stats``, and tell ``admission`` of it unless the user requested it."""
        self.stats.record_eviction(eviction)
        told = eviction.descriptor.num_tokens, eviction.reason, eviction.replays, eviction.freed_bytes
        _log.info("evicted tokens=%d cause=%s replays=%d freed_bytes=%d", *told)
        if eviction.reason not in _AS_ASKED:
            key = eviction.key
            self.admission.evicted(key.key if isinstance(key, StateKey) else key, eviction.replays)

    def _take(self, key: Hashable, reason: EvictionReason, tag: str = "") -> list[Victim]:
        entry, borrowed = self._entries.pop(key, None), self._borrowed.pop(key, None)
        return [] if entry is None else [Victim(self, key, entry, reason, tag, borrowed is None)]

    def _choose(
        self, newcomer: CUDAGraphEntry | None = None, since: int | None = None, leaving: CUDAGraphEntry | None = None
    ) -> list[tuple[MemoryBudget, Choice]]:
        """What has to go by each limit, besides what goes by those before it."""
        choices: list[tuple[MemoryBudget, Choice]] = []
        gone = set() if leaving is None else {leaving}
        for budget in self._budgets:
            choice = budget.choose(newcomer, since, gone)
            choices.append((budget, choice))
            gone |= {victim.entry for _, victim in choice.victims}
        return choices

    def _drop(self, choices: list[tuple[MemoryBudget, Choice]]) -> list[Victim]:
        victims: list[Victim] = []
        for budget, choice in choices:
            for score, victim in choice.victims:
                if victim.owner.drop(victim):
                    budget.eviction.evicted(victim.entry, score)
                    victims.append(victim)
        return victims

    def _drop_over_limit(self, pool: Pool) -> list[Victim]:
        victims: list[Victim] = []
        for budget in self._budgets:
            if not budget.holds():
                sharing = [victim for victim in budget.candidates() if victim.entry.pool is pool]
                victims += [victim for victim in sharing if victim.owner.drop(victim)]
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
            entries = [victim.entry for victim in self.candidates() if victim.owns]
        if len(set(entries)) != len(entries):
            raise IntegrityError("an entry stands under two keys")
        for entry in entries:
            if entry.state is EntryState.EVICTED:
                raise IntegrityError(f"{entry!r} was released and is still in the cache")

    def __iter__(self) -> Iterator[CUDAGraphEntry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        limit = "" if self.limit.memory_budget_bytes is None else f" of {self.limit.memory_budget_bytes}"
        return f"<GraphCache {len(self)} of {self.limit.max_cached_graphs} graphs, {self.nbytes}{limit} bytes>"


def make_cache(
    options: CUDAGraphOptions,
    max_graphs: int,
    *,
    capture_after: int = 2,
    eviction: "EvictionPolicy | None" = None,
    stats: CUDAGraphStats | None = None,
) -> GraphCache:
    """A cache of at most ``max_graphs`` graphs within the limits of ``options``.

    ``capture_after`` is the front end's own, where the options name none; ``eviction`` takes the place of theirs.
    """
    return GraphCache(
        max_graphs,
        options.memory_budget_bytes,
        eviction=eviction or options.eviction,
        budget=options.budget,
        stats=stats,
        admission=Admission(options.capture_after or capture_after, options.capture_window),
    )
