"""The memory that the graphs of one pool share, and what happens to it when a capture fails.

Note [a pool lives by its placeholder]
    The allocator counts the graphs of a pool handle and takes the memory back when the last one is gone. A handle whose
    count fell to zero must not be used again. We therefore capture an empty graph, the placeholder, into each handle.
    It keeps the count above zero between captures. When the last of the pool's own graphs is released, we release the
    placeholder and the memory too, and the next capture gets a new handle. The reason: torch gives the memory of a
    pool to nobody else. Keeping it for a capture that may never come would break the promise of a memory budget.

Note [torch's own operators at the beginning]
    ``capture_begin`` writes the generator's seed and offset to the device with ordinary operators. After a break, a
    recording begins while the capturer is watching operators, and it would take these for the callable's. They are
    hidden from it.

Note [a graph that could not begin is never destroyed]
    ``capture_begin`` first registers the graph with the random generator. This can fail if there is no memory left or
    the device is lost. The destructor of the graph then finds that it is not registered, throws, and ends the process.
    We cannot see how far ``capture_begin`` came, so we keep every graph that could not begin: some hundred bytes each.

Note [after a failed capture]
    ``capture_end`` throws before it tells the allocators that the recording is over. The device allocator would then
    refuse the handle forever ("already recording to mempool_id"), delay the release of blocks that other streams used,
    and never free the pool. We end that recording ourselves and give back the count that the capture took. The
    allocator of pinned host memory keeps its own list, which Python cannot reach, so we give up the handle itself.
    Graphs captured before keep it, and its memory, until they are released; later graphs get a new handle. We record
    the placeholder of the new handle at once, because a regular capture also repairs the random generator: torch
    versions with one generator state for all captures leave it in capture mode.

Note [all segments are asked for]
    ``memory_snapshot(mempool_id=...)`` of torch drops references to the handle's numbers that it never took
    (https://github.com/pytorch/pytorch/pull/196366). A number above 256 is then freed while it is in use, and the
    process crashes at some later allocation. We ask for the segments of all pools and choose ours.
"""

import contextlib
import ctypes
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch

from ...errors import BackendError
from ..accelerator.pool import DevicePool

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

__all__ = ["CUDAPool", "begin_recording", "may_be_empty"]

_Handle: TypeAlias = "_POOL_HANDLE"  # a pair of integers


class _Hold(NamedTuple):
    """A pool handle and the empty graph that keeps it: see Note [a pool lives by its placeholder]."""

    handle: _Handle
    placeholder: torch.cuda.CUDAGraph


class CUDAPool(DevicePool):
    """A private pool of CUDA's caching allocator."""

    def __init__(self, device: torch.device, capture_stream: Callable[[], torch.cuda.Stream]) -> None:
        super().__init__(device, capture_stream)
        self._hold: _Hold | None = None
        self._abandoned: list[_Handle] = []
        self._index = int(device.index)
        self._raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # only with CUDA
        self._last_raw: int | None = None

    def after_fork(self) -> None:
        """CUDA cannot be used in a forked child, and every use of the pool says so."""
        super().after_fork()
        self._raw_stream = _refuse_forked

    def handle(self) -> _Handle:
        """The handle to capture into, made on first use."""
        self.check_open()
        if self._hold is None:
            self._hold = _new_hold(self.device, self.capture_stream())
        return self._hold.handle

    def give_up_handle(self) -> None:
        """Leave the current handle to its graphs: see Note [after a failed capture]. Never raises."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._forget_empty()
            self._abandoned.append(hold.handle)
            _end_recording(self._index, hold.handle)
            with contextlib.suppress(RuntimeError):
                hold.placeholder.reset()
        with contextlib.suppress(RuntimeError, BackendError):  # the next capture tries again, and reports
            self.handle()

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Note that work on the pool's memory ends on ``stream``."""
        super().used_on(stream)
        self._last_raw = int(stream.cuda_stream)

    def order_after_last_use(self) -> None:
        """Make the current stream wait for the stream that last used the pool; if they are one, only compare them."""
        if self._raw_stream(self._index) == self._last_raw:
            return
        current = torch.cuda.current_stream(self.device)
        if self._last is not None:
            current.wait_stream(self._last)
        self.used_on(current)

    def is_capturing(self) -> bool:
        """Whether anyone captures the current stream."""
        return bool(torch.cuda.is_current_stream_capturing())

    @property
    def nbytes(self) -> int:
        """Bytes of the allocator's segments that belong to the pool; 0 if the allocator cannot tell."""
        handles = [*self._abandoned, *([] if self._hold is None else [self._hold.handle])]
        known = _bytes_by_handle(self._index)
        return sum(known[handle] for handle in handles)

    def let_go(self) -> None:
        """Give the handle and its memory back."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._abandoned.append(hold.handle)
            hold.placeholder.reset()
        del hold  # only now does torch free what it keeps for a graph outside of the pool
        if self._abandoned:
            torch.cuda.empty_cache()
            self._forget_empty()

    def _forget_empty(self) -> None:
        """Drop the handles whose memory is gone: they never get memory again."""
        known = _bytes_by_handle(self._index)
        self._abandoned = [handle for handle in self._abandoned if known[handle]]

    def __repr__(self) -> str:
        condition = "closed" if self._closed else "open" if self._hold is not None else "empty"
        return f"<CUDAPool {self.device} {condition} generation={self.generation}>"


def _refuse_forked(index: int) -> int:
    raise BackendError(
        f"cuda:{index} cannot be used in a process that was forked after CUDA was; start it with the method 'spawn' "
        "(multiprocessing.set_start_method), and make its graphs there"
    )


def begin_recording(graph: torch.cuda.CUDAGraph, handle: _Handle) -> None:
    """Begin to record the current stream's work into ``graph``, with memory of ``handle``.

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
    """Suppress the warning about an empty graph within a ``with`` block, where a graph may be empty."""
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
    """If a failed capture left a recording open in the allocator, end it and give back its count."""
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, handle)
        # Reached only if the recording was open. Otherwise the graph gives back its count itself.
        torch._C._cuda_releasePool(index, handle)


def _bytes_by_handle(index: int) -> Counter[_Handle]:
    """Bytes of the segments of each handle on one device; see Note [all segments are asked for]."""
    known: Counter[_Handle] = Counter()
    with contextlib.suppress(RuntimeError):  # cudaMallocAsync has no snapshot
        for segment in torch.cuda.memory_snapshot(include_traces=False):
            if segment["device"] == index:
                known[cast("_Handle", tuple(segment["segment_pool_id"]))] += int(segment["total_size"])
    return known
