"""When a key gets a graph: at its n-th miss within a window, and later if its earlier graphs did not pay."""

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from ..errors import check_count
from ..forking import make_lock
from ..reasons import Reason
from .backoff import Backoff
from .replay import next_use

__all__ = ["Admission"]

# Chosen on recorded traffic, where misses are at most 2 % more than without back-off, and captures up to 15 % fewer.
_REPLAYS_THAT_PAY = 4
_SHORTFALL_THAT_DOUBLES = 12
_MOST_DOUBLINGS = 12
_REMEMBERED = 4096


class _Shortfall(NamedTuple):
    """By how many replays the graphs of a key fell short, and the misses of the key since the last of them went."""

    replays: int
    misses: int = 0


class Admission:
    """Counts misses of keys that have no graph; a key is captured at its ``capture_after``-th miss within ``window``.

    Time is counted in uses: replays of any graph in the process, and misses. This class does not see hits. The time
    of the first miss that counts is also how a full cache compares a newcomer with what it holds: an entry may go only
    if it has not been used since (the rule of LIRS, Jiang and Zhang 2002). So neither a scan of odd sizes nor a cycle
    over more sizes than there is room for evicts what is in use, and a size that comes often displaces what does not.

    A key *backs off* if its graphs keep going before they were used enough. A graph pays with its fourth replay. What
    the graphs of a key lack of that adds up, and replays beyond it make up for it. With every 12 replays that are
    missing, the key needs twice as many misses, whenever they come, before its next graph.

    Memory is bounded by the window, and by the 4,096 keys whose graphs fell short last. Not thread-safe: called with
    the owner's lock held, except for ``evicted``.
    """

    def __init__(self, capture_after: int = 2, window: int = 4096, *, clock: Callable[[], int] = next_use) -> None:
        check_count("capture_after", capture_after)
        check_count("capture_window", window)
        self.capture_after = capture_after
        self.window = window
        self._backoff = Backoff(2 * capture_after, 2, capture_after << _MOST_DOUBLINGS)
        self._clock = clock
        self._misses: dict[Hashable, deque[int]] = {}
        self._shortfalls: dict[Hashable, _Shortfall] = {}
        self._lock = make_lock()

    def since(self, key: Hashable) -> int | None:
        """If a miss of ``key`` now leads to a capture: the time of the first miss that counts; else None.

        That is now with ``capture_after=1``. Changes nothing.
        """
        if self.still_to_wait(key):
            return None
        if self.capture_after == 1:
            return self._clock()
        misses = self._misses.get(key)
        if misses is None or len(misses) < self.capture_after - 1:
            return None
        return misses[0] if self._clock() - misses[0] <= self.window else None

    def still_to_wait(self, key: Hashable) -> int:
        """How many more misses of ``key``, from now on, lead to no capture since it backs off. Changes nothing."""
        short = self._shortfalls.get(key)
        if short is None:
            return 0
        needed = int(self._backoff.wait(short.replays // _SHORTFALL_THAT_DOUBLES))
        return max(needed - 1 - short.misses, 0)

    def detail(self, reason: Reason, key: Hashable) -> str:
        """What a decision for ``reason`` says besides: when a key that backs off is captured again."""
        if reason is not Reason.BACKING_OFF:
            return ""
        more = self.still_to_wait(key)
        return f"its last graphs went before they were used enough; it is captured again after {more} more misses"

    def count_miss(self, key: Hashable) -> None:
        """Count a call whose key has no graph and is not captured now."""
        with self._lock:
            short = self._shortfalls.get(key)
            if short is not None:
                self._shortfalls[key] = short._replace(misses=short.misses + 1)
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

    def evicted(self, key: Hashable, replays: int) -> None:
        """Note that a graph went after so many replays, though nobody requested that. From any thread."""
        with self._lock:
            lacking = self._shortfalls.pop(key, _Shortfall(0)).replays + _REPLAYS_THAT_PAY - replays
            if lacking > 0:
                self._shortfalls[key] = _Shortfall(min(lacking, _MOST_DOUBLINGS * _SHORTFALL_THAT_DOUBLES))
            if len(self._shortfalls) > _REMEMBERED:
                del self._shortfalls[next(iter(self._shortfalls))]

    def clear(self) -> None:
        """Forget all keys."""
        self._misses.clear()
        with self._lock:
            self._shortfalls.clear()

    @property
    def num_keys(self) -> int:
        """How many keys without a graph missed within the window."""
        return len(self._misses)

    def __repr__(self) -> str:
        return f"<Admission after {self.capture_after} misses within {self.window} uses, {self.num_keys} keys missed>"
