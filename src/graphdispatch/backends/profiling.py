"""Ranges of torch's profiler around the parts of a call, while a profiler is on in the calling thread.

A range is no operator, so that neither captures nor torch's modes see it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

__all__ = ["in_range", "is_profiled", "profiler_range"]

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
