"""Ways in which a callable reaches another one, and with it the state that that one uses."""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import graphdispatch as gd

from .cases import PATCH, Box, Fn

__all__ = ["PIECEWISE", "WAYS"]

HELD: list[Fn] = []


class Runs:
    """An object that runs a callable, in each way that Python's syntax has for objects."""

    def __init__(self, fn: Fn) -> None:
        self.fn = fn

    def __call__(self, x: Tensor) -> Any:
        return self.fn(x)

    def __enter__(self) -> Fn:
        return self.fn

    def __exit__(self, *_: object) -> None:
        return None

    def __matmul__(self, x: Tensor) -> Any:
        return self.fn(x)

    def run(self, x: Tensor) -> Any:
        return self.fn(x)

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> Any:
        return self.fn(output)

    @property
    def given(self) -> Fn:
        return self.fn


class Holding(nn.Module):
    """A module that runs a callable."""

    def __init__(self, fn: Fn) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


def hooked(fn: Fn) -> nn.Module:
    """A module whose hook is a method that runs it."""
    module = Holding(lambda x: x).eval()
    module.register_forward_hook(Runs(fn).hook)
    return module


def entered(fn: Fn) -> Fn:
    """A block gives it."""
    runs = Runs(fn)

    def enter(x: Tensor) -> Any:
        with runs as run:
            return run(x)

    return enter


def imported(fn: Fn) -> Fn:
    """A module has it, which code imports when it is called."""
    made = types.ModuleType("users_callables")
    vars(made).update(run=fn)
    PATCH.setitem(sys.modules, "users_callables", made)

    def imports(x: Tensor) -> Any:
        import users_callables

        return users_callables.run(x)

    return imports


def global_list(fn: Fn) -> Fn:
    """A list among the variables of a module."""
    PATCH.setitem(globals(), "HELD", [fn])
    return lambda x: HELD[0](x)


def cached(fn: Fn) -> Fn:
    """A cache has it, which was called before."""
    get = functools.cache(lambda: fn)
    assert get() is fn
    return lambda x: get()(x)


def weakly(fn: Fn) -> Fn:
    """A weak reference to an object that something else holds."""
    runs = Runs(fn)
    reference = weakref.ref(runs)
    return with_owner(lambda x: reference().run(x), runs)  # type: ignore[union-attr]


def with_owner(fn: Any, owner: Any) -> Any:
    """A function that keeps something alive."""
    fn.owner = owner
    return fn


def through_break(fn: Fn) -> Fn:
    """Behind a break that reads nothing."""
    part = gd.eager_break(lambda x: x + 0)
    return lambda x: fn(part(x))


IN_ONE_PLACE = frozenset(("import", "global list"))
"""Ways that look in one place of the process: there, the latest callable takes that of those before."""

WAYS: dict[str, Callable[[Fn], Fn]] = {
    "itself": lambda fn: fn,
    "closure": lambda fn: lambda x: fn(x),
    "inner function": lambda fn: (lambda inner: lambda x: inner(x))(lambda x: fn(x)),
    "default": lambda fn: lambda x, fn=fn: fn(x),
    "decorator": lambda fn: torch.no_grad()(fn),
    "object": lambda fn: Runs(fn),
    "method": lambda fn: Runs(fn).run,
    "partial of an object": lambda fn: partial(Runs(fn)),
    "partial of a method": lambda fn: partial(Runs(fn).run),
    "argument of a partial": lambda fn: partial(lambda fn, x: fn(x), fn),
    "operator": lambda fn: (lambda runs: lambda x: runs @ x)(Runs(fn)),
    "property": lambda fn: (lambda runs: lambda x: runs.given(x))(Runs(fn)),
    "attribute": lambda fn: (lambda held: lambda x: held.fn(x))(Box(fn=fn)),
    "list": lambda fn: lambda x, runs=[fn]: [each(x) for each in runs][0],  # noqa: RUF015
    "table": lambda fn: lambda x, runs={"k": fn}: runs["k"](x),
    "module": lambda fn: Holding(fn).eval(),
    "method of a module": lambda fn: Holding(fn).eval().forward,
    "hidden module": lambda fn: (lambda held: lambda x: held[0](x))([Holding(fn).eval()]),
    "hook": hooked,
    "block": entered,
    "import": imported,
    "global list": global_list,
    "cache": cached,
    "weak reference": weakly,
    "graphs of its own": lambda fn: (lambda inner: lambda x: inner(x))(gd.graphed(fn, dynamic={"x": 0})),
    "break": through_break,
}
PIECEWISE = frozenset({"break"})
"""The ways that end a graph."""
