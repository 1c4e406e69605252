"""What "a graph" is on a device: the small contract that every backend fulfils.

Note [who may touch a pool]
    All graphs of one pool share memory. At any time, at most one of them may be between "inputs copied in" and
    "outputs copied out". Whoever uses a graph holds ``pool.lock`` during that time. The lock is reentrant, because
    one wrapper may run inside another. On a device with queues, the lock orders the *enqueueing*; the queue, or
    ``order_after_last_use``, orders the work.

    Python may run on the thread with the lock during that time: a break, a pad function of the user, a finalizer that
    the collector calls, the handler of a signal. If it used the pool again it would overwrite what the replay reads,
    and if it took a server's lock it could wait for a thread that waits for the pool. ``replaying_on`` prevents both: a
    served call that it makes runs eagerly.

Note [one capture at a time]
    torch allows only one capture at a time in a process (``torch/cuda/graphs.py``, "Not thread safe"). Every backend
    holds ``CAPTURE_LOCK`` from ``begin_capture`` to ``end`` or ``abort``. A thread that needs both locks takes the
    pool's lock first.

Note [what no abstract method tells]
    A backend of another kind does this, too: ``begin_capture`` refuses a capture within a capture, holds
    ``CAPTURE_LOCK``, and puts the capture into ``watch.capture``; ``Capture.is_open`` is set while it records, and
    ``watch.is_capturing``, if ``is_capturing`` reads that. Each replay adds one to the pool's ``generation``.
    ``current_stream`` gives the same or an equal object while the stream is the same.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, final
from weakref import WeakValueDictionary

import torch
from torch._ops import OpOverload
from torch.overrides import _pop_mode as _pop_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from ..copying import NotCopied, Shared, make_lock, renew_in_child
from ..errors import CaptureError, DeviceLostError, ReplayError
from ..reasons import Reason
from .code_events import listen_as_before, listening
from .diagnosis import LOST, MEMORY, Diagnosis, diagnose
from .operator_mode import OperatorMode, run_kernel

CAPTURE_LOCK: Any = make_lock()
_POLLS = 4  # times that are looked at in one call


Stream: TypeAlias = Any
"""A queue of work that runs in order: torch's own, or what has its ``wait_stream(other)`` and ``synchronize()``, which
raises what a piece of work raised, once."""
Event: TypeAlias = Any
"""A point in a stream's order of work: torch's own, or what has its ``record(stream)``, ``wait(stream)``, ``query()``,
``synchronize()`` and ``elapsed_time(end)``. Name the stream: torch takes that of the current device otherwise. An event
that was never recorded delays nothing."""


class Stopwatch:
    """Times work on a device without waiting for it: a callback gets each time once the device has it.

    Thread-safe; the times of several threads' work may come out of order.

    Args:
        most: How many times may be outstanding; while there are as many, no more work is timed.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._pending: deque[tuple[Event, Event, Callable[[float], None]]] = deque()
        self._spare: list[tuple[Event, Event]] = []
        """Marks whose time was given. They are used again, since making some costs as much as a short replay."""

    def start(self, backend: "Backend") -> tuple[Event, Event, Stream] | None:
        """Mark the begin of some work, on the current stream; None while too many times are outstanding.

        Args:
            backend: Where it runs, the same each time.

        Returns:
            The marks of its begin and its end, and the stream, for ``stop``.
        """
        if self._pending:
            self.collect()
            if len(self._pending) >= self._most:
                return None
        try:
            begin, end = self._spare.pop()
        except IndexError:
            begin, end = backend.make_event(timing=True), backend.make_event(timing=True)
        stream = backend.current_stream()
        begin.record(stream)
        return begin, end, stream

    def stop(self, marks: tuple[Event, Event, Stream], report: Callable[[float], None]) -> None:
        """Mark the end of the work, on the same stream.

        Args:
            marks: What ``start`` gave.
            report: Called with the milliseconds of device time, now or later, once the device has them.
        """
        begin, end, stream = marks
        end.record(stream)
        self._pending.append((begin, end, report))
        self.collect()

    def collect(self) -> None:
        """Report the times that the device has by now. Each call looks at a few, in turn, so that it costs the same
        however far the device is behind."""
        for _ in range(min(len(self._pending), _POLLS)):
            try:
                begin, end, report = oldest = self._pending.popleft()
            except IndexError:  # another thread took it
                return
            if begin.query() and end.query():
                elapsed = begin.elapsed_time(end)
                self._spare.append((begin, end))
                report(elapsed)
            else:
                self._pending.append(oldest)


