"""When two callables are one: for whoever is given a function anew at each call."""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from graphdispatch.state.callables import same_callable

from ..behaviour.cases_read import Operand


def of_scale(scale: Any) -> Callable[[Any], Any]:
    """A lambda that captured ``scale``."""
    return lambda x: x * scale


def with_default(scale: Any) -> Callable[..., Any]:
    """A lambda whose defaults hold ``scale``."""
    return lambda x, *, by=scale: x * by


def counting(scale: Any) -> Callable[[Any], Any]:
    """A function that assigns a variable of this one."""

    def count(x: Any) -> Any:
        nonlocal scale
        scale = scale + 1
        return x * scale

    return count


def of_module(name: str) -> Callable[[Any], Any]:
    """The same code over the variables of another module."""
    return types.FunctionType(add.__code__, {"name": name})


def named(scale: float) -> Callable[[Any], Any]:
    """A function with an attribute."""
    fn: Any = of_scale(_weight)
    fn.scale = scale
    return fn  # type: ignore[no-any-return]


def add(a: Any, b: Any) -> Any:
    """Two arguments for partials."""
    return a + b


_weight, _other = torch.ones(3), torch.ones(3)
_runner, _second = Operand(), Operand()
PAIRS: dict[str, tuple[Any, Any, bool]] = {
    "one object": (add, add, True),
    "one lambda written twice over one object": (of_scale(_weight), of_scale(_weight), True),
    "another captured object": (of_scale(_weight), of_scale(_other), False),
    "one default": (with_default(_weight), with_default(_weight), True),
    "another default": (with_default(_weight), with_default(_other), False),
    "other code": (lambda x: x, lambda x: x, False),
    "other variables of the same value, which it assigns": (counting(_weight), counting(_weight), False),
    "other globals": (of_module("one"), of_module("other"), False),
    "another attribute": (named(2), named(3), False),
    "one attribute": (named(2), named(2), True),
    "bound methods": (_runner.__len__, _runner.__len__, True),
    "methods of two objects": (_runner.__len__, _second.__len__, False),
    "two methods of one object": (_runner.__len__, _runner.__call__, False),
    "partials": (partial(add, _weight), partial(add, _weight), True),
    "partials of another argument": (partial(add, _weight), partial(add, _other), False),
    "partials of more arguments": (partial(add, _weight), partial(add, _weight, _weight), False),
    "partials by keyword": (partial(add, b=_weight), partial(add, b=_weight), True),
    "partials by another keyword": (partial(add, b=_weight), partial(add, a=_weight), False),
    "partials of other functions": (partial(of_scale, _weight), partial(with_default, _weight), False),
    "equal objects": (_runner, _second, False),
    "function and its partial": (add, partial(add), False),
}


@pytest.mark.parametrize(("a", "b", "same"), PAIRS.values(), ids=PAIRS.keys())
def test_same_callable(a: Any, b: Any, same: bool) -> None:
    """Two callables are one if they are one piece of code over the same objects; the order does not matter."""
    assert same_callable(a, b) is same
    assert same_callable(b, a) is same
