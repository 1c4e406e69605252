"""A scripted graph with fault injection, for people who test their own dispatchers without a device."""

from collections.abc import Callable
from typing import Any

from .errors import CaptureError, ReplayError


class MockCUDAGraph:
    """A scripted graph: counts captures and replays, runs a function on each replay, and fails on request.

    Like a real graph, it refuses a replay before a capture or after a reset.

    Args:
        outputs: What a dispatcher returns after a replay.
        on_replay: Called on each replay.
        fail_capture: ``capture_end`` raises ``CaptureError`` with this error as its cause.
        fail_replay_at: The replay of this number (from 1) raises ``ReplayError``.
    """

    def __init__(
        self,
        outputs: Any = None,
        *,
        on_replay: Callable[[], Any] | None = None,
        fail_capture: BaseException | None = None,
        fail_replay_at: int | None = None,
    ) -> None:
        self.outputs = outputs
        self.captures = 0
        self.replays = 0
        self._on_replay = on_replay
        self._fail_capture = fail_capture
        self._fail_replay_at = fail_replay_at
        self._state = "empty"

    @property
    def is_captured(self) -> bool:
        """Whether the graph can be replayed."""
        return self._state == "captured"

    def capture_begin(self) -> None:
        """Start the capture.

        Raises:
            CaptureError: A capture has already begun or ended.
        """
        if self._state != "empty":
            raise CaptureError(f"this graph is {self._state} already; make a new one for a new capture")
        self._state = "capturing"

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            CaptureError: No capture has begun, or ``fail_capture`` was given.
        """
        if self._state != "capturing":
            raise CaptureError("capture_end without capture_begin")
        if self._fail_capture is not None:
            self._state = "empty"
            raise CaptureError(f"scripted failure: {self._fail_capture}") from self._fail_capture
        self._state = "captured"
        self.captures += 1

    def replay(self) -> None:
        """Run ``on_replay``.

        Raises:
            ReplayError: Nothing is captured, or this is the replay of number ``fail_replay_at``.
        """
        if self._state != "captured":
            raise ReplayError("replay without a capture")
        self.replays += 1
        if self.replays == self._fail_replay_at:
            raise ReplayError(f"scripted failure of replay {self.replays}")
        if self._on_replay is not None:
            self._on_replay()

    def reset(self) -> None:
        """Release the capture; idempotent."""
        self._state = "released"

    def __repr__(self) -> str:
        return f"<MockCUDAGraph {self._state}, {self.replays} replays>"
