"""Plain objects for tests of Python state, and what serves a callable that reaches them."""

from collections.abc import Callable
from typing import Any

from graphdispatch import graphed

__all__ = ["Box", "Slotted", "served"]


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
    return graphed(fn, dynamic={"x": 0}, sizes=(4,), **options)
