"""When a key deserves a graph: at its n-th sighting within a window."""

from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from ..capture.entry import next_use
from ..errors import ConfigError
from ..reasons import Reason

if TYPE_CHECKING:
    from .store import GraphCache

__all__ = ["Admission"]


class Admission:
    """Counts sightings of keys that have no graph; a key is captured at its ``capture_after``-th within ``window``.

    Time is counted in uses: replays of any graph in the process, and sightings. A hit is not told to this class. The
    first of the sightings that count is also how a full cache compares a newcomer with what it holds: an entry may go
    only if it has not been used since (the rule of LIRS, Jiang and Zhang 2002). So neither a scan of odd sizes nor a
    cycle over more sizes than there is room for evicts what is in use, and a size that comes often displaces what does
    not.

    Memory is bounded by the window. Not thread-safe: called with the owner's lock held.
    """

    def __init__(self, capture_after: int = 2, window: int = 4096, *, clock: Callable[[], int] = next_use) -> None:
        for name, value in (("capture_after", capture_after), ("capture_window", window)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
        self.capture_after = capture_after
        self.window = window
        self._clock = clock
        self._seen: dict[Hashable, deque[int]] = {}

    def since(self, key: Hashable) -> int | None:
        """If ``key`` is to be captured when it is sighted now: the time of the first sighting that counts; else None.

        That is now with ``capture_after=1``. Changes nothing.
        """
        if self.capture_after == 1:
            return self._clock()
        seen = self._seen.get(key)
        if seen is None or len(seen) < self.capture_after - 1:
            return None
        return seen[0] if self._clock() - seen[0] <= self.window else None

    def decide(self, key: Hashable, cache: "GraphCache") -> Reason:
        """What becomes of a call whose key has no graph: ``CAPTURED_NOW``, or why it runs eagerly. Changes nothing."""
        since = self.since(key)
        if since is None:
            return Reason.FIRST_SIGHTING
        return Reason.CAPTURED_NOW if cache.has_room(since) else Reason.CACHE_FULL

    def sight(self, key: Hashable) -> None:
        """Count a sighting of a key that is not captured at it."""
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

    def clear(self) -> None:
        """Forget all keys."""
        self._seen.clear()

    @property
    def num_keys(self) -> int:
        """How many keys were seen within the window and have no graph."""
        return len(self._seen)

    def __repr__(self) -> str:
        return f"<Admission after {self.capture_after} sightings within {self.window} uses, {self.num_keys} keys seen>"
