"""What callers and users declare around a call: where a capture breaks, and which rows of a padded batch are real."""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch

__all__ = ["ACTIVE", "BREAKS", "BREAK_CODE", "ORIGINAL", "ROWS_TOLD", "BreakRunner", "as_break", "is_break"]

ORIGINAL = "_graphdispatch_unbroken"
"""The attribute by which a marked function keeps the one that it stands for."""

BreakRunner = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Ends the current graph, runs a function eagerly (name, function, args, kwargs), begins the next graph."""

ACTIVE: ContextVar[BreakRunner | None] = ContextVar("piecewise_capture", default=None)
"""Runs the breaks of this thread or task; None outside a PIECEWISE capture."""

ROWS_TOLD: ContextVar[int | None] = ContextVar("cudagraph_rows", default=None)
"""How many rows of the current step's batch are real, if its caller padded it and said so, or None."""

BREAKS: set[str] = set()
"""The operators that break every PIECEWISE capture of the process, by qualified name.

There is one set, as torch has one set of operators; ``eager_break("aten::nonzero")`` adds to it.
"""


def is_break(fn: Callable[..., Any]) -> bool:
    """Whether a function is marked to run eagerly in PIECEWISE captures."""
    plain = fn.__func__ if type(fn) is MethodType else fn
    return type(plain) is FunctionType and ORIGINAL in vars(plain)


def as_break(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that runs ``fn`` as a break, under this name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # The compiler cannot trace a context variable. What it compiles is one piece without breaks.
        runner = None if torch.compiler.is_dynamo_compiling() else ACTIVE.get()
        if runner is None:
            return fn(*args, **kwargs)
        return runner(name, fn, args, kwargs)

    if issubclass(type(fn), (FunctionType, BuiltinFunctionType, MethodType)):  # others may answer for any name
        functools.update_wrapper(run, fn)
    setattr(run, ORIGINAL, fn)
    return run


BREAK_CODE = next(constant for constant in as_break.__code__.co_consts if isinstance(constant, CodeType))
"""The code that runs around every break, by which a trace of the interpreter knows one."""
