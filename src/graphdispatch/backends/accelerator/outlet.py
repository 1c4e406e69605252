"""Where a hit says whereto a graph is to put its outputs.

Note [outputs by the graph]
    The kernel that copies the inputs of a hit notes on the device where new tensors for the outputs lie, and how long
    they are. The last kernel of the graph copies the outputs there, and what is wanted is forgotten behind it. So a
    replay that wants nothing, as one by Python, writes nothing. Only a replay that stops between its two launches
    leaves something noted; the core then keeps those tensors for ever, so that a later replay writes where nobody
    reads.
"""

from collections.abc import Sequence

import torch

from ..base import CopyKernel

_MOST = 8  # kMostOutputs of copies.cu
_BYTES_OF_BLOCK, _MOST_BLOCKS = 16 * 1024, 1024


class Outlet:
    """What the last kernel of a graph reads: where its outputs lie, and where they are wanted.

    Make it before the recording: the memory of graphs holds other things between replays.

    Args:
        kernel: The backend's.
        device: Its device.
    """

    def __init__(self, kernel: CopyKernel, device: torch.device) -> None:
        self._kernel = kernel
        self._lengths: list[int] = []
        self.addresses: tuple[int, ...] = ()
        """Of each output that the graph puts where it is wanted; 0 for others. Empty: of no graph."""
        with torch.inference_mode(False):
            self._places = torch.zeros(2, _MOST, 2, dtype=torch.int64, device=device)
        self.wanted = self._places[1].data_ptr()
        """Where on the device a hit notes what it wants."""

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """Memory that replays use, on whichever stream."""
        return [self._places]

    def record(self, outputs: Sequence[torch.Tensor]) -> None:
        """Have the recording end with the kernel, when the call has returned these tensors. They may be too many."""
        if not 0 < len(outputs) <= _MOST:
            return
        fits = [self._can_give(tensor) for tensor in outputs]
        self.addresses = tuple(tensor.data_ptr() * fit for tensor, fit in zip(outputs, fits, strict=True))
        self._lengths = [tensor.nbytes * fit for tensor, fit in zip(outputs, fits, strict=True)]
        with torch.inference_mode(False):
            blocks = max(self._lengths) // _BYTES_OF_BLOCK
            self._kernel.give(self._places, min(max(blocks, 1), _MOST_BLOCKS), len(outputs))
            self._places[1].zero_()

    def open(self) -> None:
        """Tell the kernel where the outputs lie. Call it behind the recording."""
        rest = [(0, 0)] * _MOST
        given = [*zip(self.addresses, self._lengths, strict=True), *rest][:_MOST]
        with torch.inference_mode(False):
            self._places.copy_(torch.tensor([given, rest], dtype=torch.int64, device="cpu"))

    def _can_give(self, tensor: torch.Tensor) -> bool:
        is_here = type(tensor) is torch.Tensor and tensor.device == self._places.device
        is_dense = is_here and tensor.layout is torch.strided and tensor.is_contiguous()
        return is_dense and not (tensor.is_conj() or tensor.is_neg())
