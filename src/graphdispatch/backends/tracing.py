"""Keeps ``torch.compile`` out of the library, and sets profilers.

A compiler that traces through a server would freeze what it decides, and compile what it captures. So a compiled
function breaks its graph at each call of a front door, and whatever runs inside runs uncompiled. The mark is set once
on a function's code, so a call costs nothing more. Modes are marked in the same way.
"""

import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..native.bound import CORE

__all__ = ["PROFILERS", "UntracedMode", "compiler_at_work", "set_profiler", "untraced"]

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


PROFILERS = (FunctionType, MethodType, *(() if CORE is None else (CORE.Profiler,)))
"""The classes of profilers that can be called, and set again."""


def set_profiler(profiler: Any) -> None:
    """``sys.setprofile``; a profiler of the core goes on in compiled code."""
    if CORE is not None and type(profiler) is CORE.Profiler:
        profiler.start()
    else:
        sys.setprofile(profiler)


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
