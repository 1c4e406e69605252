"""Streams and events of the CPU backend: the default stream, each thread's current one, and marks in their order."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ...errors import BackendError
from ..base import Event, Stream

if TYPE_CHECKING:
    from .threads import CPUStream

__all__ = ["CPUStreams", "InlineStream", "Job", "Mark"]

Job = Callable[[], None]
"""A piece of work on a stream."""


class Mark:
    """One point in a stream's order. It is reached once and stays reached."""

    __slots__ = ("done", "error", "owner", "time")

    def __init__(self, owner: "CPUStream | None" = None) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.time = 0.0
        self.owner = owner

    def reach(self, error: BaseException | None) -> None:
        """Note that the stream has come to this point; ``error`` is its failure before this point, if any."""
        self.time = time.perf_counter()
        self.error = error
        self.done.set()

    def join(self) -> None:
        """Block the calling thread until the mark is reached. Raise the failure that the mark carries."""
        if not self.done.is_set() and self.owner is not None and self.owner.is_own_thread():
            raise BackendError(
                f"work on {self.owner!r} waits for a mark behind itself in the same queue, which it can never reach; "
                "wait from another thread or stream"
            )
        if not self.done.is_set():
            if self.owner is not None and self.owner.is_lost:
                raise BackendError(
                    f"{self.owner!r} has no thread in this process, which was forked while its work was under way; "
                    "wait for it before the fork, or in the parent"
                )
            self.done.wait()
        if self.error is not None:
            raise self.error


class InlineStream(Stream):
    """The default stream: work runs at once on the calling thread, so there is never a queue.

    ``submit`` raises what the work raises. Waiting for another stream blocks the calling thread.
    """

    def __init__(self, streams: "CPUStreams") -> None:
        self._streams = streams

    def submit(self, work: Job) -> None:
        """Run ``work`` now, with this stream current."""
        with self._streams.use_stream(self):
            work()

    def wait_stream(self, other: Stream) -> None:
        """Block until all work given to ``other`` so far is done. Raise its failure."""
        self.after(_checked(other).mark())

    def mark(self) -> Mark:
        """A mark that is already reached."""
        mark = Mark()
        mark.reach(None)
        return mark

    def end(self) -> Mark:
        """A ``mark`` for order only, without a failure."""
        return self.mark()

    def after(self, mark: Mark) -> None:
        """Block until ``mark`` is reached. Raise the failure that the mark carries."""
        mark.join()

    def synchronize(self) -> None:
        """Do nothing: no work can be outstanding here."""

    def close(self) -> None:
        """Do nothing: the default stream stays open."""

    def __repr__(self) -> str:
        return "<InlineStream default>"


class _Here(threading.local):
    """What is current on the calling thread; each thread begins on the default stream."""

    def __init__(self, default: InlineStream) -> None:
        self.stream = default
        self.is_capturing = False
        """Whether the thread's work is being recorded."""


class CPUStreams:
    """The part of the CPU backend that makes streams and knows each thread's current one; at first ``default``."""

    def __init__(self) -> None:
        self.default = InlineStream(self)
        self.here = _Here(self.default)
        self._numbers = itertools.count(1)

    def current_stream(self) -> InlineStream:
        """The calling thread's current stream."""
        return self.here.stream

    @contextlib.contextmanager
    def use_stream(self, stream: Stream) -> Iterator[Stream]:
        """Make ``stream`` the calling thread's current stream within a ``with`` block. Blocks may nest.

        Work that is *submitted* in the block, such as a replay, goes to the stream. Operators that the calling thread
        itself runs in the block run at once on that thread, since a CPU operator cannot be queued.
        """
        before = self.here.stream
        self.here.stream = _checked(stream)
        try:
            yield stream
        finally:
            self.here.stream = before

    def make_stream(self, name: str | None = None) -> "CPUStream":
        """A new stream; its thread starts now."""
        from .threads import CPUStream

        return CPUStream(self, name if name is not None else f"stream-{next(self._numbers)}")

    def make_event(self, *, timing: bool = False) -> Event:
        """A new event; ``timing`` allows ``elapsed_ms``."""
        return _CPUEvent(self.here, timing)


class _CPUEvent(Event):
    """A mark that can be set again. A wait refers to the mark that was set last before the wait.

    A wait on the default stream, which has no queue, blocks the caller.
    """

    def __init__(self, here: _Here, timing: bool) -> None:
        self._here = here
        self._timing = timing
        self._mark = Mark()
        self._mark.done.set()

    def record(self, stream: Stream | None = None) -> None:
        self._mark = _checked(stream or self._here.stream).mark()

    def wait(self, stream: Stream | None = None) -> None:
        _checked(stream or self._here.stream).after(self._mark)

    def query(self) -> bool:
        return self._mark.done.is_set()

    def synchronize(self) -> None:
        self._mark.join()

    def elapsed_ms(self, end: Event) -> float:
        return (_timestamp(end, "end") - _timestamp(self, "start")) * 1e3


def _checked(stream: Stream) -> InlineStream:
    if not isinstance(stream, InlineStream):
        raise BackendError(f"stream must come from the CPU backend, got {stream!r}; make one with its make_stream()")
    return stream


def _timestamp(event: Event, name: str) -> float:
    """Seconds at which ``event`` was reached."""
    if not isinstance(event, _CPUEvent):
        raise BackendError(f"{name} must be an event of the CPU backend, got {event!r}")
    if not event._timing:
        raise BackendError(f"{name} keeps no time; make it with make_event(timing=True)")
    if not (event._mark.time and event._mark.done.is_set()):
        raise BackendError(f"{name} is not reached yet; record it, then wait for it with query() or synchronize()")
    return event._mark.time
