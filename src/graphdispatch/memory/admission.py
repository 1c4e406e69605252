"""When a key gets a graph: at its n-th miss within a window."""

from collections import deque
from collections.abc import Callable, Hashable

from ..errors import check_count
from .replay import next_use

__all__ = ["Admission"]


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
        check_count("capture_window", window)
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

    @property
    def num_keys(self) -> int:
        """How many keys without a graph missed within the window."""
        return len(self._misses)

    def __repr__(self) -> str:
        return f"<Admission after {self.capture_after} misses within {self.window} uses, {self.num_keys} keys missed>"
