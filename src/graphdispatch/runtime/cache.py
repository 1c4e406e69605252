"""The one cache of entries: which keys get one, its pool and limits, and what graphs cost in memory.

Note [what shared memory costs]
    Graphs of one pool use the same memory, so that a graph alone has no share of it: what a set of graphs costs is
    what would be held if there were no others. Releasing one of them frees its own bytes; the pool shrinks when the
    graphs that need its largest part are gone, and on CUDA when the last one is.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, NamedTuple

from ..backends.base import Backend, Graph, Pool
from ..config import CUDAGraphOptions
from ..copying import make_rlock
from ..errors import IntegrityError, check_count
from ..reasons import Reason
from ..showing import html_table, storage
from ..stats import CUDAGraphStats, Eviction, EvictionReason
from .entry import CUDAGraphEntry
from .replay import next_use
from .static_inputs import StaticInputs

_log = logging.getLogger("graphdispatch")
_FIRST_WAIT, _LONGER = 16, 4


@dataclass(frozen=True)
class MemoryReport:
    """The memory of some graphs, in bytes, as measured when it was made; ``total`` counts everything once.

    ``pool_bytes`` is what the allocator says of the pools, intermediates and shared outputs; ``driver_bytes`` is the
    fall of the device's free memory during the captures that no allocator accounts for (0 without a driver).
    """

    graphs: tuple[tuple[int, str], ...]
    """Size and mode of each graph; ``serve.graphs`` has the bytes that each holds for itself."""
    pool_bytes: int
    input_bytes: int
    """Static inputs; those of the caller (``inputs="static"``) are not counted."""
    entry_bytes: int
    driver_bytes: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.pool_bytes + self.input_bytes + self.entry_bytes + self.driver_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return asdict(self) | {"total": self.total}

    def _parts(self) -> list[tuple[str, str]]:
        parts = {
            "pool": self.pool_bytes,
            "static inputs": self.input_bytes,
            f"{len(self.graphs)} graphs": self.entry_bytes,
            "driver": self.driver_bytes,
            "total": self.total,
        }
        return [(name, storage(amount)) for name, amount in parts.items()]

    def __str__(self) -> str:
        return "\n".join(f"{name:<14}{held:>12}" for name, held in self._parts())

    def _repr_html_(self) -> str:
        return html_table("Memory of graphs", ("part", "held"), self._parts())


def memory_report(
    entries: Iterable[CUDAGraphEntry], pools: Iterable[Pool] = (), inputs: Iterable[StaticInputs] = ()
) -> MemoryReport:
    """What ``entries`` hold, with all of ``pools`` and ``inputs`` besides; a pool that is not among them counts for as
    much as the entries keep of it. Reads the allocator's figures; not for a hit."""
    entries = sorted(entries, key=lambda entry: (entry.size, entry.mode))
    whole = set(pools)
    graphs: dict[Pool, list[Graph]] = {pool: [] for pool in whole}
    for entry in entries:
        graphs.setdefault(entry.pool, []).append(entry.graph)
    driver_bytes = sum(entry.graph.driver_nbytes for entry in entries)
    return MemoryReport(
        tuple((entry.size, entry.mode.name) for entry in entries),
        pool_bytes=sum(p.nbytes if p in whole else p.nbytes_of(kept) for p, kept in graphs.items()),
        input_bytes=sum(one.nbytes for one in {*inputs, *(entry.inputs for entry in entries)}),
        entry_bytes=sum(entry.nbytes for entry in entries) - driver_bytes,
        driver_bytes=driver_bytes,
    )


def bytes_of(entries: Iterable[CUDAGraphEntry]) -> int:
    """The bytes that would be held if there were only these entries: see Note [what shared memory costs]."""
    return memory_report(entries).total


