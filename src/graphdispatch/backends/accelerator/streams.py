"""Streams and events of a device: thin wrappers of ``torch.Stream`` and ``torch.Event``."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...errors import BackendError
from ..base import Event, Stream

__all__ = ["DeviceEvent", "DeviceStream"]


class DeviceStream(Stream):
    """A stream of a device. It equals every other wrapper of the same stream.

    A device may report an error of its work in any later call, not only in ``synchronize``.
    """

    def __init__(self, stream: Any) -> None:
        self.native = stream

    @staticmethod
    def checked(stream: Stream) -> "DeviceStream":
        """The stream itself; raises ``BackendError`` for one that is no stream of a device."""
        if not isinstance(stream, DeviceStream):
            raise BackendError(f"stream must come from this backend, got {stream!r}; make one with its make_stream()")
        return stream

    def entered(self) -> AbstractContextManager[object]:
        """A block in which this stream is current."""
        own = self.native
        # A new object, since torch keeps in it which stream was current before: two threads would mix that up.
        return torch.Stream(stream_id=own.stream_id, device_index=own.device_index, device_type=own.device_type)

    def submit(self, work: Callable[[], None]) -> None:
        """Call ``work`` now, with this stream current. What it launches is queued."""
        with self.entered():
            work()

    def wait_stream(self, other: Stream) -> None:
        """Make later work of this stream begin after all work given to ``other`` so far."""
        self.native.wait_stream(self.checked(other).native)

    def synchronize(self) -> None:
        """Block until the queue is empty."""
        self.native.synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceStream) and bool(self.native == other.native)

    def __hash__(self) -> int:
        return hash(self.native)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.native.device} {self.native.stream_id:#x}>"


class DeviceEvent(Event):
    """An event of one device.

    Args:
        event: Torch's event.
        current: Returns the device's current stream.
    """

    def __init__(self, event: Any, current: Callable[[], Stream]) -> None:
        self._native = event
        self._current = current

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of all work given to ``stream`` (default: the device's current one) so far."""
        self._native.record(self._target(stream))

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work of ``stream`` (default: the device's current one) begin after the mark."""
        self._native.wait(self._target(stream))

    def query(self) -> bool:
        """Whether the work before the mark is done. True for an event that was never recorded."""
        return bool(self._native.query())

    def synchronize(self) -> None:
        """Block the calling thread until the work before the mark is done."""
        self._native.synchronize()

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds of device time from this mark to ``end``. Both were made with ``timing=True``, and are done."""
        assert isinstance(end, DeviceEvent)
        return float(self._native.elapsed_time(end._native))

    def _target(self, stream: Stream | None) -> Any:
        return DeviceStream.checked(self._current() if stream is None else stream).native
