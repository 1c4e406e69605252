"""The memory that the graphs of one pool share.

Note [a pool lives by its placeholder]
    A device's allocator counts the graphs of a pool handle and takes the memory back when the last one is gone. A
    handle whose count fell to zero must not be used again. So an empty graph, the placeholder, is captured into each
    handle. It keeps the count above zero between captures. When the last of the pool's own graphs is released, the
    placeholder and the memory go too, and the next capture gets a new handle: torch gives the memory of a pool to
    nobody else, and keeping it for a capture that may never come would break the promise of a memory budget.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ...errors import BackendError
from ..base import CAPTURE_LOCK, Pool

__all__ = ["AcceleratorPool", "DevicePool", "begin_recording", "current_stream"]

current_stream = torch._C._accelerator_getStream
"""A device's current stream, by the device's index; ``torch.accelerator.current_stream`` takes ten times as long."""

Handle: TypeAlias = tuple[int, int]


class DevicePool(Pool):
    """A private pool of a caching allocator. All its captures run on ``capture_stream``.

    The allocator reuses a block only on the stream that the block was allocated for. Graphs therefore share memory
    only if they were captured on the same stream. All methods are called with ``lock`` held.
    """

    def __init__(self, device: torch.device, capture_stream: Callable[[], Any]) -> None:
        super().__init__()
        self.device = device
        self.capture_stream = capture_stream
        self._graphs = 0
        self._closed = False
        self._last: Any = None

    @abstractmethod
    def handle(self) -> Handle:
        """The handle to capture into, made on first use.

        Call it with ``CAPTURE_LOCK`` held and no capture in progress. Raises ``BackendError`` after ``close``.
        """

    @abstractmethod
    def give_up_handle(self) -> None:
        """After a capture that ended with an error: leave the current handle to its graphs. Never raises.

        Call it with ``CAPTURE_LOCK`` held.
        """

    @abstractmethod
    def let_go(self) -> None:
        """Give the handle and its memory back."""

    def hold_graph(self) -> None:
        """Note that a graph was captured into the pool. Call it with ``CAPTURE_LOCK`` held."""
        self._graphs += 1

    def release_graph(self) -> None:
        """Note that a graph was released; free the memory with the last one. Call it with ``CAPTURE_LOCK`` held."""
        self._graphs -= 1
        if not self._graphs:
            self.let_go()

    def used_on(self, stream: Any) -> None:
        """Note that work on the pool's memory ends on ``stream``."""
        self._last = stream

    def order_after_last_use(self) -> None:
        """Make the current stream wait for the stream that last used the pool; if they are one, only compare them."""
        current = current_stream(self.device.index)
        if self._last is None or current != self._last:
            if self._last is not None:
                current.wait_stream(self._last)
            self.used_on(current)

    def is_capturing(self) -> bool:
        """Whether anyone captures the current stream."""
        return bool(current_stream(self.device.index).is_capturing())

    def wait_until_idle(self) -> None:
        """Block until everything that used the pool's memory is done."""
        if self._last is not None:
            self._last.record_event().synchronize()

    def close(self) -> None:
        """Release the memory; idempotent. Never call it inside a capture of the same thread.

        Memory that no graph and no tensor uses goes back to the driver now, together with the rest of the allocator's
        cache, because torch gives the memory of a finished pool to nobody else. Memory that is still in use goes back
        when the allocator next empties its cache.
        """
        with CAPTURE_LOCK:
            self._closed = True
            self.let_go()

    def check_open(self) -> None:
        """Raise ``BackendError`` after ``close``."""
        if self._closed:
            raise BackendError("the pool is closed; make another with make_pool()")


class AcceleratorPool(DevicePool):
    """A private pool of any device's allocator. ``make_graph`` makes an empty graph for a handle, or for a new one."""

    def __init__(
        self, device: torch.device, capture_stream: Callable[[], Any], make_graph: Callable[[Handle | None], Any]
    ) -> None:
        super().__init__(device, capture_stream)
        self.make_graph = make_graph
        self._placeholder: Any = None
        self._handles: list[Handle] = []

    def handle(self) -> Handle:
        """The handle to capture into, made on first use."""
        self.check_open()
        if self._placeholder is None:
            graph = self.make_graph(None)
            with self.capture_stream():
                begin_recording(graph)
                graph.capture_end()
            self._placeholder = graph
            self._handles.append(graph.pool())
        return self._handles[-1]

    def give_up_handle(self) -> None:
        """Leave the current handle to its graphs; the next capture gets a new one."""
        placeholder, self._placeholder = self._placeholder, None
        if placeholder is not None:
            with contextlib.suppress(RuntimeError):
                placeholder.reset()

    def let_go(self) -> None:
        """Give the handle and its memory back."""
        if self._handles:
            placeholder, self._placeholder = self._placeholder, None
            if placeholder is not None:
                placeholder.reset()
            del placeholder  # only now does torch free what it keeps for a graph outside of the pool
            torch.accelerator.empty_cache()
            known = self._bytes_by_handle()
            self._handles = [handle for handle in self._handles if known.get(handle)]

    @property
    def nbytes(self) -> int:
        """Bytes of the allocator's segments that belong to the pool; 0 if the device's module has no snapshot."""
        known = self._bytes_by_handle()
        return sum(known.get(handle, 0) for handle in self._handles)

    def _bytes_by_handle(self) -> dict[Handle, int]:
        snapshot = getattr(torch.get_device_module(self.device), "memory_snapshot", None)
        known: dict[Handle, int] = {}
        for segment in snapshot() if snapshot is not None else ():
            if segment["device"] == self.device.index:
                handle = tuple(segment["segment_pool_id"])
                known[handle] = known.get(handle, 0) + int(segment["total_size"])
        return known

    def __repr__(self) -> str:
        condition = "closed" if self._closed else "open" if self._placeholder is not None else "empty"
        return f"<AcceleratorPool {self.device} {condition} generation={self.generation}>"


def begin_recording(graph: Any) -> None:
    """Begin to record the current stream's work. What torch itself runs there, as for random numbers, no mode sees."""
    with torch._C._DisableTorchDispatch():
        graph.capture_begin()
