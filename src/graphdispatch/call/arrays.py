"""NumPy arrays as the tensors of a call: shared where torch can share their memory, copied elsewhere."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from ..errors import ConfigError

__all__ = ["as_arrays", "as_tensors"]

_ARRAYS = (np.ndarray, np.memmap)  # a masked array would lose its mask


def as_tensors(inputs: Any, device: torch.device) -> tuple[Any, bool]:
    """``inputs`` with tensors on ``device`` in the places of arrays, and whether all of them were arrays.

    On the CPU a tensor shares its array's memory, unless torch cannot: read-only memory, negative strides and foreign
    byte order are copied. What is no mapping is given back as it is. Raises ``ConfigError`` for an array of a dtype
    that torch does not have.
    """
    arrays = {name: v for name, v in inputs.items() if type(v) in _ARRAYS} if isinstance(inputs, Mapping) else {}
    if not arrays:
        return inputs, False
    tensors = {name: _tensor(name, array).to(device) for name, array in arrays.items()}
    return {**inputs, **tensors}, len(arrays) == len(inputs)


def as_arrays(outputs: Any) -> Any:
    """``outputs`` with an array in the place of each tensor; one of a dtype that NumPy does not have stays a tensor."""
    return tree_map_only(torch.Tensor, _array, outputs)


def _tensor(name: Any, array: Any) -> torch.Tensor:
    native = array.dtype.newbyteorder("=")
    if not (array.flags.writeable and array.dtype.isnative) or any(stride < 0 for stride in array.strides):
        array = np.array(array, dtype=native, order="C")
    try:
        try:
            return torch.from_numpy(array)
        except ValueError:  # strides that are no multiple of the item's size
            return torch.from_numpy(np.array(array, order="C"))
    except TypeError:
        raise ConfigError(
            f"input {name!r} is an array of dtype {array.dtype}, which torch does not have; convert it with astype()"
        ) from None


def _array(tensor: torch.Tensor) -> Any:
    try:
        return tensor.numpy(force=True)
    except TypeError:  # bfloat16, for example
        return tensor
