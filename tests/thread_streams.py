"""A CPU backend whose streams are threads with FIFO queues, so that faults of order show without a GPU.

It is also a backend as another package may bring it: its streams, events and pools are its own.

Note [failures on a stream]
    When a piece of work raises, its stream has *failed*. The stream keeps the exception and skips the work behind it,
    because that work relies on the first one. It still reaches the marks behind it, so that nobody waits forever, but
    these marks carry the exception. A stream that waits for such a mark fails too; a thread that waits for it gets
    the exception. ``synchronize`` and ``close`` raise the kept exception once. After that the stream works again.

Note [inside a stream's own thread]
    While a piece of work runs, the rest of its stream's queue waits. If the work asks its own stream, ``record`` marks
    at once, and ``synchronize`` does not wait.
"""

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from graphdispatch.backends import available_backends, register_backend
from graphdispatch.backends.base import Event, Pool, Stream
from graphdispatch.backends.cpu.backend import CPUBackend, CPUPool, InlineStream
from graphdispatch.copying import NotCopied
from graphdispatch.errors import BackendError

__all__ = ["ThreadBackend"]

Job = Callable[[], None]
"""A piece of work on a stream."""
Mark = Future[float]
"""A point on a stream: the time at which the stream came there, or the failure that it had before."""


class DefaultStream(InlineStream):
    """The default stream: work runs at once on the calling thread. Waiting for another stream blocks that thread."""

    def __init__(self, backend: "ThreadBackend") -> None:
        self.backend = backend

    def wait_stream(self, other: Stream) -> None:
        """Make later work begin after all work given to ``other`` so far. Raise its failure."""
        self.after(_checked(other).mark())

    def submit(self, work: Job) -> None:
        """Run ``work`` now, with this stream current."""
        with self.backend.use_stream(self):
            work()

    def mark(self) -> Mark:
        """A mark that is already reached."""
        mark = Mark()
        mark.set_result(time.perf_counter())
        return mark

    def end(self) -> Mark:
        """A ``mark`` for order only, without a failure."""
        return self.mark()

    def after(self, mark: Mark) -> None:
        """Block until ``mark`` is reached. Raise the failure that the mark carries."""
        mark.result()


class ThreadStream(DefaultStream):
    """A thread that runs the submitted work in order, and ends with ``close`` or when nobody holds the stream.

    Work runs with this stream current, under the submitting thread's context variables, gradient mode, inference mode
    and CPU autocast. Note [failures on a stream] says what happens when work raises, and Note [inside a
    stream's own thread] what happens when work uses its own stream. Any thread may call any method.
    """

    def __init__(self, backend: "ThreadBackend") -> None:
        super().__init__(backend)
        self._threads = ThreadPoolExecutor(1)
        self._error: BaseException | None = None

    def is_own_thread(self) -> bool:
        """Whether the caller is a piece of work of this stream."""
        return threading.current_thread() in self._threads._threads

    def submit(self, work: Job) -> None:
        """Put ``work`` at the end of the queue."""
        self._enqueue(partial(self._run, _with_callers_modes(work)))

    def mark(self) -> Mark:
        """A mark behind all work given so far."""
        return super().mark() if self.is_own_thread() else self._enqueue(self._reach)

    def end(self) -> Mark:
        """A ``mark`` for order only: it carries no failure, and also works on a closed stream."""
        if not self.is_own_thread():
            with contextlib.suppress(BackendError):
                return self._enqueue(time.perf_counter)
            self._threads.shutdown()
        return super().mark()

    def after(self, mark: Mark) -> None:
        """Make later work begin after ``mark``. The call blocks only this stream's own work."""
        if self.is_own_thread():
            super().after(mark)
        else:
            self._enqueue(partial(self._hold, mark))

    def synchronize(self) -> None:
        """Block until all work given so far is done. If a piece of it raised, raise its error, once."""
        if not self.is_own_thread():
            self.end().result()
            self._raise_kept()

    def close(self) -> None:
        """Finish the queue and end the thread; idempotent. Raise an error of the work that nobody has got yet."""
        is_own = self.is_own_thread()
        self._threads.shutdown(wait=not is_own)
        if not is_own:
            self._raise_kept()

    def _enqueue(self, job: Callable[[], Any]) -> Future[Any]:
        try:
            return self._threads.submit(job)
        except RuntimeError as error:
            raise BackendError(f"{self!r} takes no work after close(); make another with make_stream()") from error

    def _run(self, work: Job) -> None:
        if self._error is None:
            try:
                super().submit(work)
            except BaseException as error:  # whatever it is, the marks behind it are reached
                self._error = error

    def _reach(self) -> float:
        if self._error is not None:
            raise self._error
        return time.perf_counter()

    def _hold(self, mark: Mark) -> None:
        failed = mark.exception()
        self._error = self._error or failed

    def _raise_kept(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _with_callers_modes(work: Job) -> Job:
    """Wrap ``work`` so that another thread can call it as if it ran on this thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = {"dtype": torch.get_autocast_dtype("cpu"), "enabled": torch.is_autocast_enabled("cpu")}
    context = contextvars.copy_context()

    def call() -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.autocast("cpu", **autocast):
            context.run(work)

    return call


class ThreadPool(CPUPool):
    """Arenas of host memory that the work of several streams uses in turn."""

    def __init__(self, backend: "ThreadBackend") -> None:
        super().__init__()
        self._backend = backend
        self._last_stream = backend.default

    def order_after_last_use(self) -> None:
        """Order the calling thread's current stream after the stream that last used the pool.

        A failure on that last stream is reported there, not here. The calling thread itself copies inputs and outputs
        and replays, so it also waits until its current stream is done, and gets the error that this stream keeps.
        """
        current = _checked(self._backend.current_stream())
        if current is not self._last_stream:
            current.after(self._last_stream.end())
            self._last_stream = current
        current.synchronize()


class ThreadBackend(CPUBackend):
    """The CPU backend with a thread for each stream other than the default one."""

    name = "threads"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.default = self.here.stream = DefaultStream(self)

    def current_stream(self) -> DefaultStream:
        """The calling thread's current stream."""
        stream = self.here.stream
        return stream if isinstance(stream, DefaultStream) else self.default

    def make_stream(self) -> ThreadStream:
        """A new stream."""
        return ThreadStream(self)

    def make_event(self, *, timing: bool = False) -> Event:
        """A new event, which knows its time in any case."""
        return ThreadEvent(self)

    def make_pool(self) -> Pool:
        """A new, empty pool."""
        return ThreadPool(self)


if ThreadBackend.name not in available_backends():
    register_backend(ThreadBackend.name, lambda: ThreadBackend)


class ThreadEvent(NotCopied):
    """A mark that can be set again. A wait refers to the mark that was set last before the wait.

    A wait on the default stream, which has no queue, blocks the caller.
    """

    def __init__(self, backend: ThreadBackend) -> None:
        self._backend = backend
        self._mark = backend.default.mark()

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of all work given so far."""
        self._mark = _checked(stream or self._backend.current_stream()).mark()

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work begin after the mark."""
        _checked(stream or self._backend.current_stream()).after(self._mark)

    def query(self) -> bool:
        """Whether the mark is reached."""
        return self._mark.done()

    def synchronize(self) -> None:
        """Block until the mark is reached."""
        self._mark.result()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two marks that are reached."""
        assert isinstance(end, ThreadEvent)
        return (end._mark.result() - self._mark.result()) * 1e3


def _checked(stream: Stream) -> DefaultStream:
    assert isinstance(stream, DefaultStream), f"a stream of another backend: {stream!r}"
    return stream
