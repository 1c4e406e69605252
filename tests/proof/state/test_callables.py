"""When two callables are one: a manager is given a function anew at each call, and has a graph for each that is new."""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdispatch.engines import CUDAGraphConfig, CUDAGraphManager

from ...behaviour.cases import Box
from ...helpers import AT_ONCE


def of_scale(scale: Any) -> Callable[[Any], Any]:
    """A lambda that captured ``scale``."""
    return lambda x: x * scale


def with_default(scale: Any) -> Callable[..., Any]:
    """A lambda whose defaults hold ``scale``."""
    return lambda x, *, by=scale: x * by


def counting(scale: Any) -> Callable[[Any], Any]:
    """A function that assigns a variable of this one, for larger batches."""

    def count(x: Any) -> Any:
        nonlocal scale
        scale = scale + 1 if len(x) > 4 else scale
        return x * scale

    return count


def counting_within(scale: Any) -> Callable[[Any], Any]:
    """The same in a function of the function's own."""

    def outer(x: Any) -> Any:
        def count() -> None:
            nonlocal scale
            scale = scale + 1

        if len(x) > 4:
            count()
        return x * scale

    return outer


def of_module(scale: Tensor) -> Callable[[Any], Any]:
    """The same code over the variables of another module."""
    return types.FunctionType((lambda x: x * scale_of_module).__code__, {"scale_of_module": scale})  # type: ignore[name-defined]  # noqa: F821


def named(scale: float) -> Callable[[Any], Any]:
    """A function with an attribute."""
    fn: Any = of_scale(_weight)
    fn.scale = scale
    return fn  # type: ignore[no-any-return]


def add(a: Any, x: Any, b: Any = 0) -> Any:
    """Arguments for partials."""
    return a + x + b


class Scaled(Box):
    """Has two methods."""

    def times(self, x: Tensor) -> Tensor:
        return x * self.scale

    def plus(self, x: Tensor) -> Tensor:
        return x + self.scale


_weight, _other = torch.ones(3), torch.full((3,), 2.0)
_one, _second = Scaled(scale=_weight), Scaled(scale=_other)
PAIRS: dict[str, tuple[Any, Any, bool]] = {
    "one lambda written twice over one object": (of_scale(_weight), of_scale(_weight), True),
    "another captured object": (of_scale(_weight), of_scale(_other), False),
    "one default": (with_default(_weight), with_default(_weight), True),
    "another default": (with_default(_weight), with_default(_other), False),
    "other code": (lambda x: x * 2, lambda x: x * 3, False),
    "other variables of the same value, which it assigns": (counting(_weight), counting(_weight), False),
    "variables that an inner function assigns": (counting_within(_weight), counting_within(_weight), False),
    "other globals": (of_module(_weight), of_module(_other), False),
    "another attribute": (named(2), named(3), False),
    "one attribute": (named(2), named(2), True),
    "bound methods": (_one.times, _one.times, True),
    "methods of two objects": (_one.times, _second.times, False),
    "two methods of one object": (_one.times, _one.plus, False),
    "partials": (partial(add, _weight), partial(add, _weight), True),
    "partials of another argument": (partial(add, _weight), partial(add, _other), False),
    "partials by keyword": (partial(add, a=_weight), partial(add, a=_weight), True),
    "partials of more keywords": (partial(add, a=_weight), partial(add, a=_weight, b=_weight), False),
    "partials of another keyword's value": (partial(add, 1, b=_weight), partial(add, 1, b=_other), False),
    "partials of other functions": (partial(add, 0), partial(of_scale(_weight)), False),
    "function and its partial": (of_scale(_weight), partial(of_scale(_weight)), False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_same_callable(name: str) -> None:
    """Two callables are one if they are one piece of code over the same objects; the order does not matter."""
    one, other, same = PAIRS[name]
    for pair in ((one, other), (other, one)):
        manager = CUDAGraphManager(CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4, options=AT_ONCE))
        for fn in (pair[0], *pair, pair[1]):
            x = torch.randn(4, 3)
            assert torch.equal(manager.execute_or_capture(4, 1, fn, {"x": x}), fn(x=x))
        assert manager.stats.captures == (1 if same else 2)
