"""When a key deserves a graph: at its n-th sighting within a window, and later if its graphs did not pay."""

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError
from ..reasons import Reason
from .replay import next_use

if TYPE_CHECKING:
    from .cache import GraphCache

__all__ = ["Admission"]

# Chosen on recorded traffic, where misses are at most 2 % more than without back-off, and captures up to 15 % fewer.
_REPLAYS_THAT_PAY = 4
_DEBT_THAT_DOUBLES = 12
_MOST_DOUBLINGS = 12
_REMEMBERED = 4096


class _Debt(NamedTuple):
    """Replays that the graphs of a key fell short of, and its sightings since the last of them left."""

    replays: int
    sightings: int = 0


class Admission:
    """Counts sightings of keys that have no graph; a key is captured at its ``capture_after``-th within ``window``.

    Time is counted in uses: replays of any graph in the process, and sightings. A hit is not told to this class. The
    first of the sightings that count is also how a full cache compares a newcomer with what it holds: an entry may go
    only if it has not been used since (the rule of LIRS, Jiang and Zhang 2002). So neither a scan of odd sizes nor a
    cycle over more sizes than there is room for evicts what is in use, and a size that comes often displaces what does
    not.

    A key *backs off* whose graphs keep going before they were used enough. What each of them lacks of 4 replays adds to
    the debt of its key, and what it has beyond them takes from it. With every 12 that a key owes, twice as many
    sightings, whenever they come, must pass between a graph and the next.

    Memory is bounded by the window, and by 4,096 keys that owe. Not thread-safe: called with the owner's lock held,
    except for ``left``.
    """

    def __init__(self, capture_after: int = 2, window: int = 4096, *, clock: Callable[[], int] = next_use) -> None:
        for name, value in (("capture_after", capture_after), ("capture_window", window)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
        self.capture_after = capture_after
        self.window = window
        self._clock = clock
        self._seen: dict[Hashable, deque[int]] = {}
        self._debts: dict[Hashable, _Debt] = {}
        self._lock = threading.Lock()

    def since(self, key: Hashable) -> int | None:
        """If ``key`` is to be captured when it is sighted now: the time of the first sighting that counts; else None.

        That is now with ``capture_after=1``. Changes nothing.
        """
        if self.still_to_wait(key):
            return None
        if self.capture_after == 1:
            return self._clock()
        seen = self._seen.get(key)
        if seen is None or len(seen) < self.capture_after - 1:
            return None
        return seen[0] if self._clock() - seen[0] <= self.window else None

    def decide(self, key: Hashable, cache: "GraphCache") -> Reason:
        """What becomes of a call whose key has no graph: ``CAPTURED_NOW``, or why it runs eagerly. Changes nothing."""
        if self.still_to_wait(key):
            return Reason.BACKING_OFF
        since = self.since(key)
        if since is None:
            return Reason.FIRST_SIGHTING
        return Reason.CAPTURED_NOW if cache.has_room(since) else Reason.CACHE_FULL

    def still_to_wait(self, key: Hashable) -> int:
        """How many more sightings of ``key``, from now on, lead to no capture since it backs off. Changes nothing."""
        debt = self._debts.get(key)
        doublings = 0 if debt is None else debt.replays // _DEBT_THAT_DOUBLES
        if debt is None or not doublings:
            return 0
        return max((self.capture_after << doublings) - 1 - debt.sightings, 0)

    def detail(self, reason: Reason, key: Hashable) -> str:
        """What a decision for ``reason`` says besides: when a key that backs off is captured again."""
        if reason is not Reason.BACKING_OFF:
            return ""
        more = self.still_to_wait(key)
        return f"its last graphs went before they were used enough; it is captured again after {more} more sightings"

    def sight(self, key: Hashable) -> None:
        """Count a sighting of a key that is not captured at it."""
        with self._lock:
            debt = self._debts.get(key)
            if debt is not None:
                self._debts[key] = debt._replace(sightings=debt.sightings + 1)
        if self.capture_after == 1:
            return
        now = self._clock()
        seen = self._seen.pop(key, None) or deque(maxlen=self.capture_after - 1)
        seen.append(now)
        self._seen[key] = seen  # at the end: keys are in the order of their latest sightings
        while now - self._seen[oldest := next(iter(self._seen))][-1] > self.window:
            del self._seen[oldest]

    def forget(self, key: Hashable) -> None:
        """Begin anew for a key, since it has been captured."""
        self._seen.pop(key, None)

    def left(self, key: Hashable, replays: int) -> None:
        """Told that a graph is gone after so many replays, though nobody asked for that. From any thread."""
        with self._lock:
            owed = self._debts.pop(key, _Debt(0)).replays + _REPLAYS_THAT_PAY - replays
            if owed > 0:
                self._debts[key] = _Debt(min(owed, _MOST_DOUBLINGS * _DEBT_THAT_DOUBLES))
            if len(self._debts) > _REMEMBERED:
                del self._debts[next(iter(self._debts))]

    def clear(self) -> None:
        """Forget all keys."""
        self._seen.clear()
        with self._lock:
            self._debts.clear()

    @property
    def num_keys(self) -> int:
        """How many keys were seen within the window and have no graph."""
        return len(self._seen)

    def __repr__(self) -> str:
        return f"<Admission after {self.capture_after} sightings within {self.window} uses, {self.num_keys} keys seen>"
