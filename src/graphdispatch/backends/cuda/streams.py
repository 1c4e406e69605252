"""Streams and events of the CUDA backend: thin wrappers of ``torch.cuda.Stream`` and ``torch.cuda.Event``."""

from collections.abc import Callable

import torch

from ...errors import BackendError
from ..base import Event, Stream

__all__ = ["CUDAEvent", "CUDAStream", "native"]


class CUDAStream(Stream):
    """A CUDA stream. It equals every other wrapper of the same stream.

    CUDA may report an error of work on the device in any later call, not only in ``synchronize``.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.native = stream

    def submit(self, work: Callable[[], None]) -> None:
        """Call ``work`` now, with this stream current. What it launches is queued."""
        with torch.cuda.stream(self.native):
            work()

    def wait_stream(self, other: Stream) -> None:
        """Make later work of this stream begin after all work given to ``other`` so far."""
        self.native.wait_stream(native(other))

    def synchronize(self) -> None:
        """Block until the queue is empty."""
        self.native.synchronize()

    def close(self) -> None:
        """Finish the queue. There is nothing to release, since torch keeps its streams in a pool of its own."""
        self.native.synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CUDAStream) and bool(self.native == other.native)

    def __hash__(self) -> int:
        return hash(self.native)

    def __repr__(self) -> str:
        return f"<CUDAStream {self.native.device} {self.native.cuda_stream:#x}>"


class CUDAEvent(Event):
    """A CUDA event of one device."""

    def __init__(self, device: torch.device, *, timing: bool = False) -> None:
        self._device = device
        self._native = torch.cuda.Event(enable_timing=timing)

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
        assert isinstance(end, CUDAEvent)
        return float(self._native.elapsed_time(end._native))

    def _target(self, stream: Stream | None) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if stream is None else native(stream)


def native(stream: Stream) -> torch.cuda.Stream:
    """The torch stream behind ``stream``; raises ``BackendError`` for one of another backend."""
    if not isinstance(stream, CUDAStream):
        raise BackendError(f"stream must come from the CUDA backend, got {stream!r}; make one with its make_stream()")
    return stream.native
