"""When a key gets a graph: at its n-th miss within a window, and how long it waits after failures."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Generic, NamedTuple, TypeVar

from ..errors import ConfigError, check_count
from ..reasons import Reason
from .replay import next_use

K = TypeVar("K", bound=Hashable)


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


@dataclass(frozen=True)
class Backoff:
    """Waits that grow with each failure in a row: ``first``, then ``factor`` times as long each time, up to ``most``.

    The unit is the caller's: misses of a key, seconds, steps. Raises ``ConfigError`` for waits that could shrink.
    """

    first: float
    factor: float
    most: float = inf

    def __post_init__(self) -> None:
        if not (0 <= self.first <= self.most and self.factor >= 1):
            raise ConfigError(f"waits must be 0 <= first <= most with factor >= 1, got {self!r}")

    def wait(self, times: int) -> float:
        """The wait after the ``times``-th failure in a row; 0 before the first."""
        if times <= 0:
            return 0
        try:
            return min(self.first * self.factor ** (times - 1), self.most)
        except OverflowError:
            return self.most


class Failure(NamedTuple):
    """Why a key is kept out: its failures in a row, the time of the next try (``inf``: never), and the last of them."""

    times: int
    retry_at: float
    reason: Reason
    detail: str


class Quarantine(Generic[K]):
    """Keys that failed, each kept out for as long as ``backoff`` says, and for good at its ``max_failures``-th failure.

    The caller reads the clock and passes ``now``, which must not decrease for a key. Called with the owner's lock held,
    except for ``blocked`` and ``get``, which need none.
    """

    def __init__(self, backoff: Backoff, max_failures: int | None = None) -> None:
        self.backoff = backoff
        self.max_failures = max_failures
        self._failures: dict[K, Failure] = {}

    def fail(
        self,
        key: K,
        now: float,
        reason: Reason,
        detail: str,
        *,
        is_final: bool = False,
        is_passing: bool = False,
    ) -> Failure:
        """Note that ``key`` failed again, and how long it is kept out for that.

        ``is_final``: it is not tried again. ``is_passing``: the cause may end unseen (a callable that rebinds its own
        state does so in its first call, perhaps in no other). Then the first retry comes at once, each later one a
        failure earlier than otherwise, and none is the last.
        """
        before = self._failures.pop(key, None)
        times = before.times + 1 if before is not None else 1
        is_last = not is_passing and self.max_failures is not None and times >= self.max_failures
        retry_at = inf if is_final or is_last else now + self.backoff.wait(times - is_passing)
        self._failures[key] = Failure(times, retry_at, reason, detail)
        return self._failures[key]

    def blocked(self, key: K, now: float) -> Failure | None:
        """The failure that keeps ``key`` out at ``now``, or None if it may be tried."""
        failure = self._failures.get(key)
        return failure if failure is not None and now < failure.retry_at else None

    def get(self, key: K) -> Failure | None:
        """The last failure of ``key``, be it kept out or not."""
        return self._failures.get(key)

    def forgive(self, key: K) -> None:
        """Forget the failures of ``key``, since it went well or is to be tried now."""
        self._failures.pop(key, None)

    def clear(self) -> None:
        """Forget all failures."""
        self._failures.clear()

    @property
    def reasons(self) -> set[Reason]:
        """The reasons of the failures that are remembered."""
        return {failure.reason for failure in self}

    def __iter__(self) -> Iterator[Failure]:
        return iter(list(self._failures.values()))

    def __len__(self) -> int:
        return len(self._failures)

    def __repr__(self) -> str:
        return f"<Quarantine of {len(self)} keys, {self.backoff}>"
