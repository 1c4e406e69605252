"""The caller's own tensors as the place of all outputs (``out=``)."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..backends.operators import is_expanded, is_strided
from ..call.spec import describe, is_tensor
from ..errors import ConfigError, shown
from .buffers import OutputBuffers, OutputSpec, first_part

__all__ = ["CallerBuffers", "copy_into"]


class CallerBuffers(OutputBuffers):
    """One set, which the caller owns: ``out``, a tensor or a nest of tensors with the structure of the outputs.

    Raises ``ConfigError`` unless these are dense tensors that require no gradient and do not overlap.
    """

    lifetime = 1

    def __init__(self, out: Any, capacity: int) -> None:
        super().__init__(capacity)
        self.given = out
        self._leaves, self._spec = tree_flatten(out)
        tensors = [leaf for leaf in self._leaves if is_tensor(leaf)]
        if not tensors:
            raise ConfigError(f"out must be a tensor or a nest of tensors, got {shown(out)}")
        for tensor in tensors:
            if not is_strided(tensor) or tensor.requires_grad:
                raise ConfigError(f"out must hold dense tensors that require no gradient, got {_kind(tensor)}")
        spans = sorted((t.data_ptr(), t.data_ptr() + _extent(t)) for t in tensors if t.numel())
        if any(map(is_expanded, tensors)) or any(after[0] < before[1] for before, after in pairwise(spans)):
            raise ConfigError("out must hold tensors that do not overlap in memory, each element in its own place")

    def prepare(self, outputs: Sequence[OutputSpec], structure: TreeSpec) -> None:
        """Compare the caller's tensors with the outputs. Raises ``ConfigError`` if one does not fit."""
        _check_structure(self._spec, structure)
        _check_places(self._leaves, {one.place for one in outputs})
        buffers = [self._leaves[one.place] for one in outputs]
        for one, buffer in zip(outputs, buffers, strict=True):
            _check_kind(buffer, one.tensor)
            shape, follows = one.shape(self.capacity), {dim for dim, *_ in one.follows}
            extents = enumerate(zip(buffer.shape, shape, strict=True))
            if not all(room == needed or (room > needed and dim in follows) for dim, (room, needed) in extents):
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
    found = {place: leaf for place, leaf in enumerate(leaves) if is_tensor(leaf)}
    _check_places(buffers, found.keys())
    for place, leaf in found.items():  # all of them first: a nest that does not fit leaves ``out`` as it is
        buffer = buffers[place]
        _check_kind(buffer, leaf)
        if leaf.requires_grad:
            raise ConfigError("out cannot hold an output that requires a gradient; call under torch.no_grad()")
        if any(room < now for room, now in zip(buffer.shape, leaf.shape, strict=True)):
            raise ConfigError(
                f"out has no room for an output of shape {tuple(leaf.shape)} in a tensor of shape "
                f"{tuple(buffer.shape)}; give a larger one, or smaller batches"
            )
    used = set(map(_storage, filter(torch.is_tensor, buffers)))
    sources = {place: leaf.clone() if _storage(leaf) in used else leaf for place, leaf in found.items()}
    for place, source in sources.items():
        leaves[place] = view = first_part(buffers[place], source.shape)
        view.copy_(source)
    return tree_unflatten(leaves, spec)


def _check_structure(given: TreeSpec, spec: TreeSpec) -> None:
    if given != spec:
        wanted, got = ("a single tensor" if one.is_leaf() else " ".join(str(one).split()) for one in (spec, given))
        raise ConfigError(f"out must have the structure of the outputs, {wanted}, got {got}")


def _check_places(given: Sequence[Any], places: Collection[int]) -> None:
    """Compare where the caller gave tensors with where outputs are tensors."""
    for place, leaf in enumerate(given):
        if is_tensor(leaf) and place not in places:
            raise ConfigError(f"out has a tensor in place {place} of the outputs, which is none; put None there")


def _check_kind(buffer: Any, output: torch.Tensor) -> None:
    if (
        not is_tensor(buffer)
        or (buffer.dtype, buffer.device, buffer.dim()) != (output.dtype, output.device, output.dim())
        or (buffer.is_inference() and not torch.is_inference_mode_enabled())
    ):
        raise ConfigError(
            f"out must have a tensor like {_kind(output)} that may be written to here, got {_kind(buffer)}"
        )


def _kind(value: Any) -> str:
    if not is_tensor(value):
        return describe(value)
    mode = ", an inference tensor" if value.is_inference() else ""
    return f"{value.dim()} dimensions of {value.dtype} on {value.device}{mode}"


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of the first element to the end of the last one."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
