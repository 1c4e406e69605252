"""When a size is captured: after how many misses, and how long after a capture of it failed."""

from collections import deque
from collections.abc import Callable, Hashable
from math import inf
from typing import NamedTuple

from ..copying import make_lock
from ..errors import check_count
from ..reasons import Reason
from .replay import next_use

_FIRST_WAIT, _LONGER = 16, 4


class Admission:
    """Counts misses of keys that have no graph; a key is captured at its ``capture_after``-th miss within ``window``.

    Time is counted in uses: replays of any graph in the process, and misses. This class does not see hits. The time
    of the first miss that counts is also how a full cache compares a newcomer with what it holds: an entry may go only
    if it has not been used since (the rule of LIRS, Jiang and Zhang 2002). So neither a scan of odd sizes nor a cycle
    over more sizes than there is room for evicts what is in use, and a size that comes often displaces what does not.

    Memory is bounded by the window. Thread-safe: the servers of a manager share one.
    """

    def __init__(self, capture_after: int = 2, window: int = 4096, *, clock: Callable[[], int] = next_use) -> None:
        check_count("capture_after", capture_after)
        self.capture_after = capture_after
        self.window = window
        self._clock = clock
        self._misses: dict[Hashable, deque[int]] = {}
        self._lock = make_lock()  # of what changes

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
        with self._lock:
            misses = self._misses.pop(key, None) or deque(maxlen=self.capture_after - 1)
            misses.append(now)
            self._misses[key] = misses  # at the end: keys are in the order of their latest misses
            while now - self._misses[oldest := next(iter(self._misses))][-1] > self.window:
                del self._misses[oldest]

    def forget(self, key: Hashable) -> None:
        """Forget the misses of a key, since it has been captured."""
        with self._lock:
            self._misses.pop(key, None)

    def clear(self) -> None:
        """Forget all keys."""
        with self._lock:
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
