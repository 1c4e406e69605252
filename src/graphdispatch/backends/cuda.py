"""The CUDA backend of one device, its streams, and the memory that the graphs of one pool share.

Note [cuBLAS workspaces]
    cuBLAS calls use a scratch buffer that torch keeps for each handle and stream. A graph holds its raw address.
    Without care, the first capture allocates that buffer in *its* pool, and all later captures on the stream use the
    same buffer. When any graph of that stream is released, torch drops the buffer (pytorch#193402), and the other
    graphs write to memory that may be gone or belong to someone else. We therefore clear the buffers twice. We clear
    them before each capture, so that the capture allocates its own buffer inside its pool. We clear them after it, so
    that the buffer is free in the pool, like any intermediate, and nobody else can take it. From then on torch has no
    buffer of the capture stream to drop, so releasing a graph harms no other graph. Graphs of one pool may share those
    bytes, for the same reason as intermediates: only one of them runs at a time. The price is one buffer in each pool.
    One case remains: torch can only clear the buffers of *all* streams. If somebody else captured a graph after
    warming up on the same stream, its buffer lies outside its pool, and that graph may lose it. The same happens when
    ``torch.compile`` records graphs.

Note [after a failed capture]
    ``capture_end`` throws before it tells the allocators that the recording is over. The device allocator would then
    refuse the handle forever ("already recording to mempool_id"), delay the release of blocks that other streams used,
    and never free the pool. We end that recording ourselves and give back the count that the capture took. The
    allocator of pinned host memory keeps its own list, which Python cannot reach, so we give up the handle itself: see
    Note [a handle is given up] in ``accelerator/pool.py``.

Note [the segments of all pools]
    ``memory_snapshot(mempool_id=...)`` of torch drops references to the handle's numbers that it never took
    (https://github.com/pytorch/pytorch/pull/196366). A number above 256 is then freed while it is in use, and the
    process crashes at some later allocation. We read the segments of all pools and choose ours.

Note [a hit in two launches]
    torch copies the inputs of a call by a launch for each dtype, pads each by another one, and clones each output by a
    third. ``copies.cu`` has one kernel for all inputs, which the core launches by the driver's own function, and one
    for all outputs, which graphs end with (``accelerator/outlet.py``). They have not been measured on a device yet, and
    so they are off: ``GRAPHDISPATCH_COPY_KERNEL=1`` in the environment, when a pool is made, turns them on. Torch still
    copies whatever is not dense memory of the device, more tensors than they take, and for pad functions of the user's.
"""

import contextlib
import ctypes
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..errors import BackendError
from .accelerator.backend import AcceleratorBackend
from .accelerator.pool import AcceleratorPool, Handle
from .base import CopyKernel, Event, Pool, Stream
from .diagnosis import LOST, MEMORY, unsafe

_SPOILT = unsafe("an earlier operation could not be captured and its own error was swallowed; let that error through")


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
        """The allocator's segments: see Note [the segments of all pools]."""
        return torch.cuda.memory_snapshot(include_traces=False)


