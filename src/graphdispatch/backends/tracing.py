"""Keeps ``torch.compile`` out of the library.

A compiler that traces through a server would freeze what it decides, and compile what it captures. So a compiled
function breaks its graph at each call of a front end, and whatever runs inside runs uncompiled. The mark is set once
on a function's code, so a call costs nothing more. Modes are marked in the same way.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["UntracedMode", "compiler_at_work", "untraced"]

F = TypeVar("F", bound=Callable[..., Any])


# Tells what compiles the calling thread's frames, or None.
compiler_at_work: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def untraced(function: F) -> F:
    """Mark a function that ``torch.compile`` neither traces nor enters, with all that it calls; returns itself."""
    marked: Any = function
    marked._torchdynamo_disable = True  # asked where a compiled caller would inline it
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
        return False  # what torch asks before it wraps

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in vars(cls):
            untraced(cls.__torch_dispatch__)
