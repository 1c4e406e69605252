"""Which graph goes when there is no room: eviction policies by name.

A hit does nothing for a policy: an entry counts its replays and notes its last use anyway, and a policy reads that when
a victim is needed. A policy of one's own is a subclass of ``EvictionPolicy`` that needs no arguments, named by an entry
point of the group ``graphdispatch.eviction``.

Note [what a capture costs]
    One measured capture time says little: on a busy machine equal captures take several times as long as each other.
    So the time counts only where it is clear. A key's cost is the median of its latest captures as a multiple of the
    median of all captures, rounded towards 1 to a power of 4. It is 1 before the third capture of the key. So graphs
    that cost about the same are ordered by their use and their bytes alone.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from importlib.metadata import EntryPoint, entry_points
from math import log2
from statistics import median, median_low
from weakref import WeakKeyDictionary, WeakSet

from ..copying import MadeAnew
from ..errors import ConfigError, shown
from .entry import CUDAGraphEntry

__all__ = ["GDSF", "LFU", "LRU", "EvictionPolicy", "Frecency", "available_evictions", "make_eviction"]

_GROUP = "graphdispatch.eviction"
# What vLLM reckons a graph costs the driver where nothing is measured (1 MiB); smaller figures are noise.
_LEAST_BYTES = 2**20
_MOST_USES = 128
_REMEMBERED = 4096
# See Note [what a capture costs].
_FEWEST_CAPTURES = 3
_LATEST_CAPTURES = 7
_LATEST_OF_ALL = 63


class EvictionPolicy(MadeAnew, ABC):
    """Scores graphs; the one of the lowest score goes, and among equal ones the least recently used.

    Called with the lock of the cache or budget held, and only when a graph may have to go.
    """

    @abstractmethod
    def scores(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """The score of each entry now. A second call gives the same, unless an entry was used in between.

        Args:
            entries: The graphs that are kept.

        Returns:
            A score for each of ``entries``, in their order.
        """

    def evicted(self, entry: CUDAGraphEntry, score: float) -> None:
        """Note that an entry is evicted, for policies that age or remember.

        Args:
            entry: The entry.
            score: Its score.
        """
        del entry, score


class LRU(EvictionPolicy):
    """Least recently used."""

    def scores(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """The last use, on the clock of uses."""
        return [entry.last_used for entry in entries]


class LFU(EvictionPolicy):
    """Least frequently used since it was captured; nothing ages."""

    def scores(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """The number of replays."""
        return [entry.replay_count for entry in entries]


class _ByCost(EvictionPolicy):
    """Weighs what captures of each key cost, as multiples of the usual: see Note [what a capture costs]."""

    def __init__(self) -> None:
        self._noted: WeakSet[CUDAGraphEntry] = WeakSet()
        self._of_key: dict[Hashable, deque[float]] = {}
        self._of_all: deque[float] = deque(maxlen=_LATEST_OF_ALL)
        self._multiples: dict[Hashable, float] = {}

    def costs(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """What a new capture of each entry would cost for each byte that the graph holds."""
        for entry in entries:
            if entry in self._noted:
                continue
            self._noted.add(entry)
            self._multiples.clear()
            times = self._of_key.pop(entry.place, None) or deque(maxlen=_LATEST_CAPTURES)
            times.append(entry.capture_time_ms)
            self._of_key[entry.place] = times
            self._of_all.append(entry.capture_time_ms)
            if len(self._of_key) > _REMEMBERED:
                del self._of_key[next(iter(self._of_key))]
        for key in {entry.place for entry in entries}.difference(self._multiples):
            self._multiples[key] = self._multiple(key)
        return [self._multiples[entry.place] / max(entry.nbytes, _LEAST_BYTES) for entry in entries]

    def _multiple(self, key: Hashable) -> float:
        times = self._of_key.get(key, ())
        if len(times) < _FEWEST_CAPTURES:
            return 1.0
        own, usual = median(times), median_low(self._of_all)  # low: of two kinds, as many of each, one is usual
        return 4.0 ** int(log2(own / usual) / 2) if own > 0 and usual > 0 else 1.0


class GDSF(_ByCost):
    """GreedyDual-Size-Frequency: replays times what a new capture would cost, for each byte, with ageing.

    After Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (1998): a score
    is counted from an age, which each eviction raises to the score of its victim, so that what was used much and long
    ago goes too. The age changes only with an eviction, which first asks for the scores of all entries; so the age at
    an entry's last use is known without any work at that use. For the cost see Note [what a capture costs].
    """

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0
        self._known: WeakKeyDictionary[CUDAGraphEntry, tuple[int, float]] = WeakKeyDictionary()

    def scores(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """Age at the last use, plus replays x capture cost / bytes."""
        for entry, cost in zip(entries, self.costs(entries), strict=True):
            if self._known.get(entry, (-1, 0.0))[0] != entry.replay_count:
                self._known[entry] = entry.replay_count, self._age + entry.replay_count * cost
        return [self._known[entry][1] for entry in entries]

    def evicted(self, entry: CUDAGraphEntry, score: float) -> None:
        """Raise the age."""
        del entry
        self._age = max(self._age, score)


class Frecency(_ByCost):
    """Frequency and recency: uses cubed / time since the last one, times what a new capture costs for each byte.

    The quotient stands for how likely a graph is to be wanted soon: a frequent one is given more time to come again
    than a rare one. Uses, of which the capture is the first, count to 128, so that an old favourite leaves in time; a
    graph that is captured anew begins with 3/4 of the uses that it left with, so that a size that comes and goes with
    the load is known again. The exponent, the cap and the 3/4 were chosen on recorded traffic. For the cost see Note
    [what a capture costs].

    Graphs are remembered by their keys, the latest 4,096 of them; under a budget that several callables share, those
    with the same key share what is remembered.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began: WeakKeyDictionary[CUDAGraphEntry, float] = WeakKeyDictionary()
        self._left: dict[Hashable, float] = {}

    def scores(self, entries: Sequence[CUDAGraphEntry]) -> list[float]:
        """Uses cubed x capture cost / bytes / uses of any graph since the last one."""
        now = 1 + max((entry.last_used for entry in entries), default=0)
        costs = zip(entries, self.costs(entries), strict=True)
        return [self._uses(entry) ** 3 * cost / (now - entry.last_used) for entry, cost in costs]

    def evicted(self, entry: CUDAGraphEntry, score: float) -> None:
        """Remember how much it was used."""
        del score
        self._left.pop(entry.place, None)
        self._left[entry.place] = 0.75 * self._uses(entry)
        if len(self._left) > _REMEMBERED:
            del self._left[next(iter(self._left))]

    def _uses(self, entry: CUDAGraphEntry) -> float:
        began = self._began.get(entry)
        if began is None:
            began = self._began[entry] = self._left.pop(entry.place, 0.0)
        return min(began + entry.replay_count + 1, _MOST_USES)


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
        raise ConfigError(
            f"eviction must be one of {', '.join(map(repr, available_evictions()))}, got {shown(eviction)}"
        )
    made = found.load()()
    if not isinstance(made, EvictionPolicy):
        raise ConfigError(f"eviction {eviction!r} must be a subclass of EvictionPolicy, got {found.value!r}")
    return made


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}
