"""Breaks: the parts of a model that run eagerly between the graphs of a PIECEWISE capture.

``eager_break`` marks a function, a module, methods of a module, or operators by name. Outside a PIECEWISE capture, a
marked function costs one lookup of a context variable. In a FULL capture it is part of the graph.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import nn
from torch._ops import OpOverload

from ..backends.operators import is_unsafe
from ..errors import ConfigError, shown
from ..runtime.rules import callable_name

T = TypeVar("T")

ORIGINAL = "_graphdispatch_unbroken"
"""The attribute by which a marked function keeps the one that it stands for."""

BreakRunner = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Ends the current graph, runs a function eagerly (name, function, args, kwargs), begins the next graph."""

ACTIVE: ContextVar[BreakRunner | None] = ContextVar("piecewise_capture", default=None)
"""Runs the breaks of this thread or task; None outside a PIECEWISE capture."""

BREAKS: set[str] = set()
"""The operators that break every PIECEWISE capture of the process, by qualified name.

There is one set, as torch has one set of operators; ``eager_break("aten::nonzero")`` adds to it.
"""


def breaks_at(func: Any) -> bool:
    """Whether an operator is a break of PIECEWISE captures."""
    return isinstance(func, OpOverload) and (func._schema.name in BREAKS or is_unsafe(func))


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


def eager_break(target: T, *more: str) -> T:
    """Mark a part that runs eagerly in PIECEWISE captures.

    The marked part may do what no graph can, such as reading values back or using changing metadata. Outside of
    PIECEWISE captures a mark changes nothing. These rules hold:

    - It must return everything that later parts read.
    - It may return new tensors of the same shapes each time; they are copied to where the next graph reads them.
    - A returned tensor that it did not make (an argument, a cache) must be the same view of the same memory each time,
      and every other returned value must stay the same.
    - If later parts write to a tensor that it made, it must not keep that tensor, nor ever return one that is held
      elsewhere in its place.
    - It must leave Python objects that the call makes and gives to it (lists, dicts, instances) as they are.
    - If it raises, the call ends with that exception, even if the model would catch it.
    - It may use streams of its own if it joins them before it ends.
    - It may call a served callable. The call runs eagerly (``Reason.INSIDE_REPLAY``) if its graph is being replayed or
      shares memory with the one that is. From another thread, such a call waits for the replay to end: a break that
      waits for that thread hangs.

    A replay that finds a rule broken raises ``ReplayError``: a second, eager run would do all that its breaks did once
    more. A graph that breaks one at its capture is not made.

    Nested marks run inside the outer one. ``torch.compile`` traces through a mark.

    Args:
        target: A function (use it as a decorator), a module, which is marked in place, or the name of an operator.
        *more: For a module, the methods to mark instead of the whole: ``eager_break(model, "find_images")``. For
            operators, further names.

    Returns:
        The marked function, the same module, or the name of the operator. ``remove_eager_break`` takes back the marks
            of modules and operators.

    Raises:
        ConfigError: ``target`` is none of these.
    """
    given: Any = target
    if type(given) is str:
        for name in (given, *more):
            namespace, _, rest = name.partition("::")
            if not rest or not hasattr(getattr(torch.ops, namespace), rest.split(".")[0]):
                raise ConfigError(f"operator {name!r} is unknown to torch; write 'namespace::name', as 'aten::nonzero'")
        BREAKS.update((given, *more))
        return target
    if is_module(given):
        methods = more or ("forward",)
        for method in methods:
            found = getattr(given, method, None) if type(method) is str else None
            if not callable(found) or is_module(found):
                raise ConfigError(f"eager_break takes names of methods of the module, got {shown(method)}")
        for method in methods:
            _mark(given, method)
        return target
    if more:
        raise ConfigError("eager_break takes one function, one module with names of its methods, or names of operators")
    if callable(given):
        return target if is_break(given) else cast("T", as_break(given, callable_name(given)))
    raise ConfigError(f"eager_break takes a function, a module or names of operators, got {shown(given)}")


def _mark(module: nn.Module, method: str) -> None:
    plain = getattr(module, method)
    if is_break(plain):
        return
    name = type(module).__name__ if method == "forward" else f"{type(module).__name__}.{method}"
    if isinstance(plain, MethodType) and plain.__self__ is module:
        # A method again, so that a deep copy of the module calls the copy and not this module.
        mark: Any = MethodType(as_break(plain.__func__, name), module)
    else:
        mark = as_break(plain, name)
    setattr(module, method, mark)


def is_module(value: Any) -> TypeGuard[nn.Module]:
    """Whether a value is a module by its type, whatever it says of its class."""
    return issubclass(type(value), nn.Module)


def remove_eager_break(*targets: Any) -> None:
    """Take back the marks of modules, with those of their methods, and of operators.

    Args:
        *targets: Modules that are marked, and names of operators.

    Raises:
        ConfigError: A target is neither a marked module nor a name.
    """
    for target in targets:
        if type(target) is str:
            BREAKS.discard(target)
            continue
        marked = [name for name, value in vars(target).items() if is_break(value)] if is_module(target) else []
        if not marked:
            raise ConfigError(f"remove_eager_break takes marked modules and names of operators, got {shown(target)}")
        for name in marked:
            mark = getattr(target, name)
            before = vars(getattr(mark, "__func__", mark))[ORIGINAL]
            before = MethodType(before, target) if isinstance(mark, MethodType) else before
            delattr(target, name)
            if getattr(target, name, None) != before:  # it hung on the module itself
                setattr(target, name, before)
