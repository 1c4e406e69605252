"""Readers that pass over changes which tell nothing: further results of a cache, and values that cannot train."""

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import nn

from ...runtime.attributes import content
from . import objects


class Results:
    """Tells whether a ``functools.lru_cache`` holds all that it held when this was made; it may hold more.

    While its own table has the same keys and values, nothing else is looked at.
    """

    __slots__ = ("_kept", "_latest", "_table")

    def __init__(self, cache: Any) -> None:
        self._table = objects.results_of(cache)
        self._kept = self._latest = content(self._table)

    def __call__(self) -> bool:
        """Whether it holds all that it held."""
        now, latest = content(self._table), self._latest
        if len(now) == len(latest) and all(map(is_, now, latest)):
            return True
        if not set(map(id, self._kept)).issubset(map(id, now)):
            return False
        self._latest = now  # objects that are held, so that none can get the address of another
        return True


def matters(value: Any, depth: int = 3) -> bool:
    """Whether it is a module or a tensor with a gradient, or a container of such, ``depth`` levels deep."""
    if issubclass(type(value), torch.Tensor):
        return bool(value.requires_grad)
    is_container = depth > 0 and issubclass(type(value), (tuple, *objects.CONTAINERS))
    return issubclass(type(value), nn.Module) or (
        is_container and any(matters(inner, depth - 1) for inner in content(value))
    )


class Untrained:
    """Tells whether nothing that may train came to where ``read`` reads. What was there when this was made is known;
    constants, and tensors and containers without a gradient, cannot train."""

    __slots__ = ("_known", "_latest", "_read")

    def __init__(self, read: Callable[[], list[Any]]) -> None:
        self._read, self._latest = read, read()
        self._known = {id(one): one for one in self._latest}

    def __call__(self) -> bool:
        """Whether nothing came."""
        now, latest = self._read(), self._latest
        if len(now) == len(latest) and all(map(is_, now, latest)):
            return True
        if any(id(one) not in self._known and _may_train(one) for one in now):
            return False
        self._latest = now
        return True


def _may_train(value: Any) -> bool:
    """Whether a value may train, or something that it leads to."""
    kind = type(value)
    is_plain = issubclass(kind, (torch.Tensor, tuple, *objects.CONTAINERS))
    return matters(value) if is_plain else not objects.is_leaf(kind)
