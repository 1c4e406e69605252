"""Inputs that are given by name: their shapes, their batch dimension, and NumPy arrays in the places of tensors."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import ConfigError, check_type, shown
from ..runtime.flatten import is_tensor
from ..runtime.overlap import share_memory

Shapes = Mapping[str, Sequence[int]]
_ARRAYS = (np.ndarray, np.memmap)  # a masked array would lose its mask


def as_tensors(inputs: Any, device: torch.device) -> tuple[Any, bool]:
    """``inputs`` with tensors on ``device`` in the places of arrays, and whether all of them were arrays.

    On the CPU a tensor shares its array's memory, unless torch cannot: read-only memory, negative strides and foreign
    byte order are copied; ``write_back`` writes to those. One array under two names is one tensor. What is no mapping
    is given back as it is. Raises ``ConfigError`` for an array of a dtype that torch does not have.
    """
    arrays = {name: v for name, v in inputs.items() if type(v) in _ARRAYS} if isinstance(inputs, Mapping) else {}
    if not arrays:
        return inputs, False
    with torch.inference_mode(False):  # where tensors count what is written to them
        made = {id(array): _tensor(name, array).to(device) for name, array in arrays.items()}
    tensors = {name: made[id(array)] for name, array in arrays.items()}
    return {**inputs, **tensors}, len(arrays) == len(inputs)


def write_back(inputs: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write to arrays among ``inputs`` what was written to their ``tensors``, where these are copies. Raises
    ``ValueError`` for an array that is read-only, as NumPy does, and ``ConfigError`` for one that shares memory with
    another, of which the function did not see what was written."""
    arrays = {name: v for name, v in inputs.items() if type(v) in _ARRAYS} if isinstance(inputs, Mapping) else {}
    for name, array in arrays.items():
        tensor = tensors[name]
        if not tensor._version:
            continue
        for other, one in arrays.items():
            if np.shares_memory(one, array) and not share_memory((tensors[other], tensor)):
                raise ConfigError(
                    f"input {name!r} was written, and its array shares memory with input {other!r}, whose tensor is a "
                    "copy; pass arrays that share none"
                )
        now = tensor.numpy(force=True)
        if not np.may_share_memory(now, array):
            np.copyto(array, now)


def as_arrays(outputs: Any) -> Any:
    """``outputs`` with an array in the place of each tensor; one of a dtype that NumPy does not have stays a tensor."""
    return tree_map_only(torch.Tensor, _array, outputs)


def _tensor(name: Any, array: Any) -> torch.Tensor:
    native = np.require(array, array.dtype.newbyteorder("="), "W")  # a copy of read-only memory or foreign byte order
    try:
        try:
            return torch.from_numpy(native)
        except ValueError:  # negative strides, or some that are no multiple of the item's size
            return torch.from_numpy(native.copy())
    except TypeError:
        raise ConfigError(
            f"input {name!r} is an array of dtype {array.dtype}, which torch does not have; convert it with astype()"
        ) from None


def _array(tensor: torch.Tensor) -> Any:
    try:
        return tensor.numpy(force=True)
    except TypeError:  # bfloat16, for example
        return tensor


def make_example(shapes: Shapes | None, device: torch.device) -> Mapping[str, torch.Tensor]:
    """Zeros of these shapes, of float32. Raises ``ConfigError`` without shapes."""
    if not shapes:
        raise ConfigError("input_shapes must name the inputs and their shapes, or give inputs= as an example")
    checked = _checked_shapes("input_shapes", shapes)
    return {name: torch.zeros(shape, dtype=torch.float32, device=device) for name, shape in checked.items()}


def check_inputs(inputs: Mapping[str, torch.Tensor], shapes: Shapes | None) -> None:
    """Raise ``ConfigError`` if ``inputs`` are no mapping of tensors, or not what ``shapes`` says."""
    if not isinstance(inputs, Mapping):
        raise ConfigError(f"inputs must be a mapping from name to tensor, got a {type(inputs).__name__}")
    for name, tensor in inputs.items():
        if type(name) is not str:
            raise ConfigError(f"the name of an input must be text, got {shown(name)}")
        if not is_tensor(tensor):
            raise ConfigError(f"input {name!r} must be a tensor, got {shown(tensor)}; bind others to the callable")
    for name, shape in _checked_shapes("input_shapes", shapes or {}).items():
        if name not in inputs:
            raise ConfigError(f"input_shapes names {name!r}, which inputs does not; inputs are {list(inputs)}")
        if tuple(inputs[name].shape) != shape:
            raise ConfigError(
                f"input {name!r} must have shape {shape} as input_shapes says, got {tuple(inputs[name].shape)}"
            )


def check_outputs(outputs: Any, shapes: Shapes | None) -> None:
    """Raise ``ConfigError`` if ``outputs`` are not what ``shapes`` says: by key for a mapping, else in order."""
    if not shapes:
        return
    named = outputs if isinstance(outputs, Mapping) else dict(zip(shapes, tree_leaves(outputs), strict=False))
    for name, shape in _checked_shapes("output_shapes", shapes).items():
        if not is_tensor(named.get(name)) or tuple(named[name].shape) != shape:
            found = tuple(named[name].shape) if is_tensor(named.get(name)) else named.get(name)
            raise ConfigError(f"output {name!r} must have shape {shape} as output_shapes says, got {found}")


def _checked_shapes(argument: str, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    try:
        checked = {name: tuple(map(index, shape)) for name, shape in shapes.items()}
    except (AttributeError, TypeError):
        raise ConfigError(f"{argument} must map names to shapes, as {{'x': (8, 64)}}, got {shown(shapes)}") from None
    if any(length < 0 for shape in checked.values() for length in shape):
        raise ConfigError(f"{argument} must hold lengths >= 0, got {shown(shapes)}")
    return checked


def batch_dims(inputs: Mapping[str, torch.Tensor], rows: int, dynamic: Mapping[str, int] | None) -> Mapping[str, int]:
    """The batch dimension of each input that has one. Raises ``ConfigError`` for inputs without ``rows`` rows."""
    if dynamic is not None:
        check_type("dynamic", dynamic, Mapping, "a mapping from input names to batch dimensions")
        for name, dim in dynamic.items():
            if name not in inputs:
                raise ConfigError(f"dynamic names {name!r}, which is no input; inputs are {list(inputs)}")
            check_type(f"dynamic[{name!r}]", dim, int, "the number of a dimension")
        return dynamic
    for name, tensor in inputs.items():
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise ConfigError(
                f"input {name!r} has shape {tuple(tensor.shape)}, whose dimension 0 is not batch_size={rows}; "
                "say in dynamic={name: dimension} which inputs have a batch dimension"
            )
    return dict.fromkeys(inputs, 0)
