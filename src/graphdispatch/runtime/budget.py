"""Time: whether a capture can be paid for now, and what a batch takes eagerly."""

import math
import time
from bisect import bisect, insort
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from ..sizes import cells_of
from .request import CaptureResult

T = TypeVar("T", bound=CaptureResult | None)

_SHORT_CAPTURE_CALLS = 60
"""A first capture that is expected to take no longer than so many calls does not wait."""
_ALL_TIMED, _ONE_TIMED_OF = 64, 16
"""So many eager calls are all timed, and then one of so many."""
_FIRST_CALL_LASTS = 10
"""The first call of a process may take so many times as long as later ones."""
_SHARE_OF_FAILURES = 0.25
"""Of the share of captures, what failed ones may take besides."""
_FURTHER = 0.25
"""What a graph of a further size is expected to take, of the first one of its signature, before one was made."""
_COMPARISON_CALLS = 5
"""A comparison is expected to take as long as so many calls, before one was made."""
_COMPARED_AT_ONCE = 2
"""So many comparisons after a capture wait for nothing: they belong to it, and without them it serves nobody."""
ENOUGH = 3
"""So many eager runs of a batch, or replays of a graph, show what it takes."""
_MOST_RUNS, _MOST_ROWS = 8, 4096


class Work(Enum):
    """What a call would pay for."""

    FIRST = "the first graph of a signature, or that of a single row, for which Python often takes a path of its own"
    FURTHER = "a graph of a further size"
    COMPARISON = "a comparison of a graph with eager"


class CaptureBudget:
    """Says whether there is time for a capture or a comparison that a call would pay for, so that a service is never
    much slower than eager.

    A graph is made once the calls of its size would have saved, with it, what its capture is expected to take. Each is
    taken to save as much as the replays so far did on average, but ``share`` of its time at least; and all of its
    time, before the first replay. So at worst, if no such call follows, twice the time that could have been saved is
    lost. The first capture of all does not wait if it is expected to take no longer than sixty calls.

    All but the first capture may take ``share`` of the time that eager would take for the calls served so far, and
    besides what the graphs have saved. Only what they take beyond the eager run that answers their call counts. Each is
    expected to take as long as the latest one of its kind. The first comparisons of a graph belong to its capture.

    Captures that fail have an account of their own, of a quarter of the share: they use up nothing that others need.
    Where all have failed so far, the next one waits for time in both accounts, since it may succeed.

    Used with the server's lock held, but for ``note_eager``, which may lose a call of another thread.

    Args:
        share: The largest share; None: no limit.
        count_replays: Gives the number of replays so far, those of graphs that are gone, too.
        count_saved: Gives the seconds that the present graphs have saved so far.
    """

    clock = staticmethod(time.thread_time)
    """The processor time of the thread in seconds: what other processes take meanwhile does not count."""
    first_capture_s = 0.15
    """The first capture is expected to take so long, with its comparisons. Most of ``make real`` take less."""

    def __init__(
        self, share: float | None, count_replays: Callable[[], int], count_saved: Callable[[], float] = float
    ) -> None:
        self.share = share
        self._count_replays, self._count_saved = count_replays, count_saved
        self.clear()

    def clear(self) -> None:
        """Forget what was done."""
        self._spent_s, self._failed_s, self._eager_calls = 0.0, 0.0, 0
        self._timed_s, self._timed_calls, self._most_s = 0.0, 0, 0.0
        self._took_s: dict[Work, float] = {}
        """How long the latest of each kind took."""
        self._failure_s = 0.0
        """How long the latest failed capture took."""
        self._at_once = 0
        """So many more comparisons belong to the latest capture."""

    def calls_until_time(self, work: Work = Work.FIRST, calls: int = 0, *, is_doubtful: bool = False) -> float:
        """After about how many more calls like this one there is time for it, as far as all run eagerly. There is now
        where it is not above 0.

        Args:
            work: What the call would pay for.
            calls: Of a capture, how many calls of its size have run eagerly.
            is_doubtful: Whether captures of such calls have only failed so far. The next one may fail, too, or not.
        """
        is_comparison = work is Work.COMPARISON
        if self.share is None or (is_comparison and self._at_once > 0):
            return 0
        expected_s, share_s, each_s = self._expected_s(work), self.share * self._served_s, self.share * self._later_s
        lacking = 0.0 if is_comparison or self._is_short(work) else _quotient(expected_s, self._saving_s) - calls
        if self._took_s:
            lacking_s = self._spent_s + expected_s - share_s - self._count_saved()
            lacking = max(lacking, _quotient(lacking_s, each_s))
        if is_doubtful:
            lacking_s = self._failed_s + self._failure_s - _SHARE_OF_FAILURES * share_s
            lacking = max(lacking, _quotient(lacking_s, _SHARE_OF_FAILURES * each_s))
        return lacking

    def _is_short(self, work: Work) -> bool:
        """Whether it is the first capture of all, and expected to take no longer than sixty calls."""
        is_first = work is Work.FIRST and not self._took_s
        return is_first and self.first_capture_s <= _SHORT_CAPTURE_CALLS * self._later_s

    @property
    def _saving_s(self) -> float:
        """What a call of a size without a graph would save with one; the share at least, if replays save less."""
        saved_s, replays = self._count_saved(), self._count_replays()
        return max(saved_s / replays if replays else self._later_s, (self.share or 0.0) * self._later_s)

    def _expected_s(self, work: Work) -> float:
        if (known := self._took_s.get(work)) is not None:
            return known
        if work is Work.COMPARISON:
            return _COMPARISON_CALLS * self._usual_s
        first_s = self._took_s.get(Work.FIRST, self.first_capture_s)
        return first_s if work is Work.FIRST else _FURTHER * first_s

    def pay(self, run: Callable[[], T], work: Work) -> T:
        """``run()``, which does it, and whose time counts, but for that of the first capture. A capture without an
        entry is a failure."""
        started, is_good, is_capture = self.clock(), False, work is not Work.COMPARISON
        try:
            result = run()
            is_good = not is_capture or (result is not None and result.entry is not None)
            return result
        finally:
            taken_s = max(self.clock() - started - self._usual_s, 0.0)
            if is_good:
                self._spent_s += taken_s if self._took_s else 0.0
                self._took_s[work] = taken_s
                self._at_once = _COMPARED_AT_ONCE if is_capture else max(self._at_once - 1, 0)
            else:
                self._failed_s += taken_s
                self._failure_s = taken_s

    def learn(self, capture: Callable[[], CaptureResult], work: Work = Work.FIRST) -> CaptureResult:
        """``capture()``, which nobody waits for: it uses up nothing, and shows how long others will take."""
        started = self.clock()
        result = capture()
        if result.entry is not None:
            self._took_s[work] = self.clock() - started
        else:
            self._failure_s = self.clock() - started
        return result

    def begin_eager(self) -> float | None:
        """When an eager call begins, for ``note_eager``; None if it need not be timed. Needs no lock."""
        calls = self._eager_calls
        return self.clock() if calls < _ALL_TIMED or not calls % _ONE_TIMED_OF else None

    def note_eager(self, started: float | None) -> None:
        """Note a call that ran eagerly. Needs no lock."""
        self._eager_calls += 1
        if started is not None:
            seconds = self.clock() - started
            self._timed_s += seconds
            self._timed_calls += 1
            self._most_s = max(self._most_s, seconds)

    @property
    def _served_s(self) -> float:
        return (self._eager_calls + self._count_replays()) * self._usual_s

    @property
    def _usual_s(self) -> float:
        return self._timed_s / self._timed_calls if self._timed_calls else 0.0

    @property
    def _later_s(self) -> float:
        """The same without the slowest call, which may have loaded and compiled."""
        others = self._timed_calls - 1
        return (self._timed_s - self._most_s) / others if others > 0 else self._timed_s / _FIRST_CALL_LASTS


