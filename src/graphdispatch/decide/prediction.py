"""Prediction: which sizes come next, and which of them to capture in a pause."""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..descriptors import DispatchKey
from ..errors import ConfigError
from ..sizes import check_sizes

__all__ = ["CapturesSizes", "Prewarmer", "SizePredictor"]

_Probabilities = NDArray[np.float64]

_MOST_SIZES = 1024
_RESCALE_AT = 1e6
# How much a size's own history counts against the habits of all sizes: as many observations as these outweigh it.
_HABIT_WEIGHT = 4.0
_UNSEEN = 1e-3
_GAP_SHARE = 0.05
_LEAST_GAP_MS = 1.0
_COST_SHARE = 0.25
_REPLACES_FROM = 0.5


class SizePredictor:
    """Forecasts padded sizes from the sequence of keys so far, by three habits that fade with age.

    What followed this size before (a Markov chain of order one); by how many places among the sizes it moved, wherever
    they were (so that a growing batch points at sizes that were never seen); and how often each size came at all. The
    less is known of what follows a size, the more the latter two decide.

    ``sizes`` are the capture sizes; a batch above the largest is followed but never forecast, since no graph serves it.
    The last ``memory`` observations decide. Memory is 8 bytes times the square of the number of sizes. Thread-safe.
    """

    def __init__(self, sizes: Sequence[int], memory: int = 2000) -> None:
        self.sizes = check_sizes(sizes, "sizes")
        if len(self.sizes) > _MOST_SIZES:
            raise ConfigError(f"sizes must hold at most {_MOST_SIZES} sizes, got {len(self.sizes)}; give fewer")
        if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
            raise ConfigError(f"memory must be an integer >= 1, got {memory!r}")
        count = len(self.sizes) + 1
        self._lock = threading.Lock()
        self._last: int | None = None
        # Counts grow by an ever larger unit instead of fading one by one: an observation costs the same for any sizes.
        self._unit = 1.0
        self._growth = 1 + 1 / memory
        self._follows = np.zeros((count, count))
        self._jumps = np.zeros(2 * count - 1)
        self._often = np.zeros(count)

    def padded(self, key: DispatchKey) -> int | None:
        """The size of the graph that serves ``key``, or None above the largest."""
        index = bisect_left(self.sizes, key.num_tokens)
        return self.sizes[index] if index < len(self.sizes) else None

    def observe(self, key: DispatchKey) -> None:
        """Take in the key of the step that comes next."""
        now = bisect_left(self.sizes, key.num_tokens)
        with self._lock:
            self._unit *= self._growth
            self._often[now] += self._unit
            if self._last is not None:
                self._follows[self._last, now] += self._unit
                self._jumps[now - self._last + len(self.sizes)] += self._unit
            self._last = now
            if self._unit > _RESCALE_AT:
                for counts in (self._follows, self._jumps, self._often):
                    counts /= self._unit
                self._unit = 1.0

    def forecast(self, k: int, horizon: int = 1) -> list[tuple[int, float]]:
        """The ``k`` likeliest sizes, each with the probability that it comes within the next ``horizon`` steps.

        Sorted by falling probability; empty before the first observation. With ``horizon=1`` the probabilities of all
        sizes and of batches above the largest sum to one; over several steps they are an upper estimate, which takes
        the steps for independent.
        """
        for name, value in (("k", k), ("horizon", horizon)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
        with self._lock:
            if self._last is None:
                return []
            moves = self._moves()
            now = np.zeros(len(moves))
            now[self._last] = 1.0
        missed = np.ones(len(moves))
        for _ in range(horizon):
            now = now @ moves
            missed *= 1 - now
        chances = 1 - missed[:-1]
        best = np.argsort(-chances, kind="stable")[:k]
        return [(self.sizes[index], float(chances[index])) for index in best]

    def _moves(self) -> _Probabilities:
        """The probability of each size after each: rows of the chain, filled up with the habits of all sizes."""
        count = len(self._often)
        often = self._often / self._unit + _UNSEEN / count
        often /= often.sum()
        # Row i holds the jumps that lead from size i to every other; those beyond the sizes are lost.
        start = np.arange(count - 1, -1, -1)[:, None] + np.arange(count)
        jumps = (self._jumps / self._unit)[start]
        jumps += often * max(1.0, float(self._jumps.sum()) / self._unit) * 0.1
        habits = jumps / jumps.sum(axis=1, keepdims=True)
        rows = self._follows / self._unit + _HABIT_WEIGHT * habits
        moves: _Probabilities = rows / rows.sum(axis=1, keepdims=True)
        return moves


class CapturesSizes(Protocol):
    """What can be told to capture a size, and says which it has: ``graphed`` callables can."""

    @property
    def captured_sizes(self) -> Collection[int]:
        """The sizes that have a graph now."""

    def capture_size(self, size: int) -> bool:
        """Capture one size now; whether there is a graph of it then."""


class Prewarmer:
    """Plans which sizes to capture in a pause, before batches need them, and has them captured one at a time.

    A pause counts from the end of the last step, once it has lasted as long as a capture will take and four times as
    long as steps are usually apart: what has lasted tends to last, and at worst the wait is doubled. So nothing is
    planned in a burst, nor while a step runs.
    Captures take at most the share ``budget`` of all time since the start, after ``allowance_ms`` for a start.
    ``capture_ms`` is what a capture is assumed to cost until ``record_capture`` has seen one. A size is worth it from a
    probability of ``least`` to be needed within ``horizon`` steps. ``clock`` gives seconds. Thread-safe.
    """

    def __init__(
        self,
        predictor: SizePredictor,
        *,
        budget: float = 0.02,
        allowance_ms: float = 1000.0,
        capture_ms: float = 100.0,
        least: float = 0.02,
        horizon: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value, most in (("budget", budget, 1.0), ("least", least, 1.0)):
            if not 0 <= value <= most:
                raise ConfigError(f"{name} must be a share from 0 to 1, got {value!r}")
        for name, value in (("allowance_ms", allowance_ms), ("capture_ms", capture_ms)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} must be a finite number of milliseconds >= 0, got {value!r}")
        if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
            raise ConfigError(f"horizon must be an integer >= 1, got {horizon!r}")
        self.predictor = predictor
        self.capture_ms = capture_ms
        """What a capture is expected to cost, in milliseconds."""
        self.spent_ms = 0.0
        """What captures have cost so far, in milliseconds."""
        self._budget = budget
        self._allowance_ms = allowance_ms
        self._least = least
        self._horizon = horizon
        self._clock = clock
        self._lock = threading.Lock()
        self._start = clock()
        self._running = 0
        self._last_end: float | None = None
        self._gap_ms = 0.0

    def step_started(self, key: DispatchKey) -> None:
        """Say that a step for ``key`` starts; the predictor observes it."""
        self.predictor.observe(key)
        now = self._clock()
        with self._lock:
            if not self._running and self._last_end is not None:
                gap = max(0.0, 1000 * (now - self._last_end))
                # A pause is not how steps are usually apart, so that it counts for little.
                self._gap_ms += _GAP_SHARE * (min(gap, 2 * self._gap_ms + _LEAST_GAP_MS) - self._gap_ms)
            self._running += 1

    def step_ended(self) -> None:
        """Say that a step has ended, by an error too. Raises ``ConfigError`` if none was running."""
        now = self._clock()
        with self._lock:
            if not self._running:
                raise ConfigError("step_ended() must follow step_started(), got one call too many")
            self._running -= 1
            self._last_end = now

    def record_capture(self, latency: float) -> None:
        """Say that a capture took ``latency`` milliseconds, planned here or not."""
        if not 0 <= latency < float("inf"):
            raise ConfigError(f"latency must be a finite number of milliseconds >= 0, got {latency!r}")
        with self._lock:
            self.capture_ms += _COST_SHARE * (latency - self.capture_ms)
            self.spent_ms += latency

    def plan(self, ready: Collection[int], capacity: int | None = None) -> list[int]:
        """The sizes to capture now, most urgent first; empty in a burst, without budget, or with nothing to expect.

        ``ready`` are the sizes that have graphs, ``capacity`` is how many can be kept: beyond that, a size is planned
        only if it is likely, and twice as likely as the least likely graph, which should go for it. Capture one, call
        ``record_capture``, and ask again: the pause may be over.
        """
        count = self._affordable()
        if not count:
            return []
        chances = dict(self.predictor.forecast(len(self.predictor.sizes), self._horizon))
        wanted = [size for size, chance in chances.items() if size not in ready and chance >= self._least]
        if capacity is not None:
            free = max(0, capacity - len(ready))
            weakest = sorted(chances.get(size, 0.0) for size in ready)
            wanted = wanted[:free] + [
                size
                for size, kept in zip(wanted[free:], weakest, strict=False)
                if chances[size] > max(_REPLACES_FROM, 2 * kept)
            ]
        return wanted[:count]

    def capture_one(self, target: CapturesSizes, capacity: int | None = None) -> int | None:
        """In a pause, have ``target`` capture the size that ``plan`` finds most urgent; returns it, or None.

        Call it whenever nothing is to be served: outside of pauses, and without budget, it does nothing. A size that
        cannot be captured costs its time, and the next one is tried while the budget lasts.
        """
        for size in self.plan(target.captured_sizes, capacity):
            begun = self._clock()
            is_captured = target.capture_size(size)
            self.record_capture(1000 * max(0.0, self._clock() - begun))
            if is_captured:
                return size
        return None

    def _affordable(self) -> int:
        """How many captures the pause and the budget allow now."""
        now = self._clock()
        with self._lock:
            if self._running or self._last_end is None:
                return 0
            pause = 1000 * (now - self._last_end)
            if pause < max(self.capture_ms, 4 * self._gap_ms):
                return 0
            left = self._allowance_ms + 1000 * self._budget * (now - self._start) - self.spent_ms
            return max(0, int(left // max(self.capture_ms, 1e-3)))
