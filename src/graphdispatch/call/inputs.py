"""``InputSpec``: what is known of one tensor argument, whatever the number of rows."""

from dataclasses import dataclass

import torch

from ..axes import Axis
from .padding import Pad

__all__ = ["NO_MATCH", "InputSpec"]

NO_MATCH = -1


@dataclass(frozen=True)
class InputSpec:
    """One tensor argument.

    ``position`` is its place among the call's values; ``shape`` has 0 where it follows the batch; ``order`` lists the
    dimensions from the slowest to the fastest in memory.
    """

    name: str
    position: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    spans: tuple[tuple[int, Axis], ...] = ()
    """The dimensions that follow the batch, each with its axis."""
    pads: tuple[Pad, ...] = ()
    """The pad rule along each of ``spans``."""
    is_dense: bool = True
    """Whether the caller's tensors leave no gaps in memory; the buffer never does, so that eager may compute a tensor
    with gaps by another kernel."""
    is_pad_given: bool = False
    """Whether the user gave a rule of what padding rows hold; then nothing else is ever put there. Rows that are left
    as they are may hold anything that came before."""

    def sized(self, rows: int) -> tuple[int, ...]:
        """The shape with ``rows`` rows."""
        shape = list(self.shape)
        for dim, axis in self.spans:
            shape[dim] = axis.of(rows)
        return tuple(shape)

    def cut(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """A view of the first ``rows`` rows."""
        for dim, axis in self.spans:
            tensor = tensor.narrow(dim, 0, axis.of(rows))
        return tensor

    def repeated(self, tensor: torch.Tensor, rows: int, shift: int = 0) -> torch.Tensor:
        """The rows of a tensor in turn, from row ``shift`` on, until there are ``rows`` of them."""
        for dim, axis in self.spans:
            index = (torch.arange(axis.of(rows), device=tensor.device) + shift) % tensor.shape[dim]
            tensor = tensor.index_select(dim, index)
        return tensor

    def extents(self, shape: torch.Size) -> tuple[int, int] | None:
        """What a shape says of the number of its batch, and the bits in which that stands; None if it does not fit."""
        spans = dict(self.spans)
        if len(shape) != len(self.shape) or any(n != self.shape[d] for d, n in enumerate(shape) if d not in spans):
            return None
        number = known = 0
        for dim, axis in self.spans:
            extent = axis.put(shape[dim])
            if (number ^ extent) & known & axis.bits:
                return None
            number, known = number | extent, known | axis.bits
        return number, known