class Victim(NamedTuple):
    """An entry that has left its cache and is to be released, outside of the cache's lock."""

    owner: "GraphCache"
    key: Hashable
    entry: CUDAGraphEntry
    reason: EvictionReason
    tag: str = ""

    def release(self) -> Eviction:
        """Release the entry, and tell the cache's ``stats`` and the log what that freed; waits for calls that use it.

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
        self.owner.stats.record_eviction(eviction)
        fields = entry.descriptor.num_tokens, self.reason, entry.replay_count, freed
        _log.info("evicted tokens=%d cause=%s replays=%d freed_bytes=%d", *fields)
        return eviction


class Admission:
    """Counts misses of keys that have no graph; a key is captured at its ``capture_after``-th miss within ``window``.

    Time is counted in uses: replays of any graph in the process, and misses. This class does not see hits. The time
    of the first miss that counts is also how a full cache compares a newcomer with what it holds: an entry may go only
    if it has not been used since (the rule of LIRS, Jiang and Zhang 2002). So neither a scan of odd sizes nor a cycle
    over more sizes than there is room for evicts what is in use, and a size that comes often displaces what does not.

    Memory is bounded by the window. Not thread-safe: called with the owner's lock held.
    """

    def __init__(self, capture_after: int = 2, window: int = 4096, *, clock: Callable[[], int] = next_use) -> None:
        check_count("capture_after", capture_after)
        self.capture_after = capture_after
        self.window = window
        self._clock = clock
        self._misses: dict[Hashable, deque[int]] = {}

    def since(self, key: Hashable) -> int | None:
        """If a miss of ``key`` now leads to a capture: the time of the first miss that counts; else None.

        That is now with ``capture_after=1``. Changes nothing.
        """
        if self.capture_after == 1:
            return self._clock()
        misses = self._misses.get(key)
        if misses is None or len(misses) < self.capture_after - 1:
            return None
        return misses[0] if self._clock() - misses[0] <= self.window else None

    def count_miss(self, key: Hashable) -> None:
        """Count a call whose key has no graph and is not captured now."""
        if self.capture_after == 1:
            return
        now = self._clock()
        misses = self._misses.pop(key, None) or deque(maxlen=self.capture_after - 1)
        misses.append(now)
        self._misses[key] = misses  # at the end: keys are in the order of their latest misses
        while now - self._misses[oldest := next(iter(self._misses))][-1] > self.window:
            del self._misses[oldest]

    def forget(self, key: Hashable) -> None:
        """Forget the misses of a key, since it has been captured."""
        self._misses.pop(key, None)

    def clear(self) -> None:
        """Forget all keys."""
        self._misses.clear()


class Failure(NamedTuple):
    """Why a size is kept out: its failures in a row, the time of the next try (``inf``: never), and the last of them.

    Time is counted in the misses of the size.
    """

    times: int
    retry_at: float
    reason: Reason
    detail: str


class Quarantine(dict[int, Failure]):
    """Sizes whose captures failed, each with its latest failure; taking one out forgives it.

    A size is tried again after 16 further misses, then after 64, and so on, and never after ``max_failures`` failures
    in a row. Changed with the owner's lock held; ``blocked`` needs none.
    """

    def __init__(self, max_failures: int) -> None:
        super().__init__()
        self._max_failures = max_failures

    def fail(self, size: int, now: int, reason: Reason, detail: str, *, is_final: bool = False) -> None:
        """Note that ``size`` failed again at ``now``; if that ``is_final`` it is not tried again.

        A callable that rebinds its own state may do so in its first call alone, so it is tried again at once. After
        that it is tried ever more rarely but never given up, since no guard tells when it no longer rebinds.
        """
        is_passing = reason is Reason.STATE_REBOUND
        times = self[size].times + 1 if size in self else 1
        waits = times - is_passing
        is_last = is_final or (times >= self._max_failures and not is_passing)
        retry_at = inf if is_last else now + (_FIRST_WAIT * _LONGER ** (waits - 1) if waits else 0)
        self[size] = Failure(times, retry_at, reason, detail)

    def blocked(self, size: int, now: int) -> Failure | None:
        """The failure that keeps ``size`` out at ``now``, or None if it may be tried."""
        failure = self.get(size)
        return failure if failure is not None and now < failure.retry_at else None


class GraphCache:
    """Entries by key, at most ``max_graphs`` of them and ``max_bytes`` bytes, and the pool of the sets of graphs that
    share the cache. Thread-safe.

    Methods that make room *return* the victims; the caller releases them (``Victim.release``), outside of the cache's
    lock, since releasing waits for calls in flight. A lookup takes no lock. The least recently used entry goes. There
    is intentionally no ``__contains__``: between the question and the use another thread may evict.
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
        """Says which keys are captured."""
        self.min_replays = 0
        """Entries with fewer replays go before all others."""
        self.fills_at_once = False
        """Whether a key is captured at its first miss while there is room, though admission would wait."""
        self.is_asleep = False
        """Whether nothing is captured or replayed now."""
        self.is_frozen = False
        """Whether captures and comparisons with eager are forbidden."""
        self.backend = backend
        """Where the graphs run; None until the first call tells."""
        self.pool = pool if pool is not None or backend is None else backend.make_pool()
        self._entries: dict[Hashable, CUDAGraphEntry] = {}  # read anywhere, changed with the lock held
        self._lock = make_rlock()

    def get(self, key: Hashable) -> CUDAGraphEntry | None:
        """The entry of ``key``, or None."""
        return self._entries.get(key)

    def choose(
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
        with self._lock:
            held = {entry: key for key, entry in self._entries.items() if entry is not gone}
        if self.max_bytes is None and len(held) < self.max_graphs:
            return []
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
        leaving = sorted((e for e in free if since is None or e.last_used < since), key=self._rank)
        if not is_enough(leaving):
            return None
        for entry in leaving[::-1]:
            fewer = [other for other in leaving if other is not entry]
            if is_enough(fewer):
                leaving = fewer
        reason = EvictionReason.COUNT if len(held) >= self.max_graphs else EvictionReason.BYTES
        return [Victim(self, held[entry], entry, reason) for entry in leaving]

    def has_room(self, since: int | None = None) -> bool:
        """Whether there is room for one more entry, or would be without entries whose last use was before ``since``."""
        return self.choose(since=since) is not None

    def admit(self, key: Hashable) -> Reason:
        """What becomes of a call whose key has no graph: ``CAPTURED_NOW``, or why it runs eagerly. Changes nothing."""
        since = self.admission.since(key)
        if since is None:
            return Reason.CAPTURED_NOW if self.fills_at_once and not self.is_full else Reason.FIRST_SIGHTING
        return Reason.CAPTURED_NOW if self.has_room(since) else Reason.CACHE_FULL

    @property
    def is_full(self) -> bool:
        """Whether one more entry would displace another."""
        return not self.has_room(0)

    def make_room(self, since: int | None = None) -> list[Victim]:
        """Drop what must go before one more entry is captured, of those whose last use was before ``since``; nothing
        if that cannot make room.

        What it will hold for itself is not known yet; the average of the entries here is expected.
        """
        with self._lock:
            return self._drop(self.choose(since=since) or [])

    def add(self, key: Hashable, entry: CUDAGraphEntry) -> list[Victim]:
        """Keep a complete entry; returns what it displaces (an entry of the same key, others if over a limit).

        If there is no room for it even without all others, the entry is not kept: it is the first of what is returned,
        and displaces nothing. Others of its pool go with it only if its capture made the pool grow over a limit, since
        a pool keeps its memory as long as it has a graph.
        """
        with self._lock:
            old = self.get(key)
            victims = self.choose(entry, gone=old)
            if victims is None:
                return [Victim(self, key, entry, EvictionReason.BYTES), *self._drop_over_limit(entry.pool)]
            displaced = [Victim(self, key, old, EvictionReason.REPLACED)] if old is not None else []
            self._entries[key] = entry
            return displaced + self._drop(victims)

    def remove(self, key: Hashable) -> CUDAGraphEntry | None:
        """Drop one entry and return it for release; or None."""
        with self._lock:
            return self._entries.pop(key, None)

    def retire(self, entry: CUDAGraphEntry, reason: EvictionReason, tag: str = "") -> list[Victim]:
        """Drop this entry, if it is still what its key stands for, so that its release counts as an eviction."""
        with self._lock:
            is_held = self.get(entry.place) is entry
            return self._drop([Victim(self, entry.place, entry, reason, tag)] if is_held else [])

    def clear(self) -> list[CUDAGraphEntry]:
        """Drop all entries and return them for release."""
        with self._lock:
            dropped = list(self._entries.values())
            self._entries.clear()
            return dropped

    def _rank(self, entry: CUDAGraphEntry) -> tuple[bool, int]:
        """The lowest goes first: entries that were hardly used, then by their last use."""
        return entry.replay_count >= self.min_replays, entry.last_used

    def _drop(self, victims: list[Victim]) -> list[Victim]:
        for victim in victims:
            del self._entries[victim.key]
        return victims

    def _drop_over_limit(self, pool: Pool) -> list[Victim]:
        if self._is_small(self._entries.values()):
            return []
        entries = [(key, entry) for key, entry in self._entries.items() if entry.pool is pool]
        return self._drop([Victim(self, key, entry, EvictionReason.BYTES) for key, entry in entries])

    def _is_small(self, kept: Iterable[CUDAGraphEntry], more: int = 0) -> bool:
        return self.max_bytes is None or bytes_of(kept) + more <= self.max_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that the entries hold, everything that they share counted once."""
        return bytes_of(self)

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the content breaks what this class promises."""
        with self._lock:
            entries = list(self)
        if len(entries) > self.max_graphs:
            raise IntegrityError(f"{len(entries)} entries, more than max_cached_graphs={self.max_graphs}")
        if not self._is_small(entries):
            raise IntegrityError(f"{bytes_of(entries)} bytes, more than memory_budget_bytes={self.max_bytes}")
        if len(set(entries)) != len(entries):
            raise IntegrityError("an entry stands under two keys")
        for entry in entries:
            if entry.is_released:
                raise IntegrityError(f"{entry!r} was released and is still in the cache")

    def __iter__(self) -> Iterator[CUDAGraphEntry]:
        return iter(list(self._entries.values()))

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
