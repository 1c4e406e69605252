"""When a size is captured: after how many misses, how long after a capture of it failed, and once there is time."""

import time
from collections import deque
from collections.abc import Callable, Hashable
from enum import Enum
from math import inf
from typing import NamedTuple, TypeVar

from ..copying import make_lock
from ..errors import check_count
from ..reasons import Reason
from .protocols import CaptureResult
from .replay import next_use

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
_FIRST_WAIT, _LONGER = 16, 4
_OF_FIRST_RUNS = (Reason.STATE_REBOUND, Reason.STATE_UNSEEN)
"""Why no graph is made of a call whose first run alone sets the callable up: a library loads, hooks are registered."""


class Admission:
    """Counts misses of keys that have no graph; a key is captured at its ``capture_after``-th miss within ``window``.

    Time is counted in uses: replays of any graph in the process, and calls that are looked at. This class does not see
    hits. The time of the first miss that counts is also how a full cache compares a newcomer with what it holds: an
    entry may go only if it has not been used since (the rule of LIRS, Jiang and Zhang 2002). So neither a scan of odd
    sizes nor a cycle over more sizes than there is room for evicts what is in use, and a size that comes often
    displaces what does not.

    Memory is bounded by the window. Thread-safe: the servers of a manager share one.
    """

    def __init__(self, capture_after: int = 2, window: int = 4096, *, clock: Callable[[], int] = next_use) -> None:
        check_count("capture_after", capture_after)
        self.capture_after = capture_after
        self.window = window
        self._clock = clock
        self.now = 0
        """When the latest call was looked at."""
        self._misses: dict[Hashable, deque[int]] = {}
        self._lock = make_lock()  # of what changes

    def look(self) -> None:
        """Begin to look at a call, or to capture without one: that is one use."""
        self.now = self._clock()

    def since(self, key: Hashable) -> int | None:
        """If a miss of ``key`` now leads to a capture: the time of the first miss that counts; else None.

        That is now with ``capture_after=1``. Changes nothing.
        """
        if self.capture_after == 1:
            return self.now
        misses = self._misses.get(key)
        if misses is None or len(misses) < self.capture_after - 1:
            return None
        return misses[0] if self.now - misses[0] <= self.window else None

    def count_miss(self, key: Hashable) -> None:
        """Count a call whose key has no graph and is not captured now."""
        if self.capture_after == 1:
            return
        now = self.now
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

        A callable that rebinds its own state may do so in its first call alone, so it is tried again at once, and so is
        one whose prewarm met state that no run may change. After that it is tried ever more rarely but never given up,
        since no guard tells when it no longer rebinds.
        """
        is_passing = reason is Reason.STATE_REBOUND or (reason is Reason.STATE_UNSEEN and not now)
        times = self[size].times + 1 if size in self else 1
        waits = times - is_passing
        is_last = is_final or (times >= self._max_failures and not is_passing)
        retry_at = inf if is_last else now + (_FIRST_WAIT * _LONGER ** (waits - 1) if waits else 0)
        self[size] = Failure(times, retry_at, reason, detail)

    def blocked(self, size: int, now: int) -> Failure | None:
        """The failure that keeps ``size`` out at ``now``, or None if it may be tried."""
        failure = self.get(size)
        return failure if failure is not None and now < failure.retry_at else None


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
    lost. The first capture of all does not wait if it is expected to take no longer than sixty calls; how long these
    take is shown by the second one.

    All but the first capture may take ``share`` of the time that eager would take for the calls served so far, and
    besides what the graphs have saved. Only what they take beyond the eager run that answers their call counts. Each is
    expected to take as long as the latest one of its kind. The first comparisons of a graph belong to its capture.

    Captures that fail have an account of their own, of a quarter of the share: they use up nothing that others need.
    Where all have failed so far, the next one waits for time in both accounts, since it may succeed. Those that a
    prewarm could not make since the first run of a callable sets it up wait until calls have taken as long as that try,
    and no longer, until one fails once more.

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
        self._spent_s, self._all_failed_s, self._eager_calls = 0.0, 0.0, 0
        self._timed_s, self._timed_calls, self._most_s = 0.0, 0, 0.0
        self._took_s: dict[Work, float] = {}
        """How long the latest of each kind took."""
        self._latest_failure_s = 0.0
        """How long the latest failed capture took."""
        self._at_once = 0
        """How many more comparisons belong to the latest capture."""
        self._owed = 0
        """How many more captures wait for little: those of a prewarm that the first run of the callable prevented."""

    @property
    def is_informed(self) -> bool:
        """Whether it is shown how long a call takes: the first one, which may load and compile, tells little."""
        return self._timed_calls > 1

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
        if self._owed > 0 and not is_comparison:
            return _quotient(self._latest_failure_s - self._served_s, self._later_s)
        expected_s, share_s, each_s = self._expected_s(work), self.share * self._served_s, self.share * self._later_s
        lacking = 0.0 if is_comparison or self._is_short(work) else _quotient(expected_s, self._saving_s) - calls
        if self._took_s:
            lacking_s = self._spent_s + expected_s - share_s - self._count_saved()
            lacking = max(lacking, _quotient(lacking_s, each_s))
        if is_doubtful:
            lacking_s = self._all_failed_s + self._latest_failure_s - _SHARE_OF_FAILURES * share_s
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
            if is_capture:
                self._owed = max(self._owed - 1, 0) if is_good else 0
            if is_good:
                self._spent_s += taken_s if self._took_s else 0.0
                self._took_s[work] = taken_s
                self._at_once = _COMPARED_AT_ONCE if is_capture else max(self._at_once - 1, 0)
            else:
                self._all_failed_s += taken_s
                self._latest_failure_s = taken_s

    def learn(self, capture: Callable[[], CaptureResult], work: Work = Work.FIRST) -> CaptureResult:
        """``capture()``, which nobody waits for: it uses up nothing, and shows how long others will take."""
        started = self.clock()
        result = capture()
        if result.entry is not None:
            self._took_s[work] = self.clock() - started
            self._owed = 0
        else:
            self._latest_failure_s = self.clock() - started
            self._owed += result.reason in _OF_FIRST_RUNS
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
    return 0.0 if seconds <= 0 else seconds / each_s if each_s > 0 else inf
