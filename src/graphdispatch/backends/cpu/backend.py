"""The CPU backend: it captures by recording, and its memory is the host's.

Work runs at once on the calling thread, so no stream has a queue.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ...copying import NotCopied
from ...errors import BackendError, CaptureError
from ...native import done_by_core
from ...native.tape import TAPE
from ...reasons import Reason
from ..base import CAPTURE_LOCK, Backend, Capture, Event, Graph, Pool, Stream
from ..host_reads import SaysCapturing
from ..operator_mode import OperatorMode, reveal_operators
from .graph import CPUGraph, CPUPool
from .recorder import Recorder, Recording


class InlineStream(NotCopied):
    """A stream whose work runs at once, on the thread that gives it."""

    def wait_stream(self, other: Stream) -> None:
        """Do nothing: what was given to ``other`` is done."""

    def synchronize(self) -> None:
        """Do nothing: what was given to this stream is done."""


class _CPUEvent(NotCopied):
    """A point in time. Work that was given before it is done, so nobody ever waits for it."""

    time = 0.0

    def record(self, stream: Stream) -> None:
        self.time = CPUBackend.clock()

    def wait(self, stream: Stream) -> None:
        """Do nothing: the work before the mark is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: the work before the mark is done."""

    def elapsed_time(self, end: "_CPUEvent") -> float:
        return (end.time - self.time) * 1e3


class _Here(threading.local):
    """What is current on the calling thread; each thread begins on the default stream."""

    def __init__(self, default: Stream) -> None:
        self.stream = default


class CPUBackend(Backend):
    """Graphs on host memory that behave like CUDA graphs.

    Addresses are fixed, Python is frozen, scalars are constants, and the next replay overwrites the outputs. Recording
    runs the operators.
    """

    clock = staticmethod(time.thread_time)
    """What other processes take of a core tells nothing of the work."""
    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    capture_executes: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.default = InlineStream()
        self.here = _Here(self.default)

    @classmethod
    def is_available(cls) -> bool:
        """True: every torch has a CPU."""
        return True

    def make_pool(self) -> Pool:
        """A new, empty pool of arenas."""
        return CPUPool()

    def begin_capture(self, pool: Pool) -> Capture:
        """Start to record the calling thread's operators. Raises ``CaptureError`` inside a capture."""
        if not isinstance(pool, CPUPool):
            raise BackendError(f"pool must come from the CPU backend, got {pool!r}; make one with its make_pool()")
        if self.is_capturing():
            raise CaptureError("a capture is already under way on this thread; end it first", Reason.INSIDE_CAPTURE)
        return _CPUCapture(pool, self)

    @done_by_core
    def is_capturing(self) -> bool:
        """Whether the calling thread is being recorded by this backend."""
        return self.watch.is_capturing

    def current_stream(self) -> Stream:
        """The calling thread's current stream."""
        return self.here.stream

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[Stream]:
        """Make ``stream`` the calling thread's current stream within a ``with`` block. Blocks may nest."""
        before = self.here.stream
        self.here.stream = stream
        try:
            yield stream
        finally:
            self.here.stream = before

    def make_stream(self) -> Stream:
        """A new stream."""
        return InlineStream()

    def make_event(self, *, timing: bool = False) -> Event:
        """A new event."""
        return _CPUEvent()

    @property
    def is_settled(self) -> bool:
        """Whether the loop that replays graphs is compiled, or will not be."""
        return TAPE.is_settled

    def synchronize(self) -> None:
        """Block until the calling thread's current stream is done."""
        self.current_stream().synchronize()

    def rng_state(self) -> torch.Tensor:
        """The state of torch's default CPU generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put the state of the default CPU generator back."""
        torch.set_rng_state(state)


class _CPUCapture(Capture):
    def __init__(self, pool: CPUPool, backend: CPUBackend) -> None:
        self._pool = pool
        self._backend = backend
        self._recorder = Recorder()
        self._modes = ExitStack()
        self._stack = _get_current_dispatch_mode_stack()
        reveal_operators(backend.device)
        CAPTURE_LOCK.acquire()
        try:
            self._modes.enter_context(SaysCapturing(backend.is_capturing))
            self._modes.enter_context(self._recorder.host_reads())
            self._modes.enter_context(self._recorder)
            self._backend.watch.is_capturing = self.is_open = True
        except BaseException:
            self._close()
            raise

    def pause(self) -> Graph:
        """Bind what was recorded so far. The recorder stays on torch's stack of modes and records nothing."""
        program = self._recorder.pause()
        self._backend.watch.is_capturing = False
        try:
            with _disable_current_modes():  # the modes that watch the callable must not see the binding
                return self._bind(program)
        except BaseException:
            self.abort()
            raise

    def resume(self) -> None:
        self._backend.watch.is_capturing = True
        self._recorder.resume()

    @contextmanager
    def watching(self, mode: OperatorMode) -> Iterator[None]:
        """The mode takes the recorder's place on torch's stack: to come by two costs each operator twice as much."""
        recorder = _pop_mode()
        try:
            with mode:
                yield
        finally:
            if self.is_open:
                _push_mode(recorder)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        return self._recorder.run(func, args, kwargs, tensors)

    def look_inside(
        self, mode: OperatorMode, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._recorder.look_inside(func, key, args, kwargs, mode)

    def set_outputs(self, outputs: Any, *, shared: bool) -> None:
        """Keep the outputs. Shared ones are only described, so that their memory can be reused."""
        if shared:
            self._recorder.share(outputs)
        else:
            self.outputs = outputs

    def end(self) -> Graph:
        if not self.is_open:
            raise CaptureError("the capture has ended already; begin another with begin_capture()")
        recorder, program = self._recorder, self._recorder.pause()
        self._close()
        recorder.check_refused()
        self.graph = graph = self._bind(program)
        if graph.outputs is not None:
            self.outputs = graph.outputs
        return graph

    def _bind(self, program: Recording) -> CPUGraph:
        try:
            return CPUGraph(program, self._pool)
        except Exception as error:
            reason = self._backend.classify_error(error)
            raise CaptureError(
                f"the recording could not be bound to memory: {type(error).__name__}: {error}", reason
            ) from error

    def abort(self) -> None:
        if self.is_open:
            self._close()

    def _close(self) -> None:
        self._backend.watch.is_capturing = self.is_open = False
        _restore_modes([*self._stack, self._recorder])  # which a watching mode may have replaced
        try:
            self._modes.close()
        finally:
            _restore_modes(self._stack)
            del self._recorder
            CAPTURE_LOCK.release()


def _restore_modes(stack: list[Any]) -> None:
    """Leave the thread with these modes: one that is entered while a tensor subclass fails may stay behind."""
    if _get_current_dispatch_mode_stack() != stack:
        while torch._C._len_torch_dispatch_stack():
            _pop_mode()
        for mode in stack:
            _push_mode(mode)
