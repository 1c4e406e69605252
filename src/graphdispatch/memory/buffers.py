"""Preallocated memory for copies of outputs: a ring that the library owns, or tensors of the caller (``given.py``).

All graphs of one signature share it, so its cost does not grow with the number of captured sizes. Whoever uses it holds
the lock of the graphs' pool.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec

from ..errors import CaptureError
from ..reasons import Reason
from .outputs import OutputView, extents_of

__all__ = ["OutputBuffers", "OutputRing", "OutputSpec", "first_part"]


class OutputSpec(NamedTuple):
    """One output tensor of a graph: its index among the leaves, the dimensions that follow the batch as in
    ``OutputRule``, and whether it lies in the graph's own memory."""

    place: int
    tensor: torch.Tensor
    follows: tuple[tuple[Any, ...], ...]
    is_own: bool

    def shape(self, rows: int) -> tuple[int, ...]:
        """Its shape for a number of rows."""
        return tuple({**dict(enumerate(self.tensor.shape)), **extents_of(self.follows, rows)}.values())


class OutputBuffers(ABC):
    """Sets of tensors, used in turn. Each has room for ``capacity`` rows; ``generation`` counts the turns so far."""

    lifetime: int
    """The number of sets: a set is used again after so many turns."""
    nbytes: int = 0
    """Bytes that the library allocated for the sets."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.generation = 0
        self.sets: list[list[torch.Tensor | None]] = []
        """For each turn, the buffers of the output tensors, in order; None for a tensor that is handed out as it is."""

    @abstractmethod
    def prepare(self, outputs: Sequence[OutputSpec], structure: TreeSpec) -> None:
        """Make ``sets`` for a graph with these outputs, or check that the present ones fit."""

    def hand_out(self, result: Any) -> Any:
        """What a call returns for outputs that were copied into a set."""
        return result

    def taker(self, cut: list[torch.Tensor], build: Callable[[list[torch.Tensor]], Any]) -> Callable[[], Any]:
        """What copies a graph's outputs into the next set, and hands that out, put together by ``build``."""
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
            return self.hand_out(build(result))

        return take


class OutputRing(OutputBuffers):
    """A ring of copies in the library's memory, allocated when the first graph of a signature is made.

    An output that is not the graph's own memory, such as a cache that the model returns, gets no copy.
    """

    def __init__(self, length: int, capacity: int) -> None:
        super().__init__(capacity)
        self.lifetime = length
        self._kinds: list[tuple[Any, ...]] = []

    def hand_out(self, result: Any) -> Any:
        """A handle, which tells when the copies are used again."""
        return OutputView(result, self)

    def prepare(self, outputs: Sequence[OutputSpec], structure: TreeSpec) -> None:
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


def first_part(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The view of ``tensor`` that begins at its first element and has ``shape``."""
    with torch.inference_mode(False), torch.no_grad():
        for dim, extent in enumerate(shape):
            if tensor.shape[dim] != extent:
                tensor = tensor.narrow(dim, 0, extent)
        return tensor
