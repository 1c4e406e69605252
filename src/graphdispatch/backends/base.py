"""What "a graph" is on a device: the small contract that every backend fulfils.

Note [who may touch a pool]
    All graphs of one pool share memory, so that at most one of them may be between "inputs copied in" and
    "outputs copied out" at any time. Whoever uses a graph holds ``pool.lock`` for that stretch; it is reentrant,
    since a wrapper may run inside another one. On a device with queues the lock orders the *enqueueing*, and
    the queue, or ``order_after_last_use``, orders the work.

    A replay in pieces runs Python in its breaks, on the thread that holds the lock, so that the lock alone would let a
    break use the pool again and overwrite what the later pieces read. ``replaying_on`` tells: a call that a break makes
    runs eagerly, or is refused (``refuse_inside_replay``).

Note [one capture at a time]
    torch allows one capture under way in a process (``torch/cuda/graphs.py``, "Not thread safe"). Every backend
    takes ``CAPTURE_LOCK`` from ``begin_capture`` to ``end`` or ``abort``. It is always taken *after* a pool's lock.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

import torch

from ..errors import BackendError, DeviceLostError, ReplayError
from ..reasons import Reason

__all__ = [
    "CAPTURE_LOCK",
    "Backend",
    "Capture",
    "Event",
    "Graph",
    "MemoryFigures",
    "Pool",
    "Stream",
    "Timer",
]

CAPTURE_LOCK = threading.RLock()


class MemoryFigures(NamedTuple):
    """Bytes on a device: by the allocator in use, held by it, free and in all (as the driver or system says)."""

    allocated: int
    reserved: int
    free: int
    total: int


class Event(ABC):
    """A point in a stream's order of work."""

    @abstractmethod
    def record(self, stream: "Stream | None" = None) -> None:
        """Mark the end of all work given to ``stream`` (default: the current one) so far."""

    @abstractmethod
    def wait(self, stream: "Stream | None" = None) -> None:
        """Let later work of ``stream`` (default: the current one) begin only after the mark; never blocks the
        caller on a device with queues. An event that was never recorded holds nothing up."""

    @abstractmethod
    def query(self) -> bool:
        """Whether the work before the mark is done; an event that was never recorded is done."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until the work before the mark is done."""

    @abstractmethod
    def elapsed_ms(self, end: "Event") -> float:
        """Milliseconds of device time from this mark to ``end``; both made with ``timing=True`` and done."""


class Stream(ABC):
    """A queue of work that runs in order; two streams run independently of each other."""

    @abstractmethod
    def submit(self, work: Callable[[], None]) -> None:
        """Put ``work`` at the end of the queue. On CUDA it is called at once, with this stream current, and
        what it launches is queued; on the CPU backend the call itself runs later, on the stream's thread."""

    @abstractmethod
    def wait_stream(self, other: "Stream") -> None:
        """Let later work of this stream begin only after all work given to ``other`` so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until the queue is empty; raises what a piece of work raised, once."""

    @abstractmethod
    def close(self) -> None:
        """Finish the queue and release the stream; idempotent."""


class Timer:
    """The device time between two points of a stream's work. It is read later, and reading it never blocks.

    ``start_event`` and ``end_event`` are two events made with ``timing=True``. A timer may run again.
    """

    def __init__(self, start_event: Event, end_event: Event) -> None:
        self._start = start_event
        self._end = end_event
        self._started = self._stopped = False

    def start(self) -> None:
        """Begin, on the current stream."""
        self._start.record()
        self._started, self._stopped = True, False

    def stop(self) -> None:
        """End, on the current stream. Raises ``BackendError`` before ``start``."""
        if not self._started:
            raise BackendError("timer was stopped before it was started; call start() first")
        self._end.record()
        self._stopped = True

    def elapsed_ms(self) -> float | None:
        """Milliseconds from start to stop, or None before ``stop`` and while the device has not reached the end."""
        if not (self._stopped and self._start.query() and self._end.query()):
            return None
        return self._start.elapsed_ms(self._end)


class Pool(ABC):
    """The memory that a set of graphs shares, and the lock that guards it: see Note [who may touch a pool].

    ``generation`` grows with each replay in the pool; outputs that were not cloned are stale as soon as it
    differs from what it was when they were made.
    """

    lifetime = 1
    """After how many replays the memory of an output is used again."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.generation = 0
        self.replaying_on: int | None = None
        """The thread that runs a replay with breaks."""

    def is_inside_replay(self) -> bool:
        """Whether the calling thread is in a break of one of the pool's graphs. Needs no lock."""
        return self.replaying_on is not None and self.replaying_on == threading.get_ident()

    def refuse_inside_replay(self) -> None:
        """Raise ``ReplayError`` if the calling thread is in a break of one of the pool's graphs."""
        if self.is_inside_replay():
            raise ReplayError(Reason.INSIDE_REPLAY.text)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the pool holds on the device."""

    def nbytes_of(self, graphs: "Sequence[Graph]") -> int:
        """Bytes that the pool would hold with only these of its graphs; here all of them or, without graphs, none."""
        return self.nbytes if graphs else 0

    @abstractmethod
    def order_after_last_use(self) -> None:
        """Order the caller's current stream after the stream that last used the pool; free when they are one.

        Call it with ``lock`` held, before touching the pool's memory.
        """

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether no replay of the pool is in flight."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory once the last graph is gone; idempotent."""


