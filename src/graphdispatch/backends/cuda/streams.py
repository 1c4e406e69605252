"""Streams and events of the CUDA backend: thin wrappers of ``torch.cuda.Stream`` and ``torch.cuda.Event``."""

from contextlib import AbstractContextManager

import torch

from ..accelerator.streams import DeviceStream

__all__ = ["CUDAStream"]


class CUDAStream(DeviceStream):
    """A CUDA stream."""

    def entered(self) -> AbstractContextManager[object]:
        """A block in which this stream is current."""
        return torch.cuda.stream(self.native)

    def __repr__(self) -> str:
        return f"<CUDAStream {self.native.device} {self.native.cuda_stream:#x}>"