class CUDABackend(AcceleratorBackend):
    """CUDA graphs on one GPU, also where some package has registered another accelerator with torch.

    All captures of a device run on one stream, made on first use. Nothing touches CUDA before it is needed.
    """

    name = "cuda"
    device_type = "cuda"
    api: ClassVar[Any] = torch.cuda
    pool_type = CUDAPool
    errors = AcceleratorBackend.errors | {
        "cublas_status_alloc_failed": MEMORY,
        "cannot copy between cpu and cuda tensors": unsafe(
            "it copies pageable host memory; keep the data on the device, or pin it"
        ),
        "operation not permitted when stream is capturing": unsafe(
            "it waits for the device (.item(), .cpu(), nonzero, printing a tensor); keep values on the device"
        ),
        "previous error during capture": _SPOILT,
        "invalid stream capture status": _SPOILT,  # newer versions of torch check before CUDA does
        "unjoined work": unsafe("a side stream was not joined; let the current stream wait for it at the end"),
        "uncaptured work in another stream": unsafe(
            "it waits for a side stream that is not part of the capture; let that stream wait for this one first"
        ),
        "depend on a capturing blocking stream": unsafe(
            "work went to the legacy default stream; use the current stream"
        ),
        "last recorded in a capturing stream": unsafe(
            "the host waits for an event of the capture; wait on the device (event.wait(stream)), or after it"
        ),
        "during cuda graph capture": unsafe("an operation in it refuses to be captured"),
        "illegal memory access": LOST,
        "device-side assert triggered": LOST,  # torch names device-side assertions in every error of CUDA
        "unspecified launch failure": LOST,
    }

    @classmethod
    def is_available(cls) -> bool:
        """Whether torch was built with CUDA and sees a GPU. Never raises."""
        try:
            return bool(torch.cuda.is_available())
        except (RuntimeError, AssertionError, Warning):  # an old driver warns, and warnings may be errors
            return False

    @classmethod
    def default_index(cls) -> int:
        """The index of the calling thread's current device."""
        return int(torch.cuda.current_device())

    def set_index(self, index: int) -> None:
        """Make another device current on the calling thread."""
        torch.cuda.set_device(index)

    def memory_info(self) -> tuple[int, int]:
        """The device's free bytes, and all."""
        return torch.cuda.mem_get_info(self.device)

    def make_pool(self) -> Pool:
        """A new, empty pool; it takes no memory before the first capture."""
        if self.copy_kernel is None and os.environ.get("GRAPHDISPATCH_COPY_KERNEL") == "1":
            self.copy_kernel = _compile_copies(self.device)
        return super().make_pool()

    def prepare_capture(self) -> None:
        """Forget the workspaces, and make room."""
        torch._C._cuda_clearCublasWorkspaces()  # Note [cuBLAS workspaces]
        _make_room(self.device)

    def clean_up_capture(self) -> None:
        """Forget the workspaces of the capture."""
        torch._C._cuda_clearCublasWorkspaces()  # Note [cuBLAS workspaces]

    def is_capturing(self) -> bool:
        """Whether anyone is capturing the calling thread's current stream. Never raises."""
        try:
            return bool(torch.cuda.is_current_stream_capturing())
        except (RuntimeError, AssertionError):  # a build without CUDA
            return False

    def current_stream(self) -> Stream:
        """The device's current stream on the calling thread."""
        return torch.cuda.current_stream(self.device)

    def next_stream(self) -> Stream:
        """The stream that torch hands out next."""
        return torch.cuda.Stream(self.device)

    @contextlib.contextmanager
    def use_stream(self, stream: Stream) -> Iterator[Stream]:
        """Make ``stream`` current within a ``with`` block."""
        with torch.cuda.stream(stream):
            yield stream

    def make_event(self, *, timing: bool = False) -> Event:
        """A new event; ``timing`` allows ``elapsed_time``."""
        return torch.cuda.Event(enable_timing=timing)

    def make_graph(self, handle: Handle | None) -> Any:
        """An empty graph; CUDA is given the handle when a recording begins."""
        return torch.cuda.CUDAGraph()


def _make_room(device: torch.device) -> None:
    """Return cached memory to the driver if most of the memory that this process may still use is cached.

    The allocator cannot do that by itself during a capture; it would report that no memory is left.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    if reserved - torch.cuda.memory_allocated(device) > min(free, allowed - reserved):
        torch.cuda.empty_cache()


def _compile_copies(device: torch.device) -> CopyKernel | None:
    """The kernels of Note [a hit in two launches]; None with a warning where they cannot be had."""
    try:
        with torch.cuda.device(device):
            source = Path(__file__).with_name("copies.cu").read_text(encoding="utf-8")
            kernel, last = (torch.cuda._compile_kernel(source, name) for name in ("copy_inputs", "give_outputs"))
            driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
            driver.cuCtxGetCurrent(ctypes.byref(context))
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        warnings.warn(
            f"torch copies the inputs of graphs on {device}, since the kernels of GRAPHDISPATCH_COPY_KERNEL=1 cannot "
            f"be compiled: {error}",
            stacklevel=2,
        )
        return None
    launch, current = (ctypes.cast(f, ctypes.c_void_p).value for f in (driver.cuLaunchKernel, driver.cuCtxGetCurrent))
    give = partial(_give, last)
    return CopyKernel(launch or 0, current or 0, kernel.func.value, context.value or 0, give)


def _give(kernel: Any, places: torch.Tensor, blocks: int, outputs: int) -> None:
    kernel((blocks, outputs, 1), (256, 1, 1), [places])


def _refuse_forked(index: int) -> int:
    raise BackendError(
        f"cuda:{index} cannot be used in a process that was forked after CUDA was; start it with the method 'spawn' "
        "(multiprocessing.set_start_method), and make its graphs there"
    )
