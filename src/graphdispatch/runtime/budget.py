"""Time: whether a capture can be paid for now, and what a batch takes eagerly."""

import time
from bisect import bisect
from collections.abc import Callable
from typing import TypeVar

from ..sizes import cells_of
from .request import CaptureResult

T = TypeVar("T", bound=CaptureResult | None)

_FIRST_CAPTURE_CALLS = 100
"""The first capture of a callable may take as long as so many calls."""
_FIRST_CALL_LASTS = 10
"""The first call of a process may take so many times as long as later ones."""
_SHARE_OF_FAILURES = 0.25
"""Of the share of captures, what failed ones may take besides."""
ENOUGH = 3
"""So many eager runs of a batch, or replays of a graph, show what it takes."""
_MOST_RUNS, _MOST_ROWS = 8, 4096


class CaptureBudget:
    """Says whether there is time for a capture that a call would pay for, so that a service is never much slower than
    eager.

    Captures and comparisons may take ``share`` of the time that eager would take for the calls served so far, and
    besides what the graphs have saved. Only what they take beyond the eager run that answers their call counts. A
    capture is expected to take as long as the latest one. The first is made once it is expected to take no longer than
    the next hundred calls, so that the first graph comes soon, or once the share has grown enough.

    Captures that fail have an account of their own, of a quarter of the share: they use up nothing that others need.
    Where all have failed so far, the next one waits for time in both accounts, since it may succeed.

    Used with the server's lock held, but for ``note_eager``, which may lose a call of another thread.

    Args:
        share: The largest share; None: no limit.
        count_replays: Gives the number of replays so far, those of graphs that are gone, too.
        count_saved: Gives the seconds that the present graphs have saved so far.
    """

    clock = staticmethod(time.perf_counter)
    """The time in seconds."""
    first_capture_s, first_capture_calls = 0.08, 50
    """The first capture is expected to take so long, and besides as long as so many calls: roughly what it takes for
    the programs of ``make real``."""

    def __init__(
        self, share: float | None, count_replays: Callable[[], int], count_saved: Callable[[], float] = float
    ) -> None:
        self.share = share
        self._count_replays, self._count_saved = count_replays, count_saved
        self.clear()

    def clear(self) -> None:
        """Forget what was done."""
        self._spent_s, self._failed_s, self._eager_s, self._eager_calls = 0.0, 0.0, 0.0, 0
        self._least_s = float("inf")
        self._capture_s: float | None = None
        """How long the latest capture took; None before the first."""
        self._failure_s = 0.0
        """How long the latest failed capture took."""

    def has_time(self, *, is_doubtful: bool = False) -> bool:
        """Whether there is time for a capture now.

        Args:
            is_doubtful: Whether captures of such calls have only failed so far. The next one may fail, too, or not.
        """
        if self.share is None:
            return True
        has_own = self._capture_s is None and self._comes_soon
        return (has_own or self._lacking_s <= 0) and not (is_doubtful and self._lacking_for_failures_s > 0)

    @property
    def _lacking_s(self) -> float:
        """The time that is lacking for a capture."""
        return self._spent_s + self._expected_s - (self.share or 0.0) * self._served_s - self._count_saved()

    @property
    def _lacking_for_failures_s(self) -> float:
        """The same in the account of those that fail."""
        return self._failed_s + self._failure_s - _SHARE_OF_FAILURES * (self.share or 0.0) * self._served_s

    @property
    def _comes_soon(self) -> bool:
        """Whether the first capture is expected to take no longer than the next hundred calls."""
        usual_s = self._least_s / (_FIRST_CALL_LASTS if self._eager_calls == 1 else 1)
        return self._expected_of(usual_s) <= _FIRST_CAPTURE_CALLS * usual_s

    @property
    def _expected_s(self) -> float:
        return self._expected_of(self._usual_s) if self._capture_s is None else self._capture_s

    def _expected_of(self, usual_s: float) -> float:
        return self.first_capture_s + self.first_capture_calls * usual_s

    def calls_until_time(self, *, is_doubtful: bool = False) -> int:
        """After about how many more calls there is time for a capture, as far as they run eagerly; 0: now.

        Args:
            is_doubtful: As for ``has_time``.
        """
        if self.has_time(is_doubtful=is_doubtful) or not self._usual_s or not self.share:
            return 0
        each_s = self.share * self._usual_s
        calls = 0.0 if self._capture_s is None and self._comes_soon else self._lacking_s / each_s
        if is_doubtful:
            calls = max(calls, self._lacking_for_failures_s / (_SHARE_OF_FAILURES * each_s))
        return 2 + int(calls)

    def pay(self, work: Callable[[], T], *, is_capture: bool) -> T:
        """``work()``, a capture or a comparison, whose time counts. A result without an entry is a failure."""
        started, is_good = self.clock(), False
        try:
            result = work()
            is_good = not is_capture or (result is not None and result.entry is not None)
            return result
        finally:
            taken_s = max(self.clock() - started - self._usual_s, 0.0)
            if is_good:
                self._spent_s += taken_s
                self._capture_s = taken_s if is_capture else self._capture_s
            else:
                self._failed_s += taken_s
                self._failure_s = taken_s

    def learn(self, capture: Callable[[], CaptureResult]) -> CaptureResult:
        """``capture()``, which nobody waits for: it uses up nothing, and shows how long others will take."""
        started = self.clock()
        result = capture()
        if result.entry is not None:
            self._capture_s = self.clock() - started
        else:
            self._failure_s = self.clock() - started
        return result

    def note_eager(self, seconds: float) -> None:
        """Note a call that ran eagerly. Needs no lock."""
        self._eager_s += seconds
        self._eager_calls += 1
        if seconds < self._least_s:
            self._least_s = seconds

    @property
    def _served_s(self) -> float:
        return self._eager_s + self._count_replays() * self._usual_s

    @property
    def _usual_s(self) -> float:
        return self._eager_s / self._eager_calls if self._eager_calls else 0.0


