"""Streams and events of the CPU backend. Work runs at once on the calling thread, so no stream has a queue."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

from ...errors import BackendError
from ...forking import make_rlock
from ..base import Event, Stream

__all__ = ["CPUStreams", "InlineStream"]


class InlineStream(Stream):
    """A stream whose work runs at once on the thread that submits it, which gets what the work raises.

    Of work that several threads submit, one piece runs at a time. The default stream is an exception, since it stands
    for the default streams of all threads.
    """

    def __init__(self, streams: "CPUStreams", lock: AbstractContextManager[object]) -> None:
        self._streams = streams
        self._lock = lock

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` now, with this stream current."""
        with self._lock, self._streams.use_stream(self):
            work()

    def wait_stream(self, other: Stream) -> None:
        """Block until other threads' work on ``other`` is done."""
        checked(other).synchronize()

    def synchronize(self) -> None:
        """Block until other threads' work on this stream is done."""
        with self._lock:
            pass

    def close(self) -> None:
        """Block as ``synchronize`` does; there is nothing to release."""
        self.synchronize()


class _Here(threading.local):
    """What is current on the calling thread; each thread begins on the default stream."""

    def __init__(self, default: InlineStream) -> None:
        self.stream = default
        self.is_capturing = False
        """Whether the thread's work is being recorded."""


class CPUStreams:
    """The part of the CPU backend that makes streams and knows each thread's current one; at first ``default``."""

    def __init__(self) -> None:
        self.default = InlineStream(self, nullcontext())
        self.here = _Here(self.default)

    def current_stream(self) -> InlineStream:
        """The calling thread's current stream."""
        return self.here.stream

    @contextlib.contextmanager
    def use_stream(self, stream: Stream) -> Iterator[Stream]:
        """Make ``stream`` the calling thread's current stream within a ``with`` block. Blocks may nest."""
        before = self.here.stream
        self.here.stream = checked(stream)
        try:
            yield stream
        finally:
            self.here.stream = before

    def make_stream(self) -> InlineStream:
        """A new stream."""
        return InlineStream(self, make_rlock())

    def make_event(self, *, timing: bool = False) -> Event:
        """A new event."""
        return _CPUEvent(self)


class _CPUEvent(Event):
    """A point in time. Work that was given before it is done, so nobody ever waits for it."""

    def __init__(self, streams: CPUStreams) -> None:
        self._streams = streams
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        checked(stream or self._streams.current_stream()).synchronize()
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing: the work before the mark is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: the work before the mark is done."""

    def elapsed_ms(self, end: Event) -> float:
        assert isinstance(end, _CPUEvent)
        return (end._time - self._time) * 1e3


def checked(stream: Stream) -> InlineStream:
    """The stream itself; raises ``BackendError`` for one of another backend."""
    if not isinstance(stream, InlineStream):
        raise BackendError(f"stream must come from the CPU backend, got {stream!r}; make one with its make_stream()")
    return stream
