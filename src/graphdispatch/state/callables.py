"""Whether two callables are one: for whoever is given a function anew at each call."""

import types
from functools import lru_cache, partial
from operator import is_
from typing import Any

from . import objects
from .bytecode import stored_by

__all__ = ["same_callable"]


def same_callable(a: Any, b: Any) -> bool:
    """Whether two callables do the same: they are one object, or the same code over the same objects.

    So a lambda that is made again in a loop counts as the same callable, unless it captured something else.
    """
    if a is b:
        return True
    if issubclass(type(a), partial) and issubclass(type(b), partial):
        same_args = (
            len(a.args) == len(b.args) and all(map(is_, a.args, b.args)) and a.keywords.keys() == b.keywords.keys()
        )
        return same_args and same_callable(a.func, b.func) and all(a.keywords[k] is b.keywords[k] for k in a.keywords)
    if issubclass(type(a), types.MethodType) and issubclass(type(b), types.MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    if issubclass(type(a), types.FunctionType) and issubclass(type(b), types.FunctionType):
        if a.__code__ is not b.__code__ or a.__globals__ is not b.__globals__:
            return False
        # A variable that the code assigns must be the same one, else a run would assign that of the other function.
        read = None if _assigns_outer(a.__code__) else objects.cell_value
        held = [(*(map(read, f.__closure__ or ()) if read else f.__closure__ or ()), *_held_by(f)) for f in (a, b)]
        return len(held[0]) == len(held[1]) and all(map(is_, *held))
    return False


def _held_by(fn: types.FunctionType) -> tuple[Any, ...]:
    """The defaults and attributes of a function."""
    return (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values(), *fn.__dict__, *fn.__dict__.values())


@lru_cache(maxsize=1024)
def _assigns_outer(code: types.CodeType) -> bool:
    """Whether code assigns variables of the functions around it."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return not stored_by(code).isdisjoint(code.co_freevars) or any(map(_assigns_outer, inner))
