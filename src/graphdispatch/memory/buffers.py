"""Preallocated memory for copies of outputs: a ring that the library owns.

All graphs of one signature share it, so its cost does not grow with the number of captured sizes. Whoever uses it holds
the lock of the graphs' pool.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import CaptureError
from ..reasons import Reason
from .outputs import OutputView, extents_of

__all__ = ["OutputRing", "OutputSpec", "first_part"]


class OutputSpec(NamedTuple):
    """One output tensor of a graph: the dimensions that follow the batch as in ``OutputRule``, and whether it lies in
    the graph's own memory."""

    tensor: torch.Tensor
    follows: tuple[tuple[Any, ...], ...]
    is_own: bool

    def shape(self, rows: int) -> tuple[int, ...]:
        """Its shape for a number of rows."""
        return tuple({**dict(enumerate(self.tensor.shape)), **extents_of(self.follows, rows)}.values())


class OutputRing:
    """A ring of copies in the library's memory, each with room for ``capacity`` rows, allocated when the first graph of
    a signature is made.

    An output that is not the graph's own memory, such as a cache that the model returns, gets no copy.
    """

    def __init__(self, length: int, capacity: int) -> None:
        self.lifetime = length
        """The number of sets: a set is used again after so many turns."""
        self.capacity = capacity
        self.generation = 0
        """The number of turns so far."""
        self.nbytes = 0
        """Bytes that were allocated for the sets."""
        self.sets: list[list[torch.Tensor | None]] = []
        """For each turn, the copies of the output tensors, in order; None for a tensor that is returned as it is."""
        self._kinds: list[tuple[Any, ...]] = []

    def prepare(self, outputs: Sequence[OutputSpec]) -> None:
        """Allocate the copies. Raises ``CaptureError`` if the outputs are of other kinds than in earlier sizes."""
        kinds = [(one.shape(self.capacity), one.tensor.dtype, one.tensor.device, one.is_own) for one in outputs]
        if self.sets and kinds != self._kinds:
            raise CaptureError(
                f"the outputs are {kinds} and were {self._kinds} in other sizes; they cannot share a ring",
                Reason.OUTPUT_UNSUPPORTED,
            )
        if not self.sets:
            with torch.inference_mode(False):
                self.sets = [
                    [torch.empty(s, dtype=dtype, device=device) if o else None for s, dtype, device, o in kinds]
                    for _ in range(self.lifetime)
                ]
            self._kinds = kinds
            self.nbytes = sum(buffer.nbytes for one in self.sets for buffer in one if buffer is not None)

    def taker(self, cut: list[torch.Tensor], build: Callable[[list[torch.Tensor]], Any]) -> Callable[[], Any]:
        """What copies a graph's outputs into the next set, and returns a handle on it, put together by ``build``."""
        copies: list[tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]] = []
        for buffer_set in self.sets:
            pairs = list(zip(cut, buffer_set, strict=True))
            result = [source if buffer is None else first_part(buffer, source.shape) for source, buffer in pairs]
            copied = [place for place, (_, buffer) in enumerate(pairs) if buffer is not None]
            copies.append(([result[place] for place in copied], [cut[place] for place in copied], result))

        def take() -> Any:
            targets, sources, result = copies[self.generation % self.lifetime]
            self.generation += 1
            if targets:
                torch._foreach_copy_(targets, sources)
            return OutputView(build(result), self)

        return take


def first_part(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The view of ``tensor`` that begins at its first element and has ``shape``."""
    with torch.inference_mode(False), torch.no_grad():
        for dim, extent in enumerate(shape):
            if tensor.shape[dim] != extent:
                tensor = tensor.narrow(dim, 0, extent)
        return tensor
