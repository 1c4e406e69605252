"""The one cache of entries: how many graphs there may be and how many bytes they may hold, which go, and their pool."""

import logging
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from ..backends.base import Backend, Pool
from ..config import CUDAGraphOptions
from ..copying import make_lock
from ..errors import IntegrityError, check_count
from ..reasons import Reason
from ..stats import CUDAGraphStats, EvictionReason
from .admission import Admission
from .entry import CUDAGraphEntry
from .memory import bytes_of

_log = logging.getLogger("graphdispatch")


class Victim(NamedTuple):
    """An entry that has left its cache and is to be released, outside of the cache's lock."""

    owner: "GraphCache"
    entry: CUDAGraphEntry
    reason: EvictionReason

    def release(self) -> None:
        """Release the entry, and tell the cache's ``stats`` and the log what that freed; waits for calls that use it.

        The freed bytes are the backend's figures before and after: of a pool that others use, nothing comes back.
        """
        entry = self.entry
        with entry.pool.lock:
            before = entry.nbytes + entry.pool.nbytes
            entry.release()
            freed = before - entry.nbytes - entry.pool.nbytes
        self.owner.stats.record_eviction(self.reason, freed)
        fields = entry.descriptor.num_tokens, self.reason, entry.replay_count, freed
        _log.info("evicted tokens=%d cause=%s replays=%d freed_bytes=%d", *fields)


