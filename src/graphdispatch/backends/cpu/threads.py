"""Streams that are threads with FIFO queues. Loaded with the first of them.

Note [failures on a stream]
    When a piece of work raises, its stream has *failed*. The stream keeps the exception and skips the work behind it,
    because that work relies on the first one. It still reaches the marks behind it, so that nobody waits forever, but
    these marks carry the exception. A stream that waits for such a mark fails too; a thread that waits for it gets
    the exception. ``synchronize`` and ``close`` raise the kept exception once. After that the stream works again.

Note [inside a stream's own thread]
    While a piece of work runs, the rest of its stream's queue waits. Whatever the work asks of its own stream happens
    immediately: ``submit`` calls the new work, ``record`` marks at once, and ``synchronize`` does not wait. The
    stream never waits for a mark that is still in its own queue. A thread that would block for its own later work
    gets a ``BackendError``.
"""

import contextlib
import contextvars
import threading
import weakref
from functools import partial
from queue import SimpleQueue

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from ...errors import BackendError, CaptureError
from ...forking import make_lock, renew_in_child
from ...reasons import Reason
from .streams import CPUStreams, InlineStream, Job, Mark

__all__ = ["CPUStream"]


class CPUStream(InlineStream):
    """A daemon thread that runs the submitted work in order.

    Work runs with this stream current, under the submitting thread's context variables, gradient mode, inference mode,
    CPU autocast and dispatch modes. Note [failures on a stream] says what happens when work raises, and Note [inside a
    stream's own thread] what happens when work uses its own stream. Any thread may call any method. The thread ends
    with ``close``, or when nobody holds the stream and its queue is empty.
    """

    def __init__(self, streams: CPUStreams, name: str) -> None:
        super().__init__(streams)
        self.name = name
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = make_lock()
        self._closed = False
        self._error: BaseException | None = None
        # The thread holds only the queue, so that a stream that nobody holds is collected and its thread ends.
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=f"graphdispatch-{name}", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, self._queue.put, None)
        self.is_lost = False
        """Whether its thread ended with a fork, so that no work on it is ever done here."""
        renew_in_child(self)

    def after_fork(self) -> None:
        """Take no more work, for want of a thread: see Note [after a fork] in ``forking.py``."""
        if not self.is_own_thread():
            self._closed = self.is_lost = True

    def is_own_thread(self) -> bool:
        """Whether the caller is a piece of work of this stream."""
        return threading.current_thread() is self._thread

    def submit(self, work: Job) -> None:
        """Put ``work`` at the end of the queue. If this stream's own work calls this, run ``work`` now.

        Raises ``BackendError`` after ``close`` and ``CaptureError`` inside a capture.
        """
        if self._streams.here.is_capturing:
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
            with self._lock:
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
        with self._lock:
            self._closed = True
            self._stop()
        if not self.is_own_thread():
            self._thread.join()
            self._raise_kept()

    def _enqueue(self, job: Job) -> None:
        with self._lock:
            if self._closed:
                why = "in a forked process" if self.is_lost else "after close()"
                raise BackendError(f"{self!r} takes no work {why}; make another with make_stream()")
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
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def __repr__(self) -> str:
        condition = "closed" if self._closed else "failed" if self._error is not None else "open"
        return f"<CPUStream {self.name} {condition}>"


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
