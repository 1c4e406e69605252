"""What of torch is around a call: modes, transforms and traces, which operators of a replay pass by, and a profiler.

A range of the profiler is no operator, so that neither captures nor torch's modes see it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.utils._device import DeviceContext

__all__ = [
    "default_device",
    "dispatch_modes",
    "function_modes",
    "in_range",
    "is_profiled",
    "is_transformed",
    "profiler_range",
    "trace",
    "transform",
]

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


is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler of torch is on in the calling thread."""


def profiler_range(part: str, of: object) -> Any:
    """A block that is a range ``graphdispatch: PART OF`` of the profiler, and nothing where none is on."""
    return _RecordFunctionFast(f"graphdispatch: {part} {of}")


def in_range(part: str, of: object, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, each call of which is such a range."""

    def within(*args: Any) -> Any:
        with profiler_range(part, of):
            return run(*args)

    return within