class Pool(Shared, ABC):
    """The memory that a set of graphs shares, and the lock that guards it: see Note [who may touch a pool].

    Each replay in the pool increases ``generation``. An output that was not cloned is stale once ``generation``
    differs from its value when the output was made.
    """

    __slots__ = ("__dict__", "__weakref__", "generation", "replaying_on")

    def __init__(self) -> None:
        self.lock = make_lock()
        self.generation = 0
        self.replaying_on: int | None = None
        """The identifier of the thread that runs a replay, copies included; None if there is none."""
        self.inputs: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """By ``id``, what graphs of the pool read: static inputs, and outlets, whose ``buffers`` are used on the
        streams of replays. Another thread may add some while ``valuerefs`` is read, which is a list."""
        renew_in_child(self)

    def after_fork(self) -> None:
        """A thread that ran a replay is gone: see Note [after a fork] in ``copying.py``."""
        if not self.is_inside_replay():
            self.replaying_on = None

    @final
    def is_inside_replay(self) -> bool:
        """Whether the calling thread is within a replay of one of the pool's graphs. Needs no lock."""
        return self.replaying_on is not None and self.replaying_on == threading.get_ident()

    @final
    def refuse_inside_replay(self) -> None:
        """Raise ``ReplayError`` if the calling thread is within a replay of one of the pool's graphs."""
        if self.is_inside_replay():
            raise ReplayError(Reason.INSIDE_REPLAY.text)

    @final
    def refuse_changes(self) -> None:
        """Raise ``CaptureError`` if the calling thread is within a replay of one of the pool's graphs, since that has
        its graph until it ends."""
        if self.is_inside_replay():
            raise CaptureError(f"graphs cannot be changed now: {Reason.INSIDE_REPLAY.text}", Reason.INSIDE_REPLAY)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the pool holds on the device."""

    def nbytes_of(self, graphs: "Sequence[Graph]") -> int:
        """Bytes that the pool would hold for some graphs alone. Here: all bytes, or 0 for none.

        Args:
            graphs: The graphs.
        """
        return self.nbytes if graphs else 0

    @abstractmethod
    def order_after_last_use(self) -> None:
        """Make the caller's current stream wait for the stream that last used the pool. Free if they are the same.

        Call it before touching the pool's memory, with ``lock`` held.
        """

    def trim(self) -> None:
        """Give back what is held while there is no graph; idempotent. Here: nothing is."""


class Graph(NotCopied, ABC):
    """Recorded work. A replay runs it again, on the same memory, as one launch."""

    outlet: Any = None
    """Where a hit notes whereto the graph puts outputs (``accelerator/outlet.py``); None where torch clones them."""
    is_unchanged: Callable[[], bool] | None = None
    """Whether what Python read at the capture is as it was; set where a break of the graph may change that."""
    runs_code = False
    """Whether a replay runs Python of the user's, of which nobody knows what it did where the replay fails."""

    @abstractmethod
    def replay(self) -> None:
        """Run the work on the caller's current stream. Raises ``ReplayError`` after ``reset``."""

    @abstractmethod
    def reset(self) -> None:
        """Release the graph once its replays in flight are done; idempotent."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that releasing only this graph would free; memory of the pool is not counted."""

    def describe(self) -> str:
        """What a replay consists of, in a few words; empty if it is one launch."""
        return ""

    @property
    def graphs(self) -> "Sequence[Graph]":
        """The graphs that this one is made of; a plain graph lists itself."""
        return [self]

    @property
    def driver_nbytes(self) -> int:
        """The part of ``nbytes`` that the device's driver took and no allocator counts; 0 if there is no driver."""
        return 0


