"""The CUDA backend of one device, and its streams."""

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from ...errors import BackendError
from ..accelerator.backend import AcceleratorBackend
from ..accelerator.streams import DeviceEvent, DeviceStream
from ..base import CAPTURE_LOCK, Capture, Event, Pool, Stream
from .graph import CUDACapture
from .pool import CUDAPool

__all__ = ["CUDABackend"]


class CUDAStream(DeviceStream):
    """A CUDA stream."""

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """A block in which this stream is current."""
        return torch.cuda.stream(self.native)

    def __repr__(self) -> str:
        return f"<CUDAStream {self.native.device} {self.native.cuda_stream:#x}>"


class CUDABackend(AcceleratorBackend):
    """CUDA graphs on one GPU.

    All captures of a device run on one stream, made on first use. Nothing touches CUDA before it is needed.
    """

    name = "cuda"
    device_type = "cuda"

    @classmethod
    def is_available(cls) -> bool:
        """Whether torch was built with CUDA and sees a GPU. Never raises."""
        try:
            return bool(torch.cuda.is_available())
        except (RuntimeError, AssertionError, Warning):  # an old driver warns, and warnings may be errors
            return False

    @classmethod
    def default_index(cls) -> int | None:
        """The index of the calling thread's current device."""
        return int(torch.cuda.current_device())

    def make_pool(self) -> Pool:
        """A new, empty pool; it takes no memory before the first capture."""
        return CUDAPool(self.device, lambda: self._capture_stream)

    def begin_capture(self, pool: Pool) -> Capture:
        """Start to record the calling thread's work into ``pool``, in ``thread_local`` mode.

        Blocks while another thread captures. Raises ``CaptureError`` inside a capture and ``BackendError`` for a pool
        of another device.
        """
        if not isinstance(pool, CUDAPool) or pool.device != self.device:
            raise BackendError(f"pool must come from the backend of {self.device}, got {pool!r}; use its make_pool()")
        return CUDACapture(pool)

    def is_capturing(self) -> bool:
        """Whether anyone is capturing the calling thread's current stream. Never raises."""
        try:
            return bool(torch.cuda.is_current_stream_capturing())
        except (RuntimeError, AssertionError):  # a build without CUDA
            return False

    def current_stream(self) -> Stream:
        """The device's current stream on the calling thread."""
        return CUDAStream(torch.cuda.current_stream(self.device))

    def make_stream(self) -> Stream:
        """A new stream of the device."""
        return CUDAStream(torch.cuda.Stream(self.device))

    @contextlib.contextmanager
    def use_stream(self, stream: Stream) -> Iterator[Stream]:
        """Make ``stream`` current within a ``with`` block."""
        with torch.cuda.stream(CUDAStream.native_of(stream)):
            yield stream

    def make_event(self, *, timing: bool = False) -> Event:
        """A new event; ``timing`` allows ``elapsed_ms``."""
        return DeviceEvent(torch.cuda.Event(enable_timing=timing), self.current_stream)

    def synchronize(self) -> None:
        """Block until all work on the device is done, and while another thread captures: see the accelerators'."""
        with CAPTURE_LOCK:
            torch.cuda.synchronize(self.device)

    def rng_state(self) -> Any:
        """The state of the device's default generator, as a tensor on the host."""
        return torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: Any) -> None:
        """Put a state from ``rng_state`` back."""
        torch.cuda.set_rng_state(state, self.device)

    def weak_reference(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the same memory that does not keep it: for an output whose memory the pool may use again.

        The memory stays mapped while the pool lives, so reading it never faults. Its content is whatever was last
        written there. If such a tensor cannot be made, the result is ``tensor`` itself.
        """
        storage = tensor.untyped_storage()
        is_plain = type(tensor) is torch.Tensor and tensor.is_cuda and tensor.layout is torch.strided
        if not is_plain or tensor.is_conj() or tensor.is_neg() or storage.data_ptr() == 0:
            return tensor
        alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        metadata = {
            "size": tensor.shape,
            "stride": tensor.stride(),
            "dtype": tensor.dtype,
            "device": tensor.device,
            "storage_offset": tensor.storage_offset(),
        }
        result: torch.Tensor = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, alias)
        return result

    @cached_property
    def _capture_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # first asked for with CAPTURE_LOCK held
