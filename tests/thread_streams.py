"""A CPU backend whose streams are threads with FIFO queues, so that faults of order show without a GPU.

It is also a backend as another package may bring it: its streams, events and pools are its own.

Note [failures on a stream]
    When a piece of work raises, its stream has *failed*. The stream keeps the exception and skips the work behind it,
    because that work relies on the first one. It still reaches the marks behind it, so that nobody waits forever, but
    these marks carry the exception. A stream that waits for such a mark fails too; a thread that waits for it gets
    the exception. ``synchronize`` and ``close`` raise the kept exception once. After that the stream works again.

Note [inside a stream's own thread]
    While a piece of work runs, the rest of its stream's queue waits. Whatever the work asks of its own stream happens
    immediately: ``submit`` calls the new work, ``record`` marks at once, and ``synchronize`` does not wait. The
    stream never waits for a mark that is still in its own queue.
"""

import contextlib
import contextvars
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from graphdispatch import Reason
from graphdispatch.backends import available_backends, register_backend
from graphdispatch.backends.base import Event, Pool, Stream
from graphdispatch.backends.cpu.backend import CPUBackend, InlineStream
from graphdispatch.backends.cpu.graph import CPUPool
from graphdispatch.errors import BackendError, CaptureError

__all__ = ["ThreadBackend"]

Job = Callable[[], None]
"""A piece of work on a stream."""


class Mark:
    """One point in a stream's order. It is reached once and stays reached."""

    __slots__ = ("done", "error", "owner", "time")

    def __init__(self, owner: "ThreadStream | None" = None) -> None:
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
        self.done.wait()
        if self.error is not None:
            raise self.error


class DefaultStream(InlineStream):
    """The default stream: work runs at once on the calling thread. Waiting for another stream blocks that thread."""

    def __init__(self, backend: "ThreadBackend") -> None:
        super().__init__(backend, contextlib.nullcontext())
        self.backend = backend

    def wait_stream(self, other: Stream) -> None:
        """Make later work begin after all work given to ``other`` so far. Raise its failure."""
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


class ThreadStream(DefaultStream):
    """A daemon thread that runs the submitted work in order.

    Work runs with this stream current, under the submitting thread's context variables, gradient mode, inference mode,
    CPU autocast and dispatch modes. Note [failures on a stream] says what happens when work raises, and Note [inside a
    stream's own thread] what happens when work uses its own stream. Any thread may call any method. The thread ends
    with ``close``, or when nobody holds the stream and its queue is empty.
    """

    def __init__(self, backend: "ThreadBackend") -> None:
        super().__init__(backend)
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._order = threading.Lock()
        self._closed = False
        self._error: BaseException | None = None
        # The thread holds only the queue, so that a stream that nobody holds is collected and its thread ends.
        self._thread = threading.Thread(target=_serve, args=(self._queue,), daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, self._queue.put, None)

    def is_own_thread(self) -> bool:
        """Whether the caller is a piece of work of this stream."""
        return threading.current_thread() is self._thread

    def submit(self, work: Job) -> None:
        """Put ``work`` at the end of the queue. If this stream's own work calls this, run ``work`` now.

        Raises ``BackendError`` after ``close`` and ``CaptureError`` inside a capture.
        """
        if self.backend.is_capturing():
            raise CaptureError(
                f"work was submitted to {self!r} inside a capture, but that stream's thread is not recorded; "
                "run the work on the stream that the capture began on",
                Reason.CAPTURE_UNSAFE,
            )
        if self.is_own_thread():
            super().submit(work)
        else:
            self._enqueue(partial(self._run, _with_callers_modes(work)))

    def mark(self) -> Mark:
        """A mark behind all work given so far."""
        if self.is_own_thread():
            return super().mark()
        mark = Mark(self)
        self._enqueue(lambda: mark.reach(self._error))
        return mark

    def end(self) -> Mark:
        """A ``mark`` for order only: it carries no failure, and also works on a closed stream."""
        if not self.is_own_thread():
            mark = Mark(self)
            with self._order:
                if not self._closed:
                    self._queue.put(partial(mark.reach, None))
                    return mark
            self._thread.join()
        return super().mark()

    def after(self, mark: Mark) -> None:
        """Make later work begin after ``mark``. The call blocks only this stream's own work."""
        if mark.owner is self:
            return
        if self.is_own_thread():
            mark.join()
        else:
            self._enqueue(partial(self._hold, mark))

    def synchronize(self) -> None:
        """Block until all work given so far is done. If a piece of it raised, raise its error, once."""
        if self.is_own_thread():
            return
        self.end().join()
        self._raise_kept()

    def close(self) -> None:
        """Finish the queue and end the thread; idempotent. Raise an error of the work that nobody has got yet."""
        with self._order:
            self._closed = True
            self._stop()
        if not self.is_own_thread():
            self._thread.join()
            self._raise_kept()

    def _enqueue(self, job: Job) -> None:
        with self._order:
            if self._closed:
                raise BackendError(f"{self!r} takes no work after close(); make another with make_stream()")
            self._queue.put(job)

    def _run(self, work: Job) -> None:
        if self._error is not None:
            return
        try:
            super().submit(work)
        except BaseException as error:  # SystemExit too: if the thread ended here, no later mark would be reached
            self._error = error

    def _hold(self, mark: Mark) -> None:
        mark.done.wait()
        if self._error is None:
            self._error = mark.error

    def _raise_kept(self) -> None:
        with self._order:
            error, self._error = self._error, None
        if error is not None:
            raise error


