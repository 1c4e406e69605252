"""Inputs that are given by name: their shapes and their batch dimension."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..call.spec import describe, is_tensor
from ..errors import ConfigError, check_type, shown

__all__ = ["Shapes", "batch_dims", "check_inputs", "check_outputs", "make_example"]

Shapes = Mapping[str, Sequence[int]]


def make_example(
    shapes: Shapes | None, dtypes: Mapping[str, torch.dtype] | None, device: torch.device
) -> Mapping[str, torch.Tensor]:
    """Zeros of these shapes, of float32 where ``dtypes`` names no other. Raises ``ConfigError`` without shapes."""
    check_type("dtypes", {} if dtypes is None else dtypes, Mapping, "a mapping from input names to dtypes")
    for name, dtype in (dtypes or {}).items():
        check_type(f"dtypes[{name!r}]", dtype, torch.dtype, "a torch.dtype")
    if not shapes:
        raise ConfigError("input_shapes must name the inputs and their shapes, or give inputs= as an example")
    return {
        name: torch.zeros(shape, dtype=(dtypes or {}).get(name, torch.float32), device=device)
        for name, shape in _checked_shapes("input_shapes", shapes).items()
    }


def check_inputs(inputs: Mapping[str, torch.Tensor], shapes: Shapes | None) -> None:
    """Raise ``ConfigError`` if ``inputs`` are no mapping of tensors, or not what ``shapes`` says."""
    if not isinstance(inputs, Mapping):
        raise ConfigError(f"inputs must be a mapping from name to tensor, got a {type(inputs).__name__}")
    for name, tensor in inputs.items():
        if type(name) is not str:
            raise ConfigError(f"the name of an input must be text, got {shown(name)}")
        if not is_tensor(tensor):
            raise ConfigError(f"input {name!r} must be a tensor, got {describe(tensor)}; bind others to the callable")
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
