"""Breaks: the parts of a model that run eagerly between the graphs of a PIECEWISE capture.

``eager_break`` marks a function, a module, or operators by name. Outside a PIECEWISE capture, a marked function costs
one lookup of a context variable. In a FULL capture it is part of the graph.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeGuard, TypeVar, overload

import torch
from torch import nn

from ..errors import ConfigError, shown
from .marks import BREAKS, ORIGINAL, as_break, is_break
from .rules import callable_name

__all__ = ["eager_break", "is_marked", "remove_eager_break"]

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=nn.Module)


@overload
def eager_break(target: M) -> M:
    """Mark a module in place."""


@overload
def eager_break(target: F) -> F:
    """Mark a function, as a decorator."""


@overload
def eager_break(target: str, *more: str) -> None:
    """Mark operators by their names."""


def eager_break(target: Any, *more: Any) -> Any:
    """Mark a part that runs eagerly in PIECEWISE captures.

    The marked part may do what no graph can, such as reading values back or using changing metadata. Outside of
    PIECEWISE captures a mark changes nothing. These rules hold:

    - It must return everything that later parts read.
    - It may return new tensors of the same shapes each time; they are copied to where the next graph reads them.
    - A returned tensor that it did not make (an argument, a cache) must be the same view of the same memory each time,
      and every other returned value must stay the same.
    - If it raises, the call ends with that exception, even if the model would catch it.
    - It may use streams of its own if it joins them before it ends.
    - It may call a served callable. The call runs eagerly (``Reason.INSIDE_REPLAY``) if its graph is being replayed or
      shares memory with the one that is. From another thread, such a call waits for the replay to end: a break that
      waits for that thread hangs.

    Nested marks run inside the outer one. ``torch.compile`` traces through a mark.

    Args:
        target: A function (use it as a decorator), a module, which is marked in place, or the name of an operator.
        *more: Further names of operators.

    Returns:
        The marked function, the same module, or None for operators. ``remove_eager_break`` takes back the marks of
            modules and operators.

    Raises:
        ConfigError: ``target`` is none of these.
    """
    if type(target) is str:
        for name in (target, *more):
            namespace, _, rest = name.partition("::")
            if not rest or not hasattr(getattr(torch.ops, namespace), rest.split(".")[0]):
                raise ConfigError(f"operator {name!r} is unknown to torch; write 'namespace::name', as 'aten::nonzero'")
        BREAKS.update((target, *more))
        return None
    if more:
        raise ConfigError("eager_break takes one function or module, or names of operators")
    if is_module(target):
        forward, name = target.forward, type(target).__name__
        if isinstance(forward, MethodType) and forward.__self__ is target and not is_break(forward):
            # A method again, so that a deep copy of the module calls the copy and not this module.
            target.forward = MethodType(as_break(forward.__func__, name), target)
        elif not is_break(forward):
            target.forward = as_break(forward, name)
        return target
    if callable(target):
        return target if is_break(target) else as_break(target, callable_name(target))
    raise ConfigError(f"eager_break takes a function, a module or names of operators, got {shown(target)}")


def is_module(value: Any) -> TypeGuard[nn.Module]:
    """Whether a value is a module by its type, whatever it says of its class."""
    return issubclass(type(value), nn.Module)


def is_marked(module: nn.Module) -> bool:
    """Whether a module is marked to run eagerly in PIECEWISE captures."""
    return is_break(module.forward)


def remove_eager_break(*targets: Any) -> None:
    """Take back the marks of modules and of operators.

    Args:
        *targets: Modules that are marked, and names of operators.

    Raises:
        ConfigError: A target is neither a marked module nor a name.
    """
    for target in targets:
        if type(target) is str:
            BREAKS.discard(target)
        elif is_module(target) and is_marked(target):
            original = getattr(target.forward, ORIGINAL)
            del target.forward
            if getattr(target.forward, "__func__", None) is not original:  # not the class's forward, but its own
                target.forward = original
        else:
            raise ConfigError(f"remove_eager_break takes marked modules and names of operators, got {shown(target)}")
