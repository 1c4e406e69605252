"""The one cache of entries, with limits by count and bytes and eviction of the least recently used."""

import threading
from collections.abc import Hashable, Iterator

from ..capture.entry import CUDAGraphEntry
from ..errors import ConfigError, IntegrityError
from ..modes import EntryState

__all__ = ["GraphCache"]


class GraphCache:
    """Entries by key, at most ``max_graphs`` of them and ``max_bytes`` bytes. Thread-safe.

    Methods that make room *return* the entries that no longer belong to the cache; the caller releases them, outside
    of the cache's lock, since releasing waits for calls in flight. A lookup takes no lock. Recency is the entry's own
    ``last_used``, which a hit sets anyway. There is intentionally no ``__contains__``: between the question and the
    use another thread may evict.
    """

    def __init__(self, max_graphs: int, max_bytes: int | None = None) -> None:
        if max_graphs < 1:
            raise ConfigError(f"max_cached_graphs must be at least 1, got {max_graphs}")
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f"memory_budget_bytes must be at least 1 or None, got {max_bytes}")
        self.max_graphs = max_graphs
        self.max_bytes = max_bytes
        self._entries: dict[Hashable, CUDAGraphEntry] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> CUDAGraphEntry | None:
        """The entry of ``key``, or None."""
        return self._entries.get(key)

    def make_room(self) -> list[CUDAGraphEntry]:
        """Drop what must go before one more entry is captured: at capacity, the least recently used."""
        with self._lock:
            return self._evict(self.max_graphs - 1, self.max_bytes)

    def add(self, key: Hashable, entry: CUDAGraphEntry) -> list[CUDAGraphEntry]:
        """Keep a complete entry; returns what it displaces (an entry of the same key, others if over a limit).

        The new entry itself is never among them: one graph over the budget is kept, and no other with it.
        """
        with self._lock:
            displaced = [old for old in (self._entries.pop(key, None),) if old is not None]
            room = None if self.max_bytes is None else max(self.max_bytes - entry.nbytes, 0)
            displaced += self._evict(self.max_graphs - 1, room)
            self._entries[key] = entry
            return displaced

    def remove(self, key: Hashable) -> CUDAGraphEntry | None:
        """Drop one entry and return it for release, or None."""
        with self._lock:
            return self._entries.pop(key, None)

    def clear(self) -> list[CUDAGraphEntry]:
        """Drop all entries and return them for release."""
        with self._lock:
            dropped = list(self._entries.values())
            self._entries.clear()
            return dropped

    def _evict(self, max_graphs: int, max_bytes: int | None) -> list[CUDAGraphEntry]:
        victims: list[CUDAGraphEntry] = []
        order = sorted(self._entries.items(), key=lambda item: item[1].last_used)
        total = sum(entry.nbytes for entry in self._entries.values())
        for key, entry in order:
            if len(self._entries) <= max_graphs and (max_bytes is None or total <= max_bytes):
                break
            victims.append(self._entries.pop(key))
            total -= entry.nbytes
        return victims

    @property
    def nbytes(self) -> int:
        """Bytes that the entries hold for themselves."""
        return sum(entry.nbytes for entry in list(self._entries.values()))

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the content breaks what this class promises."""
        with self._lock:
            entries = list(self._entries.values())
        if len(entries) > self.max_graphs:
            raise IntegrityError(f"{len(entries)} entries, more than max_cached_graphs={self.max_graphs}")
        if len({id(entry) for entry in entries}) != len(entries):
            raise IntegrityError("an entry stands under two keys")
        for entry in entries:
            if entry.state is EntryState.EVICTED:
                raise IntegrityError(f"{entry!r} was released and is still in the cache")
        if self.max_bytes is not None and len(entries) > 1 and self.nbytes > self.max_bytes:
            raise IntegrityError(f"{self.nbytes} bytes, more than memory_budget_bytes={self.max_bytes}")

    def __iter__(self) -> Iterator[CUDAGraphEntry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        limit = "" if self.max_bytes is None else f" of {self.max_bytes}"
        return f"<GraphCache {len(self)} of {self.max_graphs} graphs, {self.nbytes}{limit} bytes>"