class EagerTimes:
    """What batches of one signature take eagerly: the shortest run of each number of rows. Noted without a lock."""

    __slots__ = ("_by_rows",)

    def __init__(self) -> None:
        self._by_rows: dict[int, tuple[float, int]] = {}

    def wants(self, rows: int) -> bool:
        """Whether a further run of such a batch would show more: the shortest of eight is enough."""
        own = self._by_rows.get(rows)
        return len(self._by_rows) < _MOST_ROWS if own is None else own[1] < _MOST_RUNS

    def note(self, rows: int, seconds: float) -> None:
        """Note an eager run."""
        least, number = self._by_rows.get(rows, (seconds, 0))
        self._by_rows[rows] = min(least, seconds), number + 1

    def expected_s(self, rows: int) -> float | None:
        """What a batch takes: its own runs if there are three; else what lies between the next smaller and the next
        larger batch, by their cells; the next one, where there is no other; None if nothing has run yet."""
        return self._by_rows[rows][0] if self.is_sure(rows) else self.between(cells_of(rows))

    def is_sure(self, rows: int) -> bool:
        """Whether enough runs show what such a batch takes."""
        return rows in self._by_rows and self._by_rows[rows][1] >= ENOUGH

    def between(self, cells: int) -> float | None:
        """What a batch of so many cells takes, by the batches next to it."""
        timed = sorted((cells_of(other), least) for other, (least, _) in self._by_rows.copy().items())
        if not timed:
            return None
        place = bisect(timed, (cells, 0.0))
        (low, low_s), (high, high_s) = timed[max(place - 1, 0)], timed[min(place, len(timed) - 1)]
        if not low < cells < high:
            return low_s if cells <= low else high_s
        return low_s + (high_s - low_s) * (cells - low) / (high - low)