class Capture(ABC):
    """A recording in progress. It belongs to the calling thread, which holds ``CAPTURE_LOCK``.

    As a context manager it calls ``end`` on success and ``abort`` on an exception. ``end`` sets ``graph``.
    """

    graph: Graph
    outputs: Any = None
    is_open = False
    """Whether the recording has begun, and has neither ended nor been aborted."""

    def watching(self, mode: OperatorMode) -> AbstractContextManager[object]:
        """A block in which a mode sees each operator, and has the capture ``run`` it.

        Args:
            mode: The mode.
        """
        return mode

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """Run an operator for the mode that is ``watching``, unless no graph can hold it.

        Args:
            func: The operator, which is not ``forbidden``, unless the capture is paused.
            args: The operator's positional arguments.
            kwargs: The operator's keyword arguments.
            tensors: The tensors among its arguments.

        Returns:
            The operator's result.

        Raises:
            CaptureError: The recording cannot hold the call.
        """
        return func(*args, **kwargs)

    def look_inside(
        self, mode: OperatorMode, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator's Python kernel within a mode.

        Args:
            mode: The mode.
            func: The operator.
            key: The dispatch key of the kernel.
            args: The operator's positional arguments.
            kwargs: The operator's keyword arguments.

        Returns:
            The kernel's result.

        Raises:
            CaptureError: The recording cannot hold what the kernel does.
        """
        with mode:
            return run_kernel(func, key, args, kwargs)

    def set_outputs(self, outputs: Any, *, shared: bool) -> None:
        """Give the capture what the callable returned. Call it before ``end``, which sets ``outputs`` to the same nest.

        Args:
            outputs: A tensor, or any nest of tensors.
            shared: Whether a tensor that the recording made and that nobody else holds may lie in memory which other
                graphs of the pool use too. Such a tensor is valid from a replay to the next replay in the pool. A
                backend whose allocator reuses unheld memory by itself ignores ``shared`` and relies on
                ``weak_reference``.
        """
        self.outputs = outputs

    @abstractmethod
    def pause(self) -> Graph:
        """End the recording here and return its graph. Nothing is recorded until ``resume``.

        On failure, ``pause`` restores everything as ``abort`` does and raises ``CaptureError``.
        """

    @abstractmethod
    def resume(self) -> None:
        """Begin another recording into the same pool, after ``pause``."""

    @abstractmethod
    def end(self) -> Graph:
        """Finish the recording. On failure, restore everything as ``abort`` does and raise ``CaptureError``."""

    @abstractmethod
    def abort(self) -> None:
        """Discard the recording and restore the stream and the allocator. Idempotent; never raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self.is_open:
            self.end()


class _Watch(threading.local):
    """What a backend knows of the calling thread; each thread begins with nothing."""

    def __init__(self) -> None:
        self.depth = 0
        """How many ``watched`` blocks the thread is in."""
        self.is_capturing = False
        """Whether the thread's work is recorded, where the backend's ``is_capturing`` reads that (``done_by_core``)."""
        self.capture: Capture | None = None
        """The capture that the thread has begun last, while it is in such a block."""


class _Watched(AbstractContextManager[None]):
    """A ``watched`` block. An interrupt may come between any two steps of what is put up and taken down in it, so what
    it leaves behind ends with the block: the capture and its lock, modes of torch, and who hears of code."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._depth, self._had_lock = self._watch.depth, CAPTURE_LOCK._is_owned()
        self._modes, self._listener = _get_current_dispatch_mode_stack(), listening()
        self._function_modes = torch._C._len_torch_function_stack()
        self._watch.depth += 1

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        except BaseException:  # the interrupt has come upon this
            self._end()
            raise

    def _end(self) -> None:
        if self._watch.capture is not None:
            self._watch.capture.abort()
        restore_modes(self._modes)
        while torch._C._len_torch_function_stack() > self._function_modes:
            _pop_function_mode()
        listen_as_before(self._listener)
        while not self._had_lock and CAPTURE_LOCK._is_owned():
            CAPTURE_LOCK.release()
        self._watch.capture, self._watch.depth = None, self._depth


def restore_modes(stack: list[Any]) -> None:
    """Leave the thread with these modes of operators: one that is entered while a tensor subclass fails may stay
    behind."""
    if _get_current_dispatch_mode_stack() != stack:
        while torch._C._len_torch_dispatch_stack():
            _pop_mode()
        for mode in stack:
            _push_mode(mode)


class CopyKernel(NamedTuple):
    """A kernel that copies and pads all inputs of a hit at once (``copies.cu``), as addresses for the core; and one
    that graphs end with, which puts their outputs where a hit wants them."""

    launch: int
    """The function that launches it on a stream, with the arguments and the result of ``cuLaunchKernel``."""
    current: int
    """The function that tells the calling thread's context, as ``cuCtxGetCurrent``."""
    function: int
    """The kernel, for ``launch``."""
    context: int
    """The context that it belongs to: on a thread with another one torch copies."""
    give: Callable[[torch.Tensor, int, int], Any]
    """Launches the other kernel on the current stream, given the places that it reads, how many blocks there are for
    each output, and how many outputs."""


class Backend(Shared, ABC):
    """Capture, replay, streams, events and memory of one device.

    ``capture_executes`` tells whether recording runs the operators as torch's dispatcher sees them, so that a graph
    holds no other kernels and an unpadded replay gives eager's bits (the CPU backend), or only notes what the device is
    to do (CUDA).

    Args:
        device: The device.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    capture_executes: ClassVar[bool]
    errors: ClassVar[dict[str, Diagnosis]] = {
        "out of memory": MEMORY,
        "can't allocate memory": MEMORY,  # of the host: torch's allocator tells of it in the text alone
        "not enough memory": MEMORY,
    }
    """What texts of errors mean, in lower case: the first that occurs decides. A device adds those of its runtime."""
    copy_kernel: CopyKernel | None = None
    """What copies the inputs and outputs of a hit, as far as they are dense memory of the device; None: torch does. Its
    pools have the address of the current stream in ``_last_raw`` after ``order_after_last_use``."""
    clock = staticmethod(time.perf_counter)
    """What captures, eager runs and replays are timed by, in seconds, where work is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.watch = _Watch()

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Whether a device of this kind can be used in this process. Never raises."""

    @classmethod
    def default_index(cls) -> int | None:
        """The index of the device to use if the caller names none; None if devices have no index."""
        return None

    @abstractmethod
    def make_pool(self) -> Pool:
        """A new, empty pool."""

    @abstractmethod
    def begin_capture(self, pool: Pool) -> Capture:
        """Start to record the calling thread's work. Blocks while another capture is in progress.

        Args:
            pool: The memory of the graph.

        Returns:
            The capture in progress, which the calling thread owns.
        """

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the calling thread's work is being recorded by anyone. Never raises."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that receives the calling thread's work."""

    @abstractmethod
    def make_stream(self) -> Stream:
        """A new stream."""

    @abstractmethod
    def use_stream(self, stream: Stream) -> AbstractContextManager[Stream]:
        """Make a stream the calling thread's current one within a ``with`` block.

        Args:
            stream: The stream.
        """

    @abstractmethod
    def make_event(self, *, timing: bool = False) -> Event:
        """A new event.

        Args:
            timing: Whether it allows ``elapsed_time``.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all work on the device is done. Never called on a hit."""

    @abstractmethod
    def rng_state(self) -> Any:
        """The state of the device's default random generator."""

    @abstractmethod
    def set_rng_state(self, state: Any) -> None:
        """Put a state of the default random generator back.

        Args:
            state: What ``rng_state`` returned.
        """

    def drawing(self) -> AbstractContextManager[object]:
        """A block that replays a graph which draws random numbers."""
        return nullcontext()

    @final
    def watched(self) -> AbstractContextManager[None]:
        """Mark a block in which the calling thread's work is captured or compared. Nothing may replay in it."""
        return _Watched(self.watch)

    @property
    def is_settled(self) -> bool:
        """Whether replays take as long as they will; not so while something is compiled for them."""
        return True

    @final
    def is_watched(self) -> bool:
        """Whether the calling thread is in a ``watched`` block, or anyone is capturing its work."""
        return self.watch.depth > 0 or self.is_capturing()

    def refuse_foreign_work(self) -> None:
        """Raise ``BackendError`` if another thread's capture is recording what the calling thread submits."""

    def weak_reference(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the same memory that does not own it.

        Args:
            tensor: The owner.

        Returns:
            The new tensor, or ``tensor`` itself if the device cannot make one.
        """
        return tensor

    @final
    def classify_error(self, error: BaseException) -> Reason:
        """The reason of what failed; ``OUT_OF_MEMORY`` if the device has no memory left.

        Args:
            error: What was raised.
        """
        return error.reason if isinstance(error, CaptureError) else diagnose(error, self.errors).reason

    @final
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device has no memory left.

        Args:
            error: The error.
        """
        return self.classify_error(error) is Reason.OUT_OF_MEMORY

    @final
    def is_lost(self, error: BaseException) -> bool:
        """Whether an error says that every later request to the device will fail.

        Args:
            error: The error.
        """
        return diagnose(error, self.errors) is LOST

    @final
    def raise_if_lost(self, error: BaseException) -> None:
        """Check an error that came from the device.

        Args:
            error: The error.

        Raises:
            DeviceLostError: The error or its cause says that every later request to the device will fail.
        """
        if any(self.is_lost(e) for e in (error, error.__cause__) if e is not None):
            what = f"{self.device} is lost, so no step can run on it, not even eagerly ({error})"
            raise DeviceLostError(f"{what}; restart the process") from error

    def __reduce__(self) -> Any:
        from . import get_backend  # here, since the registry of backends imports this module

        return get_backend, (self.name, self.device)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.device}>"
