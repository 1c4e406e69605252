"""Measures the device time of dispatched steps for a policy, without ever waiting for the device."""

from collections import deque

from ..backends import get_backend
from ..backends.base import Timer
from ..descriptors import DispatchKey
from ..modes import DispatchMode
from .policies import DispatchPolicy

__all__ = ["LatencyMeter"]

_MOST_PENDING = 64  # steps whose time the device has not reported yet; while there are as many, no more are timed
_POLLS = 4  # of them polled at once, in turn: however far the device is behind, a step costs the same


class LatencyMeter:
    """Times steps on the backend's timer and hands each time to ``policy.record`` once the device has it.

    On the CPU backend times are wall time, on CUDA events that a later step polls. A step that raises is not recorded.
    Thread-safe; steps of several threads may be recorded out of order.
    """

    def __init__(self, policy: DispatchPolicy) -> None:
        self._policy = policy
        self._backend = get_backend("auto")
        self._pending: deque[tuple[DispatchKey, DispatchMode, Timer]] = deque()

    def start(self) -> Timer | None:
        """Begin to time a step; None while too many are outstanding."""
        self._collect()
        if len(self._pending) >= _MOST_PENDING:
            return None
        timer = self._backend.make_timer()
        timer.start()
        return timer

    def stop(self, timer: Timer | None, key: DispatchKey, mode: DispatchMode) -> None:
        """End a step that ran in ``mode``."""
        if timer is not None:
            timer.stop()
            self._pending.append((key, mode, timer))
            self._collect()

    def _collect(self) -> None:
        """Record what is known by now."""
        for _ in range(min(len(self._pending), _POLLS)):
            try:
                oldest = self._pending.popleft()
            except IndexError:  # another thread took it
                return
            key, mode, timer = oldest
            elapsed = timer.elapsed_ms()
            if elapsed is None:
                self._pending.append(oldest)
            else:
                self._policy.record(key, mode, elapsed)