class Graph(ABC):
    """A recorded piece of work that runs again, on the same memory, as one launch."""

    @abstractmethod
    def replay(self) -> None:
        """Run it on the caller's current stream. Raises ``ReplayError`` after ``reset``."""

    @abstractmethod
    def reset(self) -> None:
        """Release it; idempotent. Wait for replays in flight before."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that releasing this graph alone would free, apart from its pool."""

    def describe(self) -> str:
        """What a replay consists of, in a few words; nothing where that is one launch."""
        return ""

    @property
    def graphs(self) -> "Sequence[Graph]":
        """The graphs that it consists of: itself, unless it is made of several."""
        return [self]

    @property
    def driver_nbytes(self) -> int:
        """The part of ``nbytes`` that the device's driver took and no allocator accounts for; 0 without a driver."""
        return 0


class Capture(ABC):
    """A recording under way, on the calling thread, with ``CAPTURE_LOCK`` held.

    As a context manager it ends on success and aborts on an exception; ``graph`` is set by ``end``.
    """

    graph: Graph
    outputs: Any = None

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether it has neither ended nor been aborted."""

    def set_outputs(self, outputs: Any, *, shared: bool) -> None:
        """Give what the callable returned, a tensor or any nest, to the capture before it ends; ``end`` sets
        ``outputs`` to the same nest.

        With ``shared``, its tensors that the recording made and that nobody else holds may then lie in memory which
        other graphs of the pool use as well: they are valid from a replay to the pool's next one. A backend whose
        allocator does that by itself for what nobody holds leaves it to ``weak_reference``.
        """
        self.outputs = outputs

    @abstractmethod
    def pause(self) -> Graph:
        """End the recording here and return its graph; what the thread does until ``resume`` is not recorded.

        On failure everything is put back as by ``abort``, and ``CaptureError`` is raised.
        """

    @abstractmethod
    def resume(self) -> None:
        """Begin another recording into the same pool, after ``pause``."""

    @abstractmethod
    def end(self) -> Graph:
        """Finish the recording. On failure everything is put back as by ``abort``, and ``CaptureError`` is raised."""

    @abstractmethod
    def abort(self) -> None:
        """Throw the recording away and restore the stream and the allocator; idempotent, never raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif self.is_open:
            self.end()


class _Watch(threading.local):
    depth = 0
    """How many ``watched`` blocks the thread is in."""


class Backend(ABC):
    """Capture, replay, streams, events and memory of one device.

    ``capture_executes`` tells whether recording runs the operators (the CPU backend) or only notes them (CUDA);
    ``is_bit_exact`` whether a replay gives eager's very bits when nothing is padded.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    capture_executes: ClassVar[bool]
    is_bit_exact: ClassVar[bool]

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.watch = _Watch()

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Whether a device of this kind can be used in this process. Never raises."""

    @classmethod
    def default_index(cls) -> int | None:
        """The index of the device to use when none is named; None where devices have no index."""
        return None

    @abstractmethod
    def make_pool(self) -> Pool:
        """A new, empty pool. It is never re-used once its last graph is gone and it was closed."""

    @abstractmethod
    def begin_capture(self, pool: Pool) -> Capture:
        """Start recording the calling thread's work into ``pool``; blocks while another capture is under way."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the calling thread's work is being recorded by anyone. Never raises."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that the calling thread's work goes to."""

    @abstractmethod
    def make_stream(self) -> Stream:
        """A new stream."""

    @abstractmethod
    def use_stream(self, stream: Stream) -> AbstractContextManager[Stream]:
        """Make ``stream`` the calling thread's current stream within a ``with`` block."""

    @abstractmethod
    def make_event(self, *, timing: bool = False) -> Event:
        """A new event; ``timing`` allows ``elapsed_ms``."""

    def make_timer(self) -> Timer:
        """A new timer."""
        return Timer(self.make_event(timing=True), self.make_event(timing=True))

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all work on the device is done. Never called on a hit."""

    @abstractmethod
    def memory(self) -> MemoryFigures:
        """The device's memory now."""

    @abstractmethod
    def rng_state(self) -> Any:
        """The state of the device's default random generator."""

    @abstractmethod
    def set_rng_state(self, state: Any) -> None:
        """Put a state from ``rng_state`` back."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block the calling thread's work is being captured or compared: nothing in it may replay."""
        self.watch.depth += 1
        try:
            yield
        finally:
            self.watch.depth -= 1

    def is_watched(self) -> bool:
        """Whether the calling thread is in a ``watched`` block, or is being captured by anyone."""
        return self.watch.depth > 0 or self.is_capturing()

    def weak_reference(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory that does not own it, where the device can make one; else the tensor."""
        return tensor

    def classify_error(self, error: BaseException) -> Reason:
        """The reason that an error in a capture stands for."""
        if self.is_out_of_memory(error):
            return Reason.OUT_OF_MEMORY
        return Reason.CAPTURE_FAILED

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether ``error`` says that the device has no memory left."""
        return isinstance(error, (torch.OutOfMemoryError, MemoryError))

    def is_lost(self, error: BaseException) -> bool:
        """Whether ``error`` says that the device will fail whatever it is asked from now on."""
        return False

    def raise_if_lost(self, error: BaseException) -> None:
        """Raise ``DeviceLostError`` if ``error``, or what caused it, says that nothing can be served any more."""
        if any(self.is_lost(e) for e in (error, error.__cause__) if e is not None):
            raise DeviceLostError(
                f"{self.device} is lost, so that no step can be served, eagerly either: {error}; restart the process"
            ) from error

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.device}>"
