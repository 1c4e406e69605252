"""The memory that the graphs of one pool share, and how a recording begins and ends.

Note [a pool lives by its placeholder]
    A device's allocator counts the graphs of a pool handle and takes the memory back when the last one is gone. A
    handle whose count fell to zero must not be used again. So an empty graph, the placeholder, is captured into each
    handle. It keeps the count above zero between captures. When the last of the pool's own graphs is released, the
    placeholder and the memory go too, and the next capture gets a new handle: torch gives the memory of a pool to
    nobody else, and keeping it for a capture that may never come would break the promise of a memory budget.

Note [torch's own operators at the beginning]
    ``capture_begin`` writes the generator's seed and offset to the device with ordinary operators. After a break, a
    recording begins while the capturer is watching operators, and it would take these for the callable's. They are
    hidden from it.

Note [a graph that could not begin is never destroyed]
    ``capture_begin`` first registers the graph with the random generator. This can fail if there is no memory left or
    the device is lost. The destructor of the graph then finds that it is not registered, throws, and ends the process.
    We cannot see how far ``capture_begin`` came, so we keep every graph that could not begin: some hundred bytes each.

Note [a handle is given up]
    A capture that ended with an error may leave its handle where no later capture can use it. Graphs captured before
    keep it, and its memory, until they are released; later graphs get a new handle. The placeholder of the new one is
    recorded at once, because a regular capture also repairs the random generator: torch versions with one generator
    state for all captures leave it in capture mode.
"""

import contextlib
import ctypes
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

import torch

from ..base import CAPTURE_LOCK, Pool

if TYPE_CHECKING:
    from .backend import AcceleratorBackend
    from .graph import RecordedGraph

current_stream = torch._C._accelerator_getStream
"""A device's current stream, by the device's index; ``torch.accelerator.current_stream`` takes ten times as long."""

Handle: TypeAlias = tuple[int, int]


