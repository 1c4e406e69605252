"""``TimeShare``: how much of the time that calls take may go into captures and comparisons."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from time import perf_counter
from typing import TypeVar

from ..capture.request import CaptureResult
from ..memory.entry import CUDAGraphEntry

T = TypeVar("T", bound=CaptureResult | None)
_FIRST = 1  # of each kind of work, which needs no share


class TimeShare:
    """Says whether there is time for work on graphs that a call would pay for: a capture, or a comparison.

    All of it may take at most ``share`` of the time that eager would take for the calls served so far: eager calls and
    replays, each as long as an eager call on average. Work counts beyond the eager run that answers its call, which
    takes as long as one on average unless the work says how long it took: the first of a shape takes longer. It is
    expected to take as long as the latest of its kind. The first of each kind is done whatever it takes, and does
    not count, so that the first graph comes soon.

    Used with the server's lock held, but for ``note_eager``, which may lose a call of another thread.

    Args:
        share: The largest share; None: no limit.
        entries: Gives the graphs whose replays count.
        clock: The time in seconds.
    """

    def __init__(
        self,
        share: float | None,
        entries: Callable[[], Iterable[CUDAGraphEntry]],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.share = share
        self.clock = clock or perf_counter
        self._entries = entries
        self.clear()

    def clear(self) -> None:
        """Forget what was done."""
        self._spent_s = self._eager_s = 0.0
        self._eager_calls = self._gone_replays = 0
        self._done: Counter[Hashable] = Counter()
        self._latest_s: dict[Hashable, float] = {}

    def allows(self, kind: Hashable) -> bool:
        """Whether there is time for work of this kind now."""
        if self.share is None or self._done[kind] < _FIRST:
            return True
        return self._spent_s + self._latest_s[kind] <= self.share * self._served_s

    def pay(self, kind: Hashable, work: Callable[[], T]) -> T:
        """``work()``, which counts as work of this kind."""
        started, done = self.clock(), None
        try:
            done = work()
            return done
        finally:
            answer_s = max(done.answer_s if done is not None else 0.0, self._usual_s)
            self._latest_s[kind] = max(self.clock() - started - answer_s, 0.0)
            self._done[kind] += 1
            if self._done[kind] > _FIRST:
                self._spent_s += self._latest_s[kind]

    def note_eager(self, seconds: float) -> None:
        """Note a call that ran eagerly. Needs no lock."""
        self._eager_s += seconds
        self._eager_calls += 1

    def note_gone(self, entry: CUDAGraphEntry) -> None:
        """Keep the replays of a graph that goes."""
        self._gone_replays += entry.replay_count

    @property
    def _served_s(self) -> float:
        replays = self._gone_replays + sum(entry.replay_count for entry in self._entries())
        return self._eager_s + replays * self._usual_s

    @property
    def _usual_s(self) -> float:
        return self._eager_s / self._eager_calls if self._eager_calls else 0.0
