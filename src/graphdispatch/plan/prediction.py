"""Prediction: which sizes come next, and which of them to capture in a pause."""

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..copying import Unlocked
from ..descriptors import DispatchKey
from ..errors import ConfigError, check_count
from ..forking import make_lock
from ..sizes import check_sizes
from .pauses import Pauses

__all__ = ["Prewarmer", "SizePredictor"]

_Probabilities = NDArray[np.float64]

_MOST_SIZES = 1024
_RESCALE_AT = 1e6
# How much a size's own history counts against the habits of all sizes: as many observations as these outweigh it.
_HABIT_WEIGHT = 4.0
_UNSEEN = 1e-3
_REPLACES_FROM = 0.5  # the probability from which a size may take the place of a graph


class SizePredictor(Unlocked):
    """Forecasts padded sizes from the sequence of keys so far. It combines three habits, and older steps count less.

    The first is what followed this size before (a Markov chain of order one). The second is by how many capture sizes
    batches grew or shrank, whatever their size: by it a growing batch points at sizes that were never seen. The third
    is how often each size came. The less is known of what follows a size, the more the second and third decide.

    ``sizes`` are the capture sizes. A batch above the largest is observed but never forecast, since no graph serves it.
    About the last ``memory`` observations count. It takes 8 bytes times the square of the number of sizes. Thread-safe.
    """

    def __init__(self, sizes: Sequence[int], memory: int = 2000) -> None:
        self.sizes = check_sizes(sizes, "sizes")
        if len(self.sizes) > _MOST_SIZES:
            raise ConfigError(f"sizes must hold at most {_MOST_SIZES} sizes, got {len(self.sizes)}; use fewer")
        check_count("memory", memory)
        count = len(self.sizes) + 1
        self._lock = make_lock()
        self._last: int | None = None
        # Each observation counts a little more than the one before, instead of making all older counts smaller: so its
        # cost does not depend on the number of sizes.
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
        sizes and of batches above the largest sum to one. Over several steps they are an upper estimate, which assumes
        that the steps are independent.
        """
        check_count("k", k)
        check_count("horizon", horizon)
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
        """The probability of each size after each: what followed it, mixed with the habits of all sizes."""
        count = len(self._often)
        often = self._often / self._unit + _UNSEEN / count
        often /= often.sum()
        # Row i holds the jumps that lead from size i to every other; jumps beyond the sizes are left out.
        start = np.arange(count - 1, -1, -1)[:, None] + np.arange(count)
        jumps = (self._jumps / self._unit)[start]
        jumps += often * max(1.0, float(self._jumps.sum()) / self._unit) * 0.1
        habits = jumps / jumps.sum(axis=1, keepdims=True)
        rows = self._follows / self._unit + _HABIT_WEIGHT * habits
        moves: _Probabilities = rows / rows.sum(axis=1, keepdims=True)
        return moves


class _Target(Protocol):
    """What has graphs of some sizes, and captures others."""

    @property
    def captured_sizes(self) -> Collection[int]: ...
    def capture_size(self, size: int) -> bool: ...


class Prewarmer:
    """Plans which sizes to capture in a pause, before batches need them, and has them captured one at a time.

    ``pauses``, made of ``budget``, ``allowance_ms``, ``capture_ms`` and ``clock``, says when there is time for that.
    A size is worth a capture from a probability of ``least`` to be needed within ``horizon`` steps. Thread-safe.
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
        if not 0 <= least <= 1:
            raise ConfigError(f"least must be a share from 0 to 1, got {least!r}")
        check_count("horizon", horizon)
        self.predictor = predictor
        self.pauses = Pauses(budget=budget, allowance_ms=allowance_ms, capture_ms=capture_ms, clock=clock)
        """When captures may run, and what they cost; an ``AutoPlan`` may share it."""
        self._least = least
        self._horizon = horizon

    def step_started(self, key: DispatchKey) -> None:
        """Say that a step for ``key`` starts; the predictor observes it."""
        self.predictor.observe(key)
        self.pauses.step_started()

    def step_ended(self) -> None:
        """Say that a step has ended, by an error too. Raises ``ConfigError`` if none was running."""
        self.pauses.step_ended()

    def record_capture(self, latency: float) -> None:
        """Say that a capture took ``latency`` milliseconds, planned here or not."""
        self.pauses.record_capture(latency)

    def plan(self, ready: Collection[int], capacity: int | None = None) -> list[int]:
        """The sizes to capture now, most urgent first; empty in a burst, without budget, or with nothing to expect.

        ``ready`` are the sizes that have graphs, ``capacity`` is how many can be kept. Beyond that, a size is planned
        only if it is likely, and twice as likely as the least likely graph, which should make room for it. Capture one,
        call ``record_capture``, and ask again: the pause may be over.
        """
        count = self.pauses.captures_allowed()
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

    def capture_one(self, target: _Target, capacity: int | None = None) -> int | None:
        """In a pause, have ``target`` capture the size that ``plan`` finds most urgent; returns it, or None.

        Call it whenever there is nothing to serve: outside of pauses, and without budget, it does nothing. A size that
        cannot be captured costs its time, and the next one is tried while the budget lasts.
        """
        for size in self.plan(target.captured_sizes, capacity):
            if self.pauses.capture(target.capture_size, size):
                return size
        return None
