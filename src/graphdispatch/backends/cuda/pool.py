"""The memory that the graphs of one pool share, and what happens to it when a capture fails.

Note [after a failed capture]
    ``capture_end`` throws before it tells the allocators that the recording is over. The device allocator would then
    refuse the handle forever ("already recording to mempool_id"), delay the release of blocks that other streams used,
    and never free the pool. We end that recording ourselves and give back the count that the capture took. The
    allocator of pinned host memory keeps its own list, which Python cannot reach, so we give up the handle itself: see
    Note [a handle is given up] in ``accelerator/pool.py``.

Note [all segments are asked for]
    ``memory_snapshot(mempool_id=...)`` of torch drops references to the handle's numbers that it never took
    (https://github.com/pytorch/pytorch/pull/196366). A number above 256 is then freed while it is in use, and the
    process crashes at some later allocation. We ask for the segments of all pools and choose ours.
"""

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ...errors import BackendError
from ..accelerator.pool import AcceleratorPool, Handle

if TYPE_CHECKING:
    from .backend import CUDABackend

__all__ = ["CUDAPool"]


class CUDAPool(AcceleratorPool):
    """A private pool of CUDA's caching allocator."""

    def __init__(self, backend: "CUDABackend") -> None:
        super().__init__(backend)
        self._index = int(self.device.index)
        self._raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # only with CUDA
        self._last_raw: int | None = None

    def after_fork(self) -> None:
        """CUDA cannot be used in a forked child, and every use of the pool says so."""
        super().after_fork()
        self._raw_stream = _refuse_forked

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

    def capture_begin(self, graph: torch.cuda.CUDAGraph, handle: Any) -> None:
        """Begin in the mode that forbids only the capture's own thread to wait for the device."""
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")

    def new_handle(self) -> Handle:
        """A fresh handle."""
        return torch.cuda.graph_pool_handle()

    def break_off(self, handle: Any) -> None:
        """End what a failed capture left open in the allocator: see Note [after a failed capture]. Never raises."""
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._index, handle)
            # Reached only if the recording was open. Otherwise the graph gives back its count itself.
            torch._C._cuda_releasePool(self._index, handle)

    def segments(self) -> Any:
        """The allocator's segments: see Note [all segments are asked for]."""
        return torch.cuda.memory_snapshot(include_traces=False)


def _refuse_forked(index: int) -> int:
    raise BackendError(
        f"cuda:{index} cannot be used in a process that was forked after CUDA was; start it with the method 'spawn' "
        "(multiprocessing.set_start_method), and make its graphs there"
    )