class GraphCache:
    """The entries, at most ``max_graphs`` of them and ``max_bytes`` bytes, and the pool of the sets of graphs that
    share the cache. The least recently used entry goes. Thread-safe.

    Methods that make room *return* the victims; the caller releases them (``Victim.release``), outside of the cache's
    lock, since releasing waits for calls in flight. There is intentionally no ``__contains__``: between the question
    and the use another thread may evict.
    """

    def __init__(
        self,
        max_graphs: int,
        max_bytes: int | None = None,
        *,
        stats: CUDAGraphStats | None = None,
        admission: Admission | None = None,
        backend: Backend | None = None,
        pool: Pool | None = None,
    ) -> None:
        check_count("max_cached_graphs", max_graphs)
        if max_bytes is not None:
            check_count("memory_budget_bytes", max_bytes)
        self.max_graphs = max_graphs
        self.max_bytes = max_bytes
        """The most bytes of pools, static inputs, output buffers and graphs, shared memory once; None: no limit."""
        self.stats = stats or CUDAGraphStats()
        """Where evictions of this cache's entries are recorded."""
        self.admission = admission or Admission(1)
        """Says which sizes are captured."""
        self.min_replays = 0
        """Entries with fewer replays go before all others."""
        self.fills_at_once = False
        """Whether a size is captured at its first miss while there is room, though admission would wait."""
        self.is_asleep = False
        """Whether nothing is captured or replayed now."""
        self.is_frozen = False
        """Whether captures and comparisons with eager are forbidden."""
        self.backend = backend
        """Where the graphs run; None until the first call tells."""
        self.pool = pool if pool is not None or backend is None else backend.make_pool()
        self._entries: dict[CUDAGraphEntry, None] = {}  # in the order in which they came; changed with the lock held
        self._lock = make_lock()

    def victims(
        self, newcomer: CUDAGraphEntry | None = None, since: int | None = None, gone: CUDAGraphEntry | None = None
    ) -> list[Victim] | None:
        """Which graphs have to go to make room for one more; None if there cannot be any. Changes nothing.

        The least recently used go first, but an entry stays if it fits beside all others that stay: one whose end frees
        nothing does not go for its bytes.

        Args:
            newcomer: The entry that needs room. None: one more graph, as large as those here are on average.
            since: Only entries whose last use was before this use may go. None: any.
            gone: An entry that goes in any case.
        """
        if self.max_bytes is None and len(self) - (gone in self._entries) < self.max_graphs:
            return []
        held = [entry for entry in self if entry is not gone]
        # The average is taken before anything goes. That of the entries that stay rises when small ones go, so that
        # fewer entries might not fit where more do, and no search for the fewest victims would be right.
        average = sum(entry.nbytes for entry in held) // max(len(held), 1)

        def is_enough(leaving: Collection[CUDAGraphEntry]) -> bool:
            kept = set(held).difference(leaving)
            if len(kept) >= self.max_graphs:
                return False
            return self._is_small(kept, average) if newcomer is None else self._is_small(kept | {newcomer})

        if is_enough([]):
            return []
        # A break that makes this call runs on a thread that is half-way through a replay of its own.
        free = [entry for entry in held if not entry.pool.is_inside_replay()]
        leaving = [entry for entry in free if since is None or entry.last_used < since]
        leaving.sort(key=lambda entry: (entry.replay_count >= self.min_replays, entry.last_used))
        if not is_enough(leaving):
            return None
        for entry in leaving[::-1]:
            fewer = [other for other in leaving if other is not entry]
            if is_enough(fewer):
                leaving = fewer
        reason = EvictionReason.COUNT if len(held) >= self.max_graphs else EvictionReason.BYTES
        return [Victim(self, entry, reason) for entry in leaving]

    def has_room(self, since: int | None = None) -> bool:
        """Whether there is room for one more entry, or would be without entries whose last use was before ``since``."""
        return self.victims(since=since) is not None

    def admit(self, key: Hashable) -> Reason:
        """What becomes of a call whose size has no graph: ``CAPTURED_NOW``, or why it runs eagerly. Changes nothing."""
        since = self.admission.since(key)
        if since is None:
            return Reason.CAPTURED_NOW if self.fills_at_once and self.has_room(0) else Reason.FIRST_SIGHTING
        return Reason.CAPTURED_NOW if self.has_room(since) else Reason.CACHE_FULL

    def make_room(self, since: int | None = None) -> list[Victim]:
        """Take out what must go before one more entry is captured, of those whose last use was before ``since``;
        nothing if that cannot make room.

        What it will hold for itself is not known yet; the average of the entries here is expected.
        """
        with self._lock:
            return self._pop(self.victims(since=since) or [])

    def add(self, entry: CUDAGraphEntry, replaced: CUDAGraphEntry | None = None) -> list[Victim]:
        """Keep a complete entry; returns what it displaces: the one that it replaces, and others if over a limit.

        If there is no room for it even without all others, the entry is not kept: it is the first of what is returned,
        and displaces nothing. Others of its pool go with it only if its capture made the pool grow over a limit, since
        a pool keeps its memory as long as it has a graph.
        """
        with self._lock:
            victims = self.victims(entry, gone=replaced)
            if victims is None:
                grown = [] if self._is_small(self) else [one for one in self if one.pool is entry.pool]
                others = [Victim(self, one, EvictionReason.BYTES) for one in grown]
                return [Victim(self, entry, EvictionReason.BYTES), *self._pop(others)]
            self._entries[entry] = None
            old = [Victim(self, replaced, EvictionReason.REPLACED)] if replaced is not None else []
            return self._pop(old + victims)

    def refuse_changes(self) -> None:
        """Raise ``CaptureError`` if the calling thread is within a replay of these graphs. Call it before a lock is
        taken that captures are made with: another thread's capture may wait for the replay."""
        if self.pool is not None:
            self.pool.refuse_changes()

    def discard(self, entry: CUDAGraphEntry) -> None:
        """Take out an entry, if it is here, for its owner to release."""
        with self._lock:
            self._entries.pop(entry, None)

    def retire(self, entries: Iterable[CUDAGraphEntry], reason: EvictionReason) -> list[Victim]:
        """Take out those of the entries that are here, so that their release counts as an eviction."""
        with self._lock:
            return self._pop([Victim(self, entry, reason) for entry in entries])

    def _pop(self, victims: list[Victim]) -> list[Victim]:
        """Take out those that are here, and return them."""
        return [victim for victim in victims if self._entries.pop(victim.entry, victim) is None]

    def _is_small(self, kept: Iterable[CUDAGraphEntry], more: int = 0) -> bool:
        return self.max_bytes is None or bytes_of(kept) + more <= self.max_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that the entries hold, everything that they share counted once."""
        return bytes_of(self)

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the content breaks what this class promises."""
        entries = list(self)
        if len(entries) > self.max_graphs:
            raise IntegrityError(f"{len(entries)} entries, more than max_cached_graphs={self.max_graphs}")
        if not self._is_small(entries):
            raise IntegrityError(f"{bytes_of(entries)} bytes, more than memory_budget_bytes={self.max_bytes}")
        for entry in entries:
            if entry.is_released and entry in self._entries:  # else it went meanwhile
                raise IntegrityError(f"{entry!r} was released and is still in the cache")

    def __iter__(self) -> Iterator[CUDAGraphEntry]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        limit = "" if self.max_bytes is None else f" of {self.max_bytes}"
        return f"<GraphCache {len(self)} of {self.max_graphs} graphs, {self.nbytes}{limit} bytes>"


def make_cache(options: CUDAGraphOptions, max_graphs: int, *, capture_after: int = 2, **settings: Any) -> GraphCache:
    """A cache of at most ``max_graphs`` graphs within the limits of ``options``; ``settings`` are further ones of it.

    ``capture_after`` is the front end's own, where the options name none.
    """
    admission = Admission(options.capture_after or capture_after)
    return GraphCache(max_graphs, options.memory_budget_bytes, admission=admission, **settings)