def _quotient(seconds: float, each_s: float) -> float:
    """After how many times ``each_s`` so many seconds have gone by: never, where that is nothing."""
    return 0.0 if seconds <= 0 else seconds / each_s if each_s > 0 else math.inf


class EagerTimes:
    """What batches of one signature take eagerly: the shortest run of each number of rows. Noted without a lock."""

    __slots__ = ("_by_rows", "_places")

    def __init__(self) -> None:
        self._by_rows: dict[int, tuple[float, int]] = {}
        self._places: list[tuple[int, int]] = []
        """The cells of each number of rows, with it, in order: there may be thousands."""

    def wants(self, rows: int) -> bool:
        """Whether a further run of such a batch would show more: the shortest of eight is enough."""
        own = self._by_rows.get(rows)
        return len(self._by_rows) < _MOST_ROWS if own is None else own[1] < _MOST_RUNS

    def note(self, rows: int, seconds: float) -> None:
        """Note an eager run."""
        least, number = self._by_rows.get(rows, (seconds, 0))
        self._by_rows[rows] = min(least, seconds), number + 1
        if not number:
            insort(self._places, (cells_of(rows), rows))

    def expected_s(self, rows: int) -> float | None:
        """What a batch takes: its own runs if there are three; else what lies between the next smaller and the next
        larger batch, by their cells; the next one, where there is no other; None if nothing has run yet."""
        return self._by_rows[rows][0] if self.is_sure(rows) else self.between(cells_of(rows))

    def is_sure(self, rows: int) -> bool:
        """Whether enough runs show what such a batch takes."""
        return rows in self._by_rows and self._by_rows[rows][1] >= ENOUGH

    def least_cells(self) -> float:
        """The cells of the smallest batch that was timed; infinite if there is none."""
        return self._places[0][0] if self._places else math.inf

    def between(self, cells: int) -> float | None:
        """What a batch of so many cells takes, by the batches next to it."""
        last = len(self._places) - 1
        if last < 0:
            return None
        place = bisect(self._places, (cells, 0))
        (low, below), (high, above) = self._places[max(place - 1, 0)], self._places[min(place, last)]
        low_s, high_s = self._by_rows[below][0], self._by_rows[above][0]
        if not low < cells < high:
            return low_s if cells <= low else high_s
        return low_s + (high_s - low_s) * (cells - low) / (high - low)
