"""How long a key waits after failures: the one rule for failed captures and failed replays."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Generic, NamedTuple, TypeVar

from ..errors import ConfigError
from ..reasons import Reason

__all__ = ["Backoff", "Failure", "Quarantine"]

K = TypeVar("K", bound=Hashable)


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

    The caller reads the clock and passes ``now``, which must not decrease for a key. The ``limit`` keys that failed
    last are remembered; an older one may be tried again as if it had never failed. Called with the owner's lock held,
    except for ``blocked`` and ``get``, which need none.
    """

    def __init__(self, backoff: Backoff, max_failures: int | None = None, limit: int = 4096) -> None:
        self.backoff = backoff
        self.max_failures = max_failures
        self.limit = limit
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
        failure = self._failures[key] = Failure(times, retry_at, reason, detail)
        if len(self._failures) > self.limit:
            del self._failures[next(iter(self._failures))]
        return failure

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
