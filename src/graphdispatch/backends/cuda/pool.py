"""The memory that graphs of one pool share, and what becomes of it when a capture fails.

Note [a pool lives by its placeholder]
    The allocator counts the graphs of a pool handle and takes the memory back when the last one goes; a handle whose
    count fell to zero must not be used again. An empty graph captured into each handle keeps the count above zero
    between the captures. When the last of the pool's own graphs goes, its placeholder and memory go too, and the
    next capture gets a new handle: torch gives the memory of a pool to nobody else, so that keeping it for a capture
    that may never come would break the promise of a memory budget.

Note [torch's own operators at the beginning]
    ``capture_begin`` writes the generator's seed and offset to the device with ordinary operators. A mode that watches
    operators would take them for the callable's: after a break a recording begins while the capturer watches. They are
    hidden from it.

Note [a graph that could not begin is never destroyed]
    ``capture_begin`` first registers the graph with the random generator. Where that fails, for want of memory or since
    the device is lost, the destructor of the graph finds it not registered, throws, and so ends the process. Nothing
    tells from outside how far it came, so that each graph which could not begin is kept for good: some hundred bytes.

Note [after a failed capture]
    ``capture_end`` throws before it has told the allocators that the recording is over. The device allocator would
    then refuse the handle for ever ("already recording to mempool_id"), put off the release of blocks that other
    streams used, and never free the pool. We end that recording ourselves and give back the count that the capture
    took. The allocator of pinned host memory keeps its own list, which Python cannot reach, so the handle itself is
    given up: graphs captured before keep it (and its memory) until they go, later ones get a new handle. The
    placeholder of the new handle is recorded at once, because an orderly capture also puts right the random
    generator, which torch versions with one state for all captures leave in capture mode.
"""

import contextlib
import ctypes
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from ...errors import BackendError
from ..base import CAPTURE_LOCK, Pool

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

__all__ = ["CUDAPool", "begin_recording", "may_be_empty"]

_Handle: TypeAlias = "_POOL_HANDLE"  # a pair of integers
_ANSWER_S = 200e-6  # how long an idle device may take to say that it has reached an event


class _Hold(NamedTuple):
    """A pool handle and the empty graph that keeps it: see Note [a pool lives by its placeholder]."""

    handle: _Handle
    placeholder: torch.cuda.CUDAGraph


