"""``Pauses``: when there is time to capture graphs, and how much of the time captures may take."""

import time
from collections.abc import Callable

from ..copying import Unlocked
from ..errors import ConfigError
from ..forking import make_lock

__all__ = ["Pauses"]

_INTERVAL_SHARE = 0.05  # what the latest interval counts in the usual interval between steps
_LEAST_INTERVAL_MS = 1.0
_INTERVALS_IN_PAUSE = 4
_COST_SHARE = 0.25  # what the latest capture counts in the expected cost of one


class Pauses(Unlocked):
    """Finds the pauses between steps that are long enough for a capture, and limits what captures take of the time.

    A pause counts once it has lasted as long as a capture is expected to take, and four times as long as the usual
    interval between steps. What has lasted tends to last; at worst a step waits as long again as the pause was.
    Captures take at most the share ``budget`` of the time since the start, and ``allowance_ms`` besides for the start.
    ``capture_ms`` is the expected cost of a capture before the first one was measured. ``clock`` gives seconds.

    One object may be shared by a ``Prewarmer`` and an ``AutoPlan``, which then share the budget. Thread-safe.
    """

    def __init__(
        self,
        *,
        budget: float = 0.02,
        allowance_ms: float = 1000.0,
        capture_ms: float = 100.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= budget <= 1:
            raise ConfigError(f"budget must be a share from 0 to 1, got {budget!r}")
        for name, value in (("allowance_ms", allowance_ms), ("capture_ms", capture_ms)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} must be a finite number of milliseconds >= 0, got {value!r}")
        self.capture_ms = capture_ms
        """What a capture is expected to cost, in milliseconds."""
        self.spent_ms = 0.0
        """What captures have cost so far, in milliseconds."""
        self._budget = budget
        self._allowance_ms = allowance_ms
        self._clock = clock
        self._lock = make_lock()
        self._start = clock()
        self._running = 0
        self._last_end: float | None = None
        self._interval_ms = 0.0

    def step_started(self) -> None:
        """Say that a step starts."""
        now = self._clock()
        with self._lock:
            if not self._running and self._last_end is not None:
                interval = max(0.0, 1000 * (now - self._last_end))
                # A pause is no usual interval, so that it counts for little.
                most = 2 * self._interval_ms + _LEAST_INTERVAL_MS
                self._interval_ms += _INTERVAL_SHARE * (min(interval, most) - self._interval_ms)
            self._running += 1

    def step_ended(self) -> None:
        """Say that a step has ended, by an error too. Raises ``ConfigError`` if none was running."""
        now = self._clock()
        with self._lock:
            if not self._running:
                raise ConfigError("step_ended() must follow step_started(), got one call too many")
            self._running -= 1
            self._last_end = now

    def captures_allowed(self) -> int:
        """How many captures the pause and the budget allow now; 0 in a burst, while a step runs and before any."""
        now = self._clock()
        with self._lock:
            if self._running or self._last_end is None:
                return 0
            pause = 1000 * (now - self._last_end)
            if pause < max(self.capture_ms, _INTERVALS_IN_PAUSE * self._interval_ms):
                return 0
            left = self._allowance_ms + 1000 * self._budget * (now - self._start) - self.spent_ms
            return max(0, int(left // max(self.capture_ms, 1e-3)))

    def capture(self, capture_size: Callable[[int], bool], size: int) -> bool:
        """Return ``capture_size(size)``, and count the time that it takes."""
        begun = self._clock()
        try:
            return capture_size(size)
        finally:
            self.record_capture(1000 * max(0.0, self._clock() - begun))

    def record_capture(self, latency: float) -> None:
        """Say that a capture took ``latency`` milliseconds."""
        if not 0 <= latency < float("inf"):
            raise ConfigError(f"latency must be a finite number of milliseconds >= 0, got {latency!r}")
        with self._lock:
            self.capture_ms += _COST_SHARE * (latency - self.capture_ms)
            self.spent_ms += latency

    def __repr__(self) -> str:
        return f"<Pauses, captures took {self.spent_ms:.0f} ms, the next is expected to take {self.capture_ms:.0f} ms>"