class AcceleratorPool(Pool):
    """A private pool of a device's caching allocator. All its captures run on the backend's capture stream.

    The allocator reuses a block only on the stream that the block was allocated for. Graphs therefore share memory
    only if they were captured on the same stream. Methods are called with ``lock`` held, but for ``nbytes`` and
    ``trim``.
    """

    def __init__(self, backend: "AcceleratorBackend") -> None:
        super().__init__()
        self.backend = backend
        self.device = backend.device
        self._graphs: WeakSet[RecordedGraph] = WeakSet()
        """Those that are not released; one that somebody drops goes by itself."""
        self._last: Any = None
        self._placeholder: Any = None
        self._handles: list[Handle] = []
        """The handles that may have memory. The last one is the placeholder's, if there is a placeholder."""

    def handle(self) -> Handle:
        """The handle to capture into, made on first use.

        Call it with ``CAPTURE_LOCK`` held and no capture in progress.
        """
        if self._placeholder is None:
            new = self.new_handle()
            graph = self.backend.make_graph(new)
            with self.backend.use_stream(self.backend.capture_stream):
                try:
                    self.begin_recording(graph, new)
                    end_recording(graph)
                except BaseException:
                    stop_recording(graph, self.backend)
                    self.break_off(new)
                    raise
            self._placeholder = graph
            self._handles.append(new or graph.pool())
        return self._handles[-1]

    def give_up_handle(self) -> None:
        """After a capture that ended with an error: see Note [a handle is given up]. Never raises.

        Call it with ``CAPTURE_LOCK`` held.
        """
        placeholder, self._placeholder = self._placeholder, None
        if placeholder is not None:
            self.break_off(self._handles[-1])
            with contextlib.suppress(RuntimeError):
                placeholder.reset()
            self._forget_empty()
        with contextlib.suppress(RuntimeError):  # the next capture tries again, and reports
            self.handle()

    def begin_recording(self, graph: Any, handle: Handle | None) -> None:
        """Begin to record the current stream's work into ``graph``, with memory of ``handle``.

        Raises what torch raises. See Notes [torch's own operators at the beginning] and
        [a graph that could not begin is never destroyed].
        """
        try:
            with torch._C._DisableTorchDispatch():
                self.capture_begin(graph, handle)
        except BaseException:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
            raise

    def capture_begin(self, graph: Any, handle: Handle | None) -> None:
        """Ask torch to begin. Here the graph was made for its handle and in its mode."""
        graph.capture_begin()

    def new_handle(self) -> Handle | None:
        """A fresh handle, or None if the first graph brings one."""
        return None

    def break_off(self, handle: Any) -> None:
        """End what a failed capture left open in the allocator, if torch can do that. Never raises."""

    def segments(self) -> Any:
        """The allocator's segments, of all devices and pools; none if the device's module in torch has no snapshot."""
        return getattr(torch.get_device_module(self.device), "memory_snapshot", tuple)()

    def hold_graph(self, graph: "RecordedGraph") -> None:
        """Note that a graph was captured into the pool. Call it with ``CAPTURE_LOCK`` held."""
        self._graphs.add(graph)

    def release_graph(self, graph: "RecordedGraph") -> None:
        """Note that a graph was released; free the memory with the last one. Call it with ``CAPTURE_LOCK`` held."""
        self._graphs.discard(graph)
        if not self._graphs:
            self._let_go()

    def used_on(self, stream: Any) -> None:
        """Note that work on the pool's memory ends on ``stream``. Static inputs are used there, too: nobody else gets
        their memory before that work is done, even if they are dropped and not released."""
        self._last = stream
        with torch._C._DisableTorchDispatch():  # a capturer may be watching operators, at a break
            for held in self.inputs.valuerefs():
                inputs = held()
                for buffer in inputs.buffers if inputs is not None else ():
                    buffer.record_stream(stream)

    def order_after_last_use(self) -> None:
        """Make the current stream wait for the stream that last used the pool; if they are one, only compare them."""
        current = current_stream(self.device.index)
        if self._last is None or current != self._last:
            if self._last is not None:
                current.wait_stream(self._last)
            self.used_on(current)

    def wait_until_idle(self) -> None:
        """Block until everything that used the pool's memory is done."""
        if self._last is not None:
            self._last.record_event().synchronize()

    @property
    def nbytes(self) -> int:
        """Bytes of the allocator's segments that belong to the pool; 0 if the allocator cannot tell."""
        held = self._bytes_by_handle()
        return sum(held[handle] for handle in self._handles)

    def trim(self) -> None:
        """Give back what captures that failed have left, if there is no graph; not inside a capture of the same
        thread, which may be the pool's first."""
        with CAPTURE_LOCK:
            if not self._graphs and not self.backend.is_capturing():
                self._let_go()

    def _let_go(self) -> None:
        """Give the handle and its memory back.

        Memory that no tensor uses goes back to the driver now, together with the rest of the allocator's cache, because
        torch gives the memory of a finished pool to nobody else. Memory that is still in use goes back when the
        allocator next empties its cache.
        """
        placeholder, self._placeholder = self._placeholder, None
        if placeholder is not None:
            placeholder.reset()
        del placeholder  # only now does torch free what it keeps for a graph outside of the pool
        if self._handles:
            self.backend.api.empty_cache()
            self._forget_empty()

    def _forget_empty(self) -> None:
        """Drop the handles whose memory is gone: they never get memory again."""
        held = self._bytes_by_handle()
        self._handles = [handle for handle in self._handles if held[handle]]

    def _bytes_by_handle(self) -> Counter[Handle]:
        held: Counter[Handle] = Counter()
        with contextlib.suppress(RuntimeError):  # an allocator that has no snapshot
            for segment in self.segments():
                if segment["device"] == self.device.index:
                    held[tuple(segment["segment_pool_id"])] += int(segment["total_size"])
        return held


def end_recording(graph: Any) -> None:
    """End a recording. It may be empty: a callable may do nothing before its first break, as a placeholder does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Graph is empty")
        graph.capture_end()


def stop_recording(graph: Any, backend: "AcceleratorBackend") -> None:
    """End the recording of the current stream, if there still is one, as where an interrupt came upon it. Never
    raises."""
    with contextlib.suppress(RuntimeError):
        if backend.is_capturing():
            end_recording(graph)
