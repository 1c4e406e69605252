"""What of torch is around a call, which operators of a replay pass by: modes, transforms, traces, profilers, compilers.

A range of the profiler is no operator, so that neither captures nor torch's modes see it.

Note [autocast inside a capture]
    Autocast keeps cast copies of weights until the outermost region ends, in one cache for all threads. A graph that
    reads such a copy would go on reading it after the weights were written in place, and after the copy was freed. A
    copy that a capture makes lies in the graph's memory, and eager code of the same region would read it. So the cache
    is off while a call is warmed up and recorded: the graph casts the weights itself in each replay.

Note [no compiler comes in]
    A compiler that traces through a server would freeze what it decides, and compile what it captures. So a compiled
    function breaks its graph at each call of a front end, and whatever runs inside runs uncompiled. The mark is set
    once on a function's code, so a call costs nothing more. Modes are marked in the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

F = TypeVar("F", bound=Callable[..., Any])

# These are functions in C, so that a call costs a hit little.
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


def is_observed() -> bool:
    """Whether a ``TorchDispatchMode`` of somebody else sees what the running thread calls."""
    modes = map(torch._C._get_dispatch_stack_at, range(dispatch_modes()))
    return any(not isinstance(mode, UntracedMode) for mode in modes)


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Within the block no cast of a weight is one that autocast kept from before, and autocast keeps none for later.

    The cache is turned off for an autocast that the block is in. Elsewhere it is left on: compiled code is guarded by
    that setting, and would be compiled again. An autocast that ends within the block clears the cache itself.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    if torch._C._is_any_autocast_enabled():
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


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


# Tells what compiles the calling thread's frames, or None.
compiler_at_work: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def untraced(function: F) -> F:
    """Mark a function that ``torch.compile`` neither traces nor enters, with all that it calls; returns itself."""
    marked: Any = function
    marked._torchdynamo_disable = True  # read where a compiled caller would inline it
    marked._torchdynamo_disable_msg = "graphdispatch serves this call by graphs of its own"
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP  # the function's own frame, and those of all that it calls
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function


class UntracedMode(TorchDispatchMode):
    """A mode whose own code ``torch.compile`` leaves alone. Torch's wrapper would load the compiler for that, and run
    more Python at each operator than most modes do."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what torch reads before it wraps

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in vars(cls):
            untraced(cls.__torch_dispatch__)
