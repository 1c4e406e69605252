"""What of torch's modes, transforms and traces is around a call: operators of a replay pass all of them by."""

from typing import Any

import torch
from torch.utils._device import DeviceContext

__all__ = ["default_device", "dispatch_modes", "function_modes", "is_transformed", "trace", "transform"]

# These are functions in C, so that asking costs a hit little.
function_modes = torch._C._len_torch_function_stack
dispatch_modes = torch._C._len_torch_dispatch_stack
trace = torch._C._get_tracing_state
transform = torch._C._functorch.peek_interpreter_stack


def default_device() -> Any:
    """The device on which the running thread makes new tensors, if that was set; else None."""
    modes = map(torch._C._get_function_stack_at, reversed(range(function_modes())))
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def is_transformed() -> bool:
    """Whether a ``TorchFunctionMode``, other than for a default device, a transform of ``torch.func`` or a trace of
    TorchScript sees what the running thread calls, so that it could not be captured as it is."""
    modes = map(torch._C._get_function_stack_at, range(function_modes()))
    is_inside = trace() is not None or transform() is not None
    return is_inside or any(not isinstance(mode, DeviceContext) for mode in modes)
