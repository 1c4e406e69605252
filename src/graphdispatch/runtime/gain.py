"""Whether a graph gains: what its batches take eagerly, and what its replays take."""

import logging
import math
from bisect import bisect, insort
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from typing import Any

from ..backends.base import Backend, Stopwatch
from ..errors import GraphDispatchError, error_of_signal
from ..showing import milliseconds, rows_text
from ..sizes import cells_of
from ..stats import Gain
from .entry import CUDAGraphEntry

_log = logging.getLogger("graphdispatch")
_SHORT_MS = 10.0
"""The replay beside a shorter eager run is timed twice in a prewarm."""
ENOUGH, _ENOUGH_RUNS = 3, 3
"""So many replays of a graph, or eager runs of a batch, show what it takes."""
_MOST_RUNS, _MOST_ROWS = 8, 4096
_LEAST_RATIO, _MAY_LOSE = 1.05, 0.9
_LEAST_LOSS_MS, _LEAST_LOSS_OF_SHORT_MS, _SHORTEST_MS = 0.025, 0.1, 0.1


_AGAINST_LOSS = "put more of the work into the call"
_AGAINST_PADDING = "have a size nearer to it (sizes=)"


def is_loss(gain: Gain) -> bool:
    """Whether a graph is clearly slower, by more than noise would make of equal times."""
    least_ms = _LEAST_LOSS_MS if gain.eager_ms >= _SHORTEST_MS else _LEAST_LOSS_OF_SHORT_MS
    return gain.replay_ms >= max(gain.eager_ms + least_ms, gain.eager_ms * _LEAST_RATIO)


def may_be_loss(gain: Gain) -> bool:
    """Whether it may be slower, as far as a single run of each shows."""
    return gain.replay_ms >= _MAY_LOSE * gain.eager_ms


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
        return rows in self._by_rows and self._by_rows[rows][1] >= _ENOUGH_RUNS

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


class GainJudge:
    """Says which batches of one signature a graph serves: those for which it is not clearly slower than eager. Needs no
    lock.

    Args:
        backend: Where the callable runs.
        call: The callable on flat values.
    """

    def __init__(self, backend: Backend, call: Callable[[Sequence[Any]], Any]) -> None:
        self._backend, self._call = backend, call
        self.times = EagerTimes()
        self._stopwatch = Stopwatch()
        self.in_doubt: set[int] = set()
        """Batches for which the graph was slower than eager, and is timed once more."""

    def of(self, entry: CUDAGraphEntry, rows: int) -> Gain | None:
        """What the graph and an eager run take for a batch, as far as that is shown; None if it is not."""
        eager_s = self.times.expected_s(rows)
        return None if eager_s is None or entry.replay_ms == math.inf else Gain(eager_s * 1e3, entry.replay_ms)

    def loss(self, entry: CUDAGraphEntry, rows: int) -> str:
        """What both take where the graph is clearly slower for this batch, as padding can make it, with a remedy; else
        empty."""
        gain = self.of(entry, rows)
        if gain is None or not is_loss(gain):
            return ""
        times = f"the graph of {entry.size} takes {milliseconds(gain.replay_ms)}, and an eager run of {rows_text(rows)}"
        remedy = _AGAINST_LOSS if rows == entry.size else _AGAINST_PADDING
        return f"{times} {milliseconds(gain.eager_ms)}; {remedy}"

    def sure_loss(self, entry: CUDAGraphEntry, rows: int) -> str:
        """The same, where as many replays were timed as hits want."""
        return self.loss(entry, rows) if _replays(entry) >= ENOUGH else ""

    def may_hit(self, entry: CUDAGraphEntry, rows: int) -> bool:
        """Whether calls of such a batch may be hits, which are not timed: the graph is clearly faster; or enough
        replays were timed, and it is not slower."""
        gain = self.of(entry, rows)
        if gain is not None and not may_be_loss(gain):
            return True
        return _replays(entry) >= ENOUGH and (gain is None or not is_loss(gain))

    def text(self, entry: CUDAGraphEntry, rows: int) -> str:
        """What the graph gains for a batch, in words; empty where too few runs show it, or where it is within noise."""
        gain = self.of(entry, rows) if self.times.is_sure(rows) and _replays(entry) >= ENOUGH else None
        if gain is None or not (is_loss(gain) or is_loss(Gain(gain.replay_ms, gain.eager_ms))):
            return ""
        return f"it takes {milliseconds(gain.replay_ms)} instead of {milliseconds(gain.eager_ms)}"

    def saved_s(self, entries: Iterable[CUDAGraphEntry], fill: float) -> float:
        """The seconds that graphs have saved so far.

        Args:
            entries: The graphs.
            fill: The share of the rows of their batches that were real.
        """
        saved_s = 0.0
        for entry in entries:
            eager_s = self.times.between(int(cells_of(entry.size) * fill))
            if eager_s is not None and entry.replay_ms < math.inf:
                saved_s += entry.replay_count * (eager_s - entry.replay_ms / 1e3)
        return saved_s

    def wants(self, rows: int) -> bool:
        """Whether a further eager run of such a batch would show more."""
        return self.times.wants(rows)

    def timed(self, fn: Callable[..., Any], rows: int) -> Callable[..., Any]:
        """The callable, such that what it takes for a batch is noted."""
        marks = self._stopwatch.start(self._backend)
        if marks is None:
            return fn

        def run(*args: Any, **kwargs: Any) -> Any:
            answer = fn(*args, **kwargs)
            self._stopwatch.stop(marks, lambda elapsed_ms: self.times.note(rows, elapsed_ms / 1e3))
            return answer

        return run

    def make_sure(self, entry: CUDAGraphEntry, full: Sequence[Any], least: int, values: Sequence[Any]) -> None:
        """Time what shows whether a graph serves the smallest batch that is padded to it faster than eager would: a
        short replay once more, since the first one is slower; an eager run of that batch where none smaller was timed;
        and another one, with as many replays as hits want, where that leaves it in doubt.

        Args:
            entry: The graph; nothing is run if its calls leave effects.
            full: The values of a full batch.
            least: The rows of the smallest batch.
            values: The values of that.
        """
        if entry.gain is None or entry.writes_outside:
            return
        try:
            if entry.gain.eager_ms < _SHORT_MS:
                entry.time_replay(full, entry.size)
            if self.times.least_cells() > cells_of(least):
                self._time_eager(least, values)
            gain = self.of(entry, least)
            if gain is not None and may_be_loss(gain) and self.wants(least):
                self._time_eager(least, values)
                for _ in range(max(ENOUGH - _replays(entry), 1)):
                    entry.time_replay(values, least)
        except Exception as error:
            if error_of_signal(error) is not None or isinstance(error, GraphDispatchError):
                raise
            self._backend.raise_if_lost(error)
            _log.debug("%r was not timed for %d rows: %s", entry, least, error)  # the callable takes no batch made so

    def _time_eager(self, rows: int, values: Sequence[Any]) -> None:
        if self.wants(rows):
            copy_context().run(self.timed(self._call, rows), values)
            self._backend.current_stream().synchronize()
            self._stopwatch.collect()


def _replays(entry: CUDAGraphEntry) -> int:
    """How many replays of a graph were timed, that of its capture included."""
    return entry.times + (entry.gain is not None)