class CUDAPool(Pool):
    """A private pool of the caching allocator; its captures all run on ``capture_stream``.

    The allocator re-uses a block only on the stream that it was allocated for, so that graphs share memory only if
    they were captured on the same stream. All methods are called with ``lock`` held.
    """

    def __init__(self, device: torch.device, capture_stream: Callable[[], torch.cuda.Stream]) -> None:
        super().__init__()
        self.device = device
        self._capture_stream = capture_stream
        self._hold: _Hold | None = None
        self._abandoned: list[_Handle] = []
        self._graphs = 0
        self._closed = False
        self._index = int(device.index)
        self._raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
        self._last_raw: int | None = None
        self._last: torch.cuda.Stream | None = None
        self._mark: torch.cuda.Event | None = None
        self._mark_generation = -1

    def handle(self) -> _Handle:
        """The handle to capture into, made on first use; with ``CAPTURE_LOCK`` held and no capture under way.

        Raises ``BackendError`` after ``close``.
        """
        if self._closed:
            raise BackendError("the pool is closed; make another with make_pool()")
        if self._hold is None:
            self._hold = _new_hold(self.device, self._capture_stream())
        return self._hold.handle

    def give_up_handle(self) -> None:
        """Leave the current handle to its graphs: see Note [after a failed capture]. Never raises.

        With ``CAPTURE_LOCK`` held, after the capture has ended with an error.
        """
        hold, self._hold = self._hold, None
        if hold is not None:
            self._forget_empty()
            self._abandoned.append(hold.handle)
            _end_recording(self._index, hold.handle)
            with contextlib.suppress(RuntimeError):
                hold.placeholder.reset()
        with contextlib.suppress(RuntimeError, BackendError):  # the next capture tries again, and reports
            self.handle()

    def hold_graph(self) -> None:
        """Note that a graph was captured into the pool; with ``CAPTURE_LOCK`` held."""
        self._graphs += 1

    def release_graph(self) -> None:
        """Note that one of those graphs is gone; the memory goes with the last. With ``CAPTURE_LOCK`` held."""
        self._graphs -= 1
        if not self._graphs:
            self._let_go()

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Note that work on the pool's memory ends on ``stream``."""
        self._last, self._last_raw = stream, int(stream.cuda_stream)
        self._mark = None

    def order_after_last_use(self) -> None:
        """Order the current stream after the one that last used the pool; one comparison when they are the same."""
        if self._raw_stream(self._index) == self._last_raw:
            return
        current = torch.cuda.current_stream(self.device)
        if self._last is not None:
            current.wait_stream(self._last)
        self.used_on(current)

    def is_idle(self) -> bool:
        """Whether no replay of the pool is in flight; False where that cannot be asked, as inside a capture.

        The first to ask after a replay may wait for a moment, since also an idle device takes some time to say so.
        """
        if self._last is None:
            return True
        try:
            if torch.cuda.is_current_stream_capturing():
                return False
            if self._mark is not None and self._mark_generation == self.generation:
                return bool(self._mark.query())
            self._mark, self._mark_generation = self._last.record_event(), self.generation
            deadline = time.perf_counter() + _ANSWER_S
            while not self._mark.query():
                if time.perf_counter() > deadline:
                    return False
            return True
        except RuntimeError:  # the stream is being captured by someone else
            return False

    def wait_until_idle(self) -> None:
        """Block until everything that used the pool's memory is done."""
        if self._last is not None:
            self._last.record_event().synchronize()

    @property
    def nbytes(self) -> int:
        """Bytes of the allocator's segments that belong to the pool; 0 where the allocator keeps no account."""
        handles = [*self._abandoned, *([] if self._hold is None else [self._hold.handle])]
        return sum(_segment_bytes(self._index, handle) for handle in handles)

    def close(self) -> None:
        """Let go of the memory; idempotent. Not to be called inside a capture of the same thread.

        What no graph and no tensor uses any more goes back to the driver now, with the rest of the allocator's cache,
        since torch gives the memory of a finished pool to nobody else; what is still used then, when the allocator
        next empties its cache.
        """
        with CAPTURE_LOCK:
            self._closed = True
            self._let_go()

    def _let_go(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            self._abandoned.append(hold.handle)
            hold.placeholder.reset()
        del hold  # torch frees what it keeps for a graph beside the pool only when the object goes
        if self._abandoned:
            torch.cuda.empty_cache()
            self._forget_empty()

    def _forget_empty(self) -> None:
        """Count no more those handles whose memory is gone: they get none any more."""
        self._abandoned = [kept for kept in self._abandoned if _segment_bytes(self._index, kept)]

    def __repr__(self) -> str:
        condition = "closed" if self._closed else "open" if self._hold is not None else "empty"
        return f"<CUDAPool {self.device} {condition} generation={self.generation}>"


def begin_recording(graph: torch.cuda.CUDAGraph, handle: _Handle) -> None:
    """Begin to record the current stream's work into ``graph``, with the memory of ``handle``.

    Raises what torch raises. See Notes [torch's own operators at the beginning] and
    [a graph that could not begin is never destroyed].
    """
    try:
        with torch._C._DisableTorchDispatch():
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
    except BaseException:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        raise


@contextlib.contextmanager
def may_be_empty() -> Iterator[None]:
    """No warning about an empty graph within a ``with`` block, where that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*The CUDA Graph is empty")
        yield


def _new_hold(device: torch.device, stream: torch.cuda.Stream) -> _Hold:
    """A fresh handle with an empty graph in it."""
    graph = torch.cuda.CUDAGraph()
    handle = torch.cuda.graph_pool_handle()
    with torch.cuda.device(device), torch.cuda.stream(stream), may_be_empty():
        try:
            begin_recording(graph, handle)
            graph.capture_end()
        except RuntimeError:
            _end_recording(int(device.index), handle)
            raise
    return _Hold(handle, graph)


def _end_recording(index: int, handle: _Handle) -> None:
    """End a recording that a failed capture left open in the allocator, if it did, and give back its count."""
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, handle)
        # Reached only if the recording was open; otherwise the graph gives back its count itself.
        torch._C._cuda_releasePool(index, handle)


def _raw_stream(index: int) -> int:
    """The driver's handle of the device's current stream, by the documented and slower way."""
    return int(torch.cuda.current_stream(index).cuda_stream)


def _segment_bytes(index: int, handle: _Handle) -> int:
    """Bytes of one handle's segments on one device."""
    known = inspect.signature(torch.cuda.memory_snapshot).parameters
    wanted: dict[str, Any] = {"mempool_id": handle, "include_traces": False}
    try:
        kept = {name: value for name, value in wanted.items() if name in known}
        segments = torch.cuda.memory_snapshot(**kept)
    except RuntimeError:  # cudaMallocAsync has no snapshot
        return 0
    return sum(
        int(segment["total_size"])
        for segment in segments
        if segment.get("device", index) == index and tuple(segment.get("segment_pool_id", handle)) == handle
    )