def _with_callers_modes(work: Job) -> Job:
    """Wrap ``work`` so that another thread can call it as if it ran on this thread.

    It runs under this thread's gradient mode, inference mode, CPU autocast, context variables and dispatch modes. A
    mode that watches this thread's operators (what a call writes, what a break makes) thus sees those of ``work``.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu")
    watchers = _get_current_dispatch_mode_stack()
    context = contextvars.copy_context()

    def call() -> None:
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.inference_mode(inference))
            modes.enter_context(torch.set_grad_enabled(grad))
            if autocast:
                modes.enter_context(torch.autocast("cpu", dtype=dtype))
            for watcher in watchers:
                # The mode's own __enter__ keeps what it must restore in the mode itself, where threads would mix it up.
                _push_mode(watcher)
                modes.callback(_pop_mode, getattr(watcher, "_mode_key", None))
            context.run(work)

    return call


def _serve(queue: "SimpleQueue[Job | None]") -> None:
    """Run the jobs of a queue until a job is None. Jobs never raise."""
    while (job := queue.get()) is not None:
        job()
        del job  # the job holds the stream, which would otherwise live until the next job comes


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
        """A new stream; its thread starts now."""
        return ThreadStream(self)

    def make_event(self, *, timing: bool = False) -> Event:
        """A new event, which knows its time in any case."""
        return ThreadEvent(self)

    def make_pool(self) -> Pool:
        """A new, empty pool."""
        return ThreadPool(self)


if ThreadBackend.name not in available_backends():
    register_backend(ThreadBackend.name, lambda: ThreadBackend)


class ThreadEvent(Event):
    """A mark that can be set again. A wait refers to the mark that was set last before the wait.

    A wait on the default stream, which has no queue, blocks the caller.
    """

    def __init__(self, backend: ThreadBackend) -> None:
        self._backend = backend
        self._mark = Mark()
        self._mark.done.set()

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of all work given so far."""
        self._mark = _checked(stream or self._backend.current_stream()).mark()

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work begin after the mark."""
        _checked(stream or self._backend.current_stream()).after(self._mark)

    def query(self) -> bool:
        """Whether the mark is reached."""
        return self._mark.done.is_set()

    def synchronize(self) -> None:
        """Block until the mark is reached."""
        self._mark.join()

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds between two marks that are reached."""
        assert isinstance(end, ThreadEvent)
        return (end._mark.time - self._mark.time) * 1e3


def _checked(stream: Stream) -> DefaultStream:
    assert isinstance(stream, DefaultStream), f"a stream of another backend: {stream!r}"
    return stream
