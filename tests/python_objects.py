"""Plain objects for tests of Python state, and what serves a callable that reaches them."""

from collections.abc import Callable
from typing import Any

import torch

from graphdispatch import graphed

from .helpers import with_options

__all__ = ["Box", "Slotted", "check_reading", "served"]


class Box:
    """A plain object with whatever attributes it is given."""

    limit = 1.0

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    """An object without a dict."""

    __slots__ = ("k",)

    def __init__(self, k: Any) -> None:
        self.k = k


def served(fn: Callable[..., Any], **options: Any) -> Any:
    """``fn`` behind ``graphed``, with graphs of four rows."""
    return graphed(fn, dynamic={"x": 0}, sizes=(4,), **with_options(options))


def check_reading(number: Callable[[], Any], change: Callable[[], Any]) -> None:
    """A callable that reads ``number``, which is 2, and 5 after ``change``: each call answers as eager does."""
    step = served(lambda x: x * number())
    for expected in (2, 5):
        for rows in (3, 4, 3, 3, 2):
            x = torch.rand(rows, 2)
            assert torch.equal(step(x), x * expected)
        if expected == 2:
            assert step.stats.hits, step.explain(x)
            change()
