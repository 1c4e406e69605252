"""The backend of one accelerator, whose streams and events are torch's own.

Note [random numbers of several pools]
    A replay first writes the generator's seed and offset to where the graph's kernels read them, and then counts the
    offset on, without a lock (pytorch#176754). Up to torch 2.11 all graphs of a generator read one place
    (pytorch#172390). Two replays at the same time could draw the same numbers. So graphs that draw are replayed one at
    a time, each on the device after the last, whatever their pools. Nobody sees eager code that draws meanwhile.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from ...copying import make_lock
from ...errors import BackendError, CaptureError
from ...reasons import Reason
from ..base import CAPTURE_LOCK, Backend, Capture, Event, Pool, Stream
from ..diagnosis import Diagnosis, unsafe
from .graph import AcceleratorCapture
from .pool import AcceleratorPool, Handle, current_stream


class AcceleratorBackend(Backend):
    """Graphs on one device of the process's accelerator, by torch's common interface to it.

    All captures of a device run on one stream, made on first use. Nothing touches the device before it is needed.
    """

    capture_executes = False
    capture_mode: ClassVar[Any] = "thread_local"
    """Whom a capture forbids to wait for the device: its own thread, or who that is by the device's own mode."""
    api: ClassVar[Any] = torch.accelerator
    """Where torch has the functions for the device's current stream and its memory."""
    pool_type: ClassVar[type[AcceleratorPool]] = AcceleratorPool
    errors = Backend.errors | {
        "offset increment outside graph capture": unsafe(
            "it draws from a random generator that the graph does not know; use the default"
        ),
        "no warmup iterations occurred before capture": unsafe(
            "an algorithm search ran inside the capture; warm up at this size before"
        ),
        "stale reference to the default stream": unsafe(
            "autograd was warmed up on the default stream; run without gradients"
        ),
    }

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            raise BackendError(f"device must have an index, got {device}; write '{device.type}:0'")
        super().__init__(device)
        self.capturer: int | None = None
        """The thread that records on the stream of captures now."""
        self._making, self._draws = make_lock(), make_lock()
        self._drew_on: Stream = None
        self._capture_stream: Stream = None

    @classmethod
    def is_available(cls) -> bool:
        """Whether the device is this process's accelerator, and can be used. Never raises."""
        try:
            current = torch.accelerator.current_accelerator(check_available=True)
            return current is not None and current.type == cls.device_type
        except (RuntimeError, AssertionError, Warning):  # an old driver warns, and warnings may be errors
            return False

    @classmethod
    def default_index(cls) -> int:
        """The index of the calling thread's current device."""
        return int(torch.accelerator.current_device_index())

    def set_index(self, index: int) -> None:
        """Make another device current on the calling thread."""
        torch.accelerator.set_device_index(index)

    def memory_info(self) -> tuple[int, int]:
        """The device's free bytes, and all; raises ``RuntimeError`` if it cannot tell."""
        return torch.accelerator.get_memory_info(self.device)

    def make_pool(self) -> Pool:
        """A new, empty pool; it takes no memory before the first capture."""
        return self.pool_type(self)

    def begin_capture(self, pool: Pool) -> Capture:
        """Start to record the calling thread's work into ``pool``.

        Blocks while another thread captures. Raises ``CaptureError`` inside a capture and where torch has no graphs for
        the device, and ``BackendError`` for a pool of another device.
        """
        if not isinstance(pool, self.pool_type) or pool.device != self.device:
            raise BackendError(f"pool must come from the backend of {self.device}, got {pool!r}; use its make_pool()")
        return AcceleratorCapture(pool)

    def prepare_capture(self) -> None:
        """What is to be done before a recording, while the device is idle and the caller's stream is current."""

    def clean_up_capture(self) -> None:
        """What is to be done after a recording, good or bad, when the caller's stream is current again."""

    def is_capturing(self) -> bool:
        """Whether anyone is capturing the calling thread's current stream. Never raises."""
        try:
            return bool(current_stream(self.device.index).is_capturing())
        except (RuntimeError, AssertionError, AttributeError):  # a device that is lost, or a torch without its graphs
            return False

    def current_stream(self) -> Stream:
        """The device's current stream on the calling thread."""
        return current_stream(self.device.index)

    def make_stream(self) -> Stream:
        """A stream of the device, never that of captures. Torch hands out the same few in turn."""
        made = self.next_stream()
        return self.next_stream() if made == self.capture_stream else made

    def next_stream(self) -> Stream:
        """The stream that torch hands out next."""
        return torch.Stream(self.device)

    def refuse_foreign_work(self) -> None:
        """Raise ``BackendError`` if another thread is recording what the calling thread submits to its current stream.

        Threads may get the stream of captures from torch, which hands out the same few streams in turn.
        """
        capturer = self.capturer
        if capturer not in (None, threading.get_ident()) and self.current_stream() == self.capture_stream:
            raise BackendError(
                f"another thread is capturing on this thread's current stream of {self.device}: what is submitted here "
                "is recorded and does not run; use a stream of the backend's make_stream(), or prewarm() before "
                "threads serve"
            )

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[Stream]:
        """Make ``stream`` current within a ``with`` block."""
        # A new object, since torch keeps in it which stream was current before: two threads would mix that up.
        with torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type):
            yield stream

    def make_event(self, *, timing: bool = False) -> Event:
        """A new event; ``timing`` allows ``elapsed_time``."""
        return torch.Event(self.device, enable_timing=timing)

    def synchronize(self) -> None:
        """Block until all work on the device is done, and while another thread captures.

        To wait for a device of which some stream is being captured is an error, and makes the capture invalid.
        """
        with CAPTURE_LOCK:
            self.api.synchronize(self.device)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """A block that replays a graph which draws random numbers: see Note [random numbers of several pools]."""
        with self._draws:
            current = self.current_stream()
            if self._drew_on is not None and self._drew_on != current:
                current.wait_stream(self._drew_on)
            self._drew_on = current
            yield

    def rng_state(self) -> Any:
        """The state of the device's default generator, as a tensor on the host."""
        return torch.get_device_module(self.device).get_rng_state(self.device)

    def set_rng_state(self, state: Any) -> None:
        """Put a state from ``rng_state`` back."""
        torch.get_device_module(self.device).set_rng_state(state, self.device)

    def weak_reference(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the same memory that does not keep it: for an output whose memory the pool may use again.

        The memory stays mapped while the pool lives, so reading it never faults. Its content is whatever was last
        written there. If such a tensor cannot be made, the result is ``tensor`` itself.
        """
        storage = tensor.untyped_storage()
        is_plain = type(tensor) is torch.Tensor and tensor.device == self.device and tensor.layout is torch.strided
        if not is_plain or tensor.is_conj() or tensor.is_neg() or storage.data_ptr() == 0:
            return tensor
        try:
            alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return made.set_(alias, tensor.storage_offset(), tensor.shape, tensor.stride())
        except (RuntimeError, NotImplementedError):
            return tensor

    @property
    def capture_stream(self) -> Stream:
        """The stream of all captures, made on first use."""
        if self._capture_stream is None:
            with self._making:
                self._capture_stream = self._capture_stream or self.next_stream()
        return self._capture_stream

    def make_graph(self, handle: Handle | None) -> Any:
        """An empty graph that captures into a pool, or into a new one."""
        try:
            return torch.accelerator.Graph(pool=handle, capture_error_mode=self.capture_mode)
        except (RuntimeError, AttributeError) as error:
            raise CaptureError(
                f"torch {torch.__version__} has no graphs for {self.device.type!r} devices; install a newer one, or "
                "the vendor's package that registers them with torch (REGISTER_GRAPH_IMPL)",
                Reason.CAPTURE_FAILED,
            ) from error


def backend_of(
    device_type: str, capture_mode: str = "thread_local", errors: dict[str, Diagnosis] | None = None
) -> type[AcceleratorBackend]:
    """A backend's class for a type of device, which is its name, too.

    Args:
        device_type: The type.
        capture_mode: Whom a capture forbids to wait for the device, in the words of ``torch.accelerator.Graph``:
            ``"thread_local"``, which means the capture's own thread, as on CUDA, or the mode of a device that knows no
            such mode.
        errors: What texts of its runtime's errors mean, in lower case.

    Returns:
        The class.
    """
    own = {"__module__": __name__, "name": device_type, "device_type": device_type, "capture_mode": capture_mode}
    texts = {"errors": AcceleratorBackend.errors | (errors or {})}
    return type(f"{device_type.capitalize()}Backend", (AcceleratorBackend,), own | texts)
