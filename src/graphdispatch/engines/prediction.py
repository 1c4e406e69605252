"""Predictive selection: which sizes come next, and their captures in pauses, before steps need them."""

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence

import numpy as np

from ..copying import Unlocked, make_lock
from ..descriptors import DispatchKey
from ..errors import ConfigError, check_count
from ..sizes import check_sizes


class SizePredictor(Unlocked):
    """Forecasts padded sizes from the sequence of keys so far. Thread-safe.

    It counts what followed each size. After a size that seldom came, it expects what came most often. It takes 8 bytes
    times the square of the number of sizes.

    Args:
        sizes: The capture sizes, in increasing order. A batch above the largest is observed, but never forecast.
        memory: About so many of the latest observations of each size count.

    Raises:
        ConfigError: If an argument is wrong.
    """

    def __init__(self, sizes: Sequence[int], memory: int = 2000) -> None:
        self.sizes = check_sizes(sizes, "sizes")
        check_count("memory", memory)
        self._lock, self._keep = make_lock(), 1 - 1 / memory
        self._last = len(self.sizes)
        self._follows = np.zeros((len(self.sizes) + 1, len(self.sizes) + 1))

    def observe(self, key: DispatchKey) -> None:
        """Take in the key of the step that comes next.

        Args:
            key: The key; its number of tokens counts.
        """
        now = bisect_left(self.sizes, key.num_tokens)
        with self._lock:
            self._follows[self._last] *= self._keep
            self._follows[self._last, now] += 1
            self._last = now

    def forecast(self, horizon: int = 1) -> list[tuple[int, float]]:
        """All sizes, the likeliest first; before the first observation all are equally likely.

        Args:
            horizon: The number of steps to look ahead.

        Returns:
            Each size with the probability that one of the next ``horizon`` steps needs it. Over several steps that is
                an upper estimate, which takes the steps for independent.

        Raises:
            ConfigError: ``horizon`` is no positive integer.
        """
        check_count("horizon", horizon)
        with self._lock:
            often = self._follows.sum(0) + 1e-3
            moves = self._follows + 4 * often / often.sum()  # from 5 observations, a size's own habit counts more
            now = np.eye(len(often))[self._last]
        moves /= moves.sum(1, keepdims=True)
        missed = np.ones_like(now)
        for _ in range(horizon):
            now = now @ moves
            missed *= 1 - now
        best = np.argsort(missed[:-1], kind="stable")
        return [(self.sizes[index], float(1 - missed[index])) for index in best]


class Prewarmer:
    """Captures the sizes that are forecast in pauses, before steps need them. Thread-safe.

    Captures when it is called, and starts no thread. A pause counts once it has lasted as long as a capture is expected
    to take: what has lasted tends to last.

    Args:
        predictor: What forecasts the sizes.
        budget: The share of the time since the start that captures may take.
        allowance_ms: Milliseconds that they may take besides.
        least: The probability from which a size is worth a capture.
        horizon: Within how many steps it must be needed.
        clock: Gives seconds.

    Attributes:
        capture_ms: The time that a capture is expected to take, in milliseconds; it is learnt from those made.
        spent_ms: The time that all captures took, in milliseconds.

    Raises:
        ConfigError: An argument is wrong.
    """

    def __init__(
        self,
        predictor: SizePredictor,
        *,
        budget: float = 0.02,
        allowance_ms: float = 1000.0,
        least: float = 0.02,
        horizon: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (budget >= 0 and allowance_ms >= 0 and least >= 0):
            raise ConfigError(f"budget, allowance_ms and least must be >= 0, got {budget}, {allowance_ms} and {least}")
        self.predictor, self._least, self._horizon = predictor, least, horizon
        self._budget, self._allowance_ms = budget, allowance_ms
        self._clock, self._lock, self._start = clock, make_lock(), clock()
        self._running, self._paused_at = 0, float("inf")
        self.capture_ms, self.spent_ms = 100.0, 0.0

    def step_started(self, key: DispatchKey) -> None:
        """Note that a step starts; the predictor observes its key.

        Args:
            key: The key of the step.
        """
        self.predictor.observe(key)
        with self._lock:
            self._running += 1

    def step_ended(self) -> None:
        """Note that a step has ended, by an error too.

        Raises:
            ConfigError: No step was running.
        """
        with self._lock:
            if not self._running:
                raise ConfigError("step_ended() must follow step_started(), got one call too many")
            self._running, self._paused_at = self._running - 1, self._clock()

    def capture_one(self, captured: Collection[int], capture: Callable[[int], object]) -> int | None:
        """Capture the likeliest size that has no graph, if this is a pause. Call it whenever there is nothing to serve.

        A size that cannot be captured costs its time, and the next one is tried while the budget lasts.

        Args:
            captured: The sizes that have a graph: ``captured_sizes`` of what captures.
            capture: Captures one, and returns something true if it has a graph then: ``lambda n:
                serve.prewarm(example, sizes=[n]).captured``, or a call of ``prewarm`` of a dispatcher or an adaptive
                wrapper. What it raises passes through.

        Returns:
            The size that was captured, or None.
        """
        for size, chance in self.predictor.forecast(self._horizon):
            begun = self._clock()
            left_ms = self._allowance_ms + 1000 * self._budget * (begun - self._start) - self.spent_ms
            if self._running or min(1000 * (begun - self._paused_at), left_ms) < self.capture_ms:
                return None
            if size not in captured and chance >= self._least:
                has_graph = capture(size)
                taken_ms = 1000 * (self._clock() - begun)
                with self._lock:
                    self.spent_ms += taken_ms
                    self.capture_ms += (taken_ms - self.capture_ms) / 4
                if has_graph:
                    return size
        return None
