"""Preallocated memory for copies of outputs: a ring that the library owns, or tensors that the caller gave.

All graphs of one signature share it, so its cost does not grow with the number of captured sizes. Whoever uses it holds
the lock of the graphs' pool.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..backends.operators import is_expanded
from ..call.spec import describe
from ..errors import CaptureError, ConfigError
from ..reasons import Reason

__all__ = ["CallerBuffers", "OutputBuffers", "OutputRing", "OutputSpec", "copy_into", "first_part"]


class OutputSpec(NamedTuple):
    """One output tensor of a graph: its index among the leaves, the rows per row of each dimension that follows the
    batch, and whether it lies in the graph's own memory."""

    place: int
    tensor: torch.Tensor
    factors: dict[int, int]
    is_own: bool

    def shape(self, rows: int) -> tuple[int, ...]:
        """Its shape for a number of rows."""
        extents = enumerate(self.tensor.shape)
        return tuple(rows * self.factors[dim] if dim in self.factors else extent for dim, extent in extents)


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


class OutputRing(OutputBuffers):
    """A ring of copies in the library's memory, allocated when the first graph of a signature is made.

    An output that is not the graph's own memory, such as a cache that the model returns, gets no copy.
    """

    def __init__(self, length: int, capacity: int) -> None:
        super().__init__(capacity)
        self.lifetime = length
        self._kinds: list[tuple[Any, ...]] = []

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


class CallerBuffers(OutputBuffers):
    """One set, which the caller owns: ``out``, a tensor or a nest of tensors with the structure of the outputs.

    Raises ``ConfigError`` unless these are dense tensors that require no gradient and do not overlap.
    """

    lifetime = 1

    def __init__(self, out: Any, capacity: int) -> None:
        super().__init__(capacity)
        self.given = out
        self._leaves, self._spec = tree_flatten(out)
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ConfigError(f"out must be a tensor or a nest of tensors, got {out!r}")
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.requires_grad:
                raise ConfigError(f"out must hold dense tensors that require no gradient, got {_kind(tensor)}")
        spans = sorted((t.data_ptr(), t.data_ptr() + _extent(t)) for t in tensors if t.numel())
        if any(map(is_expanded, tensors)) or any(after[0] < before[1] for before, after in pairwise(spans)):
            raise ConfigError("out must hold tensors that do not overlap in memory, each element in its own place")

    def prepare(self, outputs: Sequence[OutputSpec], structure: TreeSpec) -> None:
        """Compare the caller's tensors with the outputs. Raises ``ConfigError`` if one does not fit."""
        _check_structure(self._spec, structure)
        buffers = [self._leaves[one.place] for one in outputs]
        for one, buffer in zip(outputs, buffers, strict=True):
            _check_kind(buffer, one.tensor)
            shape = one.shape(self.capacity)
            extents = enumerate(zip(buffer.shape, shape, strict=True))
            if not all(room == needed or (room > needed and dim in one.factors) for dim, (room, needed) in extents):
                raise ConfigError(
                    f"out must have room for the outputs of {self.capacity} rows, {shape}, got a tensor of shape "
                    f"{tuple(buffer.shape)}"
                )
            if not one.is_own and _storage(one.tensor) == _storage(buffer):
                raise ConfigError("out must not be memory that the callable itself returns; call without out=")
        self.sets = [buffers]


def copy_into(out: Any, result: Any) -> Any:
    """Copy what an eager step returned into the caller's tensors ``out``; returns the nest with views of their parts.

    Raises ``ConfigError`` for an output that does not fit, or that requires a gradient: a copy would lose it.
    """
    buffers, expected = tree_flatten(out)
    leaves, spec = tree_flatten(result)
    _check_structure(expected, spec)
    for place, (buffer, leaf) in enumerate(zip(buffers, leaves, strict=True)):
        if isinstance(leaf, torch.Tensor):
            _check_kind(buffer, leaf)
            if leaf.requires_grad:
                raise ConfigError("out cannot hold an output that requires a gradient; call under torch.no_grad()")
            if any(room < now for room, now in zip(buffer.shape, leaf.shape, strict=True)):
                raise ConfigError(
                    f"out has no room for an output of shape {tuple(leaf.shape)} in a tensor of shape "
                    f"{tuple(buffer.shape)}; give a larger one, or smaller batches"
                )
            leaves[place] = view = first_part(buffer, leaf.shape)
            source = leaf.clone() if _storage(leaf) == _storage(buffer) else leaf
            view.copy_(source)
    return tree_unflatten(leaves, spec)


def first_part(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The view of ``tensor`` that begins at its first element and has ``shape``."""
    with torch.inference_mode(False), torch.no_grad():
        for dim, extent in enumerate(shape):
            if tensor.shape[dim] != extent:
                tensor = tensor.narrow(dim, 0, extent)
        return tensor


def _check_structure(given: TreeSpec, spec: TreeSpec) -> None:
    if given != spec:
        raise ConfigError(f"out must have the structure of the outputs, {spec}, got {given}")


def _check_kind(buffer: Any, output: torch.Tensor) -> None:
    if (
        not isinstance(buffer, torch.Tensor)
        or (buffer.dtype, buffer.device, buffer.dim()) != (output.dtype, output.device, output.dim())
        or (buffer.is_inference() and not torch.is_inference_mode_enabled())
    ):
        raise ConfigError(
            f"out must have a tensor like {_kind(output)} that may be written to here, got {_kind(buffer)}"
        )


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return describe(value)
    mode = ", an inference tensor" if value.is_inference() else ""
    return f"{value.dim()} dimensions of {value.dtype} on {value.device}{mode}"


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of the first element to the end of the last one."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
