"""Which graph goes when there is no room: eviction policies by name, and what an eviction freed.

A hit does nothing for a policy: an entry counts its replays and notes its last use anyway, and a policy reads that when
a victim is needed. A policy of one's own is a subclass of ``EvictionPolicy`` that needs no arguments, named by an entry
point of the group ``graphdispatch.eviction``.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from importlib.metadata import EntryPoint, entry_points
from weakref import WeakKeyDictionary

from ..errors import ConfigError
from .entry import CUDAGraphEntry

__all__ = ["GDSF", "LFU", "LRU", "EvictionPolicy", "Frecency", "Probation", "available_evictions", "make_eviction"]

_GROUP = "graphdispatch.eviction"
# What vLLM reckons a graph costs the driver where nothing is measured (1 MiB); smaller figures are noise.
_LEAST_BYTES = 2**20
_MOST_USES = 128
_REMEMBERED = 4096


class EvictionPolicy(ABC):
    """Says what graphs are worth; the one of least worth goes, and among equal ones the least recently used.

    Called with the lock of the cache or budget held, and only when a graph may have to go.
    """

    @abstractmethod
    def worths(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """What each entry is worth now. Asking twice gives the same, unless an entry was used in between."""

    def evicted(self, entry: CUDAGraphEntry, worth: float) -> None:
        """Told that an entry of this worth is evicted, for policies that age or remember."""
        del entry, worth


class LRU(EvictionPolicy):
    """Least recently used."""

    def worths(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """The last use, on the clock of uses."""
        return [entry.last_used for entry in entries]


class LFU(EvictionPolicy):
    """Least frequently used since it was captured; nothing ages."""

    def worths(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """The number of replays."""
        return [entry.replay_count for entry in entries]


class GDSF(EvictionPolicy):
    """GreedyDual-Size-Frequency: replays times what a new capture would cost, for each byte, with ageing.

    After Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (1998): the
    worth is counted from an age, which each eviction raises to the worth of its victim, so that what was used much and
    long ago goes too. The age changes only with an eviction, which first asks for the worth of all entries; so the age
    at an entry's last use is known without any work at that use.
    """

    def __init__(self) -> None:
        self._age = 0.0
        self._known: WeakKeyDictionary[CUDAGraphEntry, tuple[int, float]] = WeakKeyDictionary()

    def worths(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """Age at the last use, plus replays x capture time (ms) / bytes."""
        return [self._worth(entry) for entry in entries]

    def evicted(self, entry: CUDAGraphEntry, worth: float) -> None:
        """Raise the age."""
        del entry
        self._age = max(self._age, worth)

    def _worth(self, entry: CUDAGraphEntry) -> float:
        replays, worth = self._known.get(entry, (-1, 0.0))
        if entry.replay_count != replays:
            replays = entry.replay_count
            worth = self._age + replays * _cost(entry)
            self._known[entry] = replays, worth
        return worth


class Frecency(EvictionPolicy):
    """Frequency and recency: uses cubed / time since the last one, times what a new capture costs for each byte.

    The quotient stands for how likely a graph is to be wanted soon: a frequent one is given more time to come again
    than a rare one. Uses, of which the capture is the first, count to 128, so that an old favourite leaves in time; a
    graph that is captured anew begins with 3/4 of those that it left with, so that a size that comes and goes with the
    load is known again. The exponent, the cap and the 3/4 were chosen on recorded traffic.

    Graphs are remembered by their keys, the latest 4,096 of them; under a budget that several callables share, those
    with the same key share what is remembered.
    """

    def __init__(self) -> None:
        self._began: WeakKeyDictionary[CUDAGraphEntry, float] = WeakKeyDictionary()
        self._left: dict[Hashable, float] = {}

    def worths(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """Uses cubed x capture time (ms) / bytes / uses of any graph since the last one."""
        now = 1 + max((entry.last_used for entry in entries), default=0)
        return [self._uses(entry) ** 3 * _cost(entry) / (now - entry.last_used) for entry in entries]

    def evicted(self, entry: CUDAGraphEntry, worth: float) -> None:
        """Remember how much it was used."""
        del worth
        self._left.pop(entry.key, None)
        self._left[entry.key] = 0.75 * self._uses(entry)
        if len(self._left) > _REMEMBERED:
            del self._left[next(iter(self._left))]

    def _uses(self, entry: CUDAGraphEntry) -> float:
        began = self._began.get(entry)
        if began is None:
            began = self._began[entry] = self._left.pop(entry.key, 0.0)
        return min(began + entry.replay_count + 1, _MOST_USES)


class Probation(EvictionPolicy):
    """Entries with fewer than ``min_replays`` replays go first, least recently used ones ahead; then as ``policy``."""

    def __init__(self, min_replays: int, policy: EvictionPolicy) -> None:
        if isinstance(min_replays, bool) or not isinstance(min_replays, int) or min_replays < 0:
            raise ConfigError(f"min_replays_to_keep must be an integer >= 0, got {min_replays!r}")
        self.min_replays = min_replays
        self.policy = policy

    def worths(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """What ``policy`` says, or minus infinity."""
        settled = self.policy.worths(entries)
        return [
            worth if entry.replay_count >= self.min_replays else float("-inf")
            for worth, entry in zip(settled, entries, strict=True)
        ]

    def evicted(self, entry: CUDAGraphEntry, worth: float) -> None:
        """Tell ``policy``."""
        self.policy.evicted(entry, worth)


_BUILT_IN: dict[str, type[EvictionPolicy]] = {"frecency": Frecency, "gdsf": GDSF, "lfu": LFU, "lru": LRU}


def available_evictions() -> tuple[str, ...]:
    """The names that ``make_eviction`` knows, installed ones included."""
    return tuple(sorted({*_BUILT_IN, *_installed()}))


def make_eviction(eviction: str | EvictionPolicy) -> EvictionPolicy:
    """A new policy of that name, or the policy given. Raises ``ConfigError`` for a name that is not known."""
    if isinstance(eviction, EvictionPolicy):
        return eviction
    if eviction in _BUILT_IN:
        return _BUILT_IN[eviction]()
    found = _installed().get(eviction) if isinstance(eviction, str) else None
    if found is None:
        raise ConfigError(f"eviction must be one of {', '.join(map(repr, available_evictions()))}, got {eviction!r}")
    made = found.load()()
    if not isinstance(made, EvictionPolicy):
        raise ConfigError(f"eviction {eviction!r} must be a subclass of EvictionPolicy, got {found.value!r}")
    return made


def _cost(entry: CUDAGraphEntry) -> float:
    """What a new capture would cost, in milliseconds for each byte."""
    return entry.capture_time_ms / max(entry.nbytes, _LEAST_BYTES)


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}
