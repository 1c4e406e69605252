"""The CUDA backend of one device, and its streams."""

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from ..accelerator.backend import AcceleratorBackend
from ..accelerator.pool import Handle
from ..accelerator.streams import DeviceEvent, DeviceStream
from ..base import Event
from .graph import CUDACapture
from .pool import CUDAPool

__all__ = ["CUDABackend"]


class CUDAStream(DeviceStream):
    """A CUDA stream."""

    def entered(self) -> AbstractContextManager[object]:
        """A block in which this stream is current."""
        return torch.cuda.stream(self.native)


class CUDABackend(AcceleratorBackend):
    """CUDA graphs on one GPU, also where some package has registered another accelerator with torch.

    All captures of a device run on one stream, made on first use. Nothing touches CUDA before it is needed.
    """

    name = "cuda"
    device_type = "cuda"
    api: ClassVar[Any] = torch.cuda
    pool_type = CUDAPool
    capture_type = CUDACapture

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

    def is_capturing(self) -> bool:
        """Whether anyone is capturing the calling thread's current stream. Never raises."""
        try:
            return bool(torch.cuda.is_current_stream_capturing())
        except (RuntimeError, AssertionError):  # a build without CUDA
            return False

    def current_stream(self) -> DeviceStream:
        """The device's current stream on the calling thread."""
        return CUDAStream(torch.cuda.current_stream(self.device))

    def next_stream(self) -> DeviceStream:
        """The stream that torch hands out next."""
        return CUDAStream(torch.cuda.Stream(self.device))

    def make_event(self, *, timing: bool = False) -> Event:
        """A new event; ``timing`` allows ``elapsed_ms``."""
        return DeviceEvent(torch.cuda.Event(enable_timing=timing), self.current_stream)

    def make_graph(self, handle: Handle | None) -> Any:
        """An empty graph; CUDA is given the handle when a recording begins."""
        return torch.cuda.CUDAGraph()
