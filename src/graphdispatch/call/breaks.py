"""Breaks: the parts of a model that run eagerly between the graphs of a PIECEWISE capture.

``eager_break`` marks a function, a module or operators by name. Outside of a PIECEWISE capture a marked function costs
one context-variable lookup; in a FULL capture it is part of the graph.
"""

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import MethodType
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import nn

from ..errors import ConfigError

__all__ = ["BREAKS", "BreakRunner", "OperatorBreaks", "eager_break", "is_break", "is_marked", "remove_eager_break"]

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=nn.Module)
_ORIGINAL = "_graphdispatch_unbroken"


class BreakRunner(Protocol):
    """Whoever is capturing piecewise on this thread or task."""

    def run_break(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the current graph, run ``fn`` eagerly, begin the next graph."""


ACTIVE: ContextVar[BreakRunner | None] = ContextVar("piecewise_capture", default=None)


class OperatorBreaks:
    """The operators that break every PIECEWISE capture of the process, by qualified name. Thread-safe."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def add(self, *names: str) -> None:
        """Break at these operators from now on; raises ``ConfigError`` for a name that torch does not know."""
        for name in names:
            namespace, _, rest = name.partition("::")
            if not rest or not hasattr(getattr(torch.ops, namespace), rest.split(".")[0]):
                raise ConfigError(f"operator {name!r} is unknown to torch; write 'namespace::name', as 'aten::nonzero'")
        with self._lock:
            self._names |= set(names)

    def remove(self, *names: str) -> None:
        """Break at these operators no longer."""
        with self._lock:
            self._names -= set(names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        return f"<OperatorBreaks {sorted(self._names)}>"


BREAKS = OperatorBreaks()
"""One for the process, since an operator is one thing for the process: ``eager_break("aten::nonzero")`` adds to it."""


@overload
def eager_break(target: M) -> M: ...
@overload
def eager_break(target: F) -> F: ...
@overload
def eager_break(target: str, *more: str) -> None: ...
def eager_break(target: Any, *more: Any) -> Any:
    """Mark a part that runs eagerly in PIECEWISE captures: a function (as a decorator), a module, operators by name.

    The marked part may do what no graph can (read values back, use changing metadata) and may return fresh tensors of
    the same shapes each time; they are copied to where the next graph reads them. A tensor that it did not make (an
    argument, a cache) must be the same view of the same memory each time, and what it returns besides tensors the same
    value. Everything that later parts read must be returned. What it raises ends the call, even where the model would
    catch it. It may use streams of its own if it joins them before it ends. It may call what graphs serve: such a call
    runs eagerly (``Reason.INSIDE_REPLAY``) where the graph is the one that is being replayed or shares its memory; made
    on another thread it waits for the replay to end, so that a break which waits for it hangs.

    A module is marked in place and returned; ``remove_eager_break`` takes the mark back. Nested marks run inside the
    outer one, and ``torch.compile`` traces through a mark. Raises ``ConfigError`` for anything else.
    """
    if isinstance(target, str):
        BREAKS.add(target, *more)
        return None
    if more:
        raise ConfigError("eager_break takes one function or module, or names of operators")
    if isinstance(target, nn.Module):
        if not is_marked(target):
            _mark(target)
        return target
    if callable(target):
        return target if is_break(target) else _broken(target, getattr(target, "__qualname__", repr(target)))
    raise ConfigError(f"eager_break takes a function, a module or names of operators, got {target!r}")


def is_marked(module: nn.Module) -> bool:
    """Whether a module runs eagerly in PIECEWISE captures."""
    return is_break(module.forward)


def is_break(fn: Callable[..., Any]) -> bool:
    """Whether a function is marked."""
    return hasattr(fn, _ORIGINAL)


def remove_eager_break(*targets: Any) -> None:
    """Take the marks of modules, and of operators by name, back."""
    for target in targets:
        if isinstance(target, str):
            BREAKS.remove(target)
        elif isinstance(target, nn.Module) and is_marked(target):
            _unmark(target)
        else:
            raise ConfigError(f"remove_eager_break takes marked modules and names of operators, got {target!r}")


def _mark(module: nn.Module) -> None:
    forward = module.forward
    name = type(module).__name__
    if isinstance(forward, MethodType) and forward.__self__ is module:
        # A method again, so that a deep copy of the module calls the copy and not this module.
        module.forward = MethodType(_broken(forward.__func__, name), module)
    else:
        module.forward = _broken(forward, name)


def _unmark(module: nn.Module) -> None:
    original = getattr(module.forward, _ORIGINAL)
    del module.forward
    if getattr(module.forward, "__func__", None) is not original:  # it had a forward of its own
        module.forward = original


def _broken(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        # The compiler cannot trace a context variable; what it compiles is one piece, without breaks.
        runner = None if torch.compiler.is_dynamo_compiling() else ACTIVE.get()
        if runner is None:
            return fn(*args, **kwargs)
        return runner.run_break(name, fn, args, kwargs)

    setattr(run, _ORIGINAL, fn)
    return run
