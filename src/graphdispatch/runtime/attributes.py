"""What objects hold, read without running code of their classes: no attribute hook, no ``__iter__`` of a subclass."""

from collections import OrderedDict, deque
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .constants import VALUES

_BARE = frozenset({dict, list, set, deque, tuple, frozenset})
"""Types whose objects have no attributes."""
_LEAVES = frozenset((*VALUES, torch.Tensor, nn.Parameter)) - {torch.Size}
"""Classes of which torch's pytrees make no nest."""


def attribute_table(value: Any) -> dict[str, Any] | None:
    """The attributes of an object by name, live and writable; None if it has none."""
    if type(value) in _BARE:
        return None
    try:
        table = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return table if issubclass(type(table), dict) else None


def content(container: Any) -> list[Any]:
    """The keys and values of a dict, or the entries of another container, all of one moment: threads may write it."""
    if type(container) is dict:
        held = container.copy()
        return [*held, *held.values()]
    kind = type(container)
    if issubclass(kind, dict):
        pairs = list(dict_class_of(container).items(container))
        return [*(key for key, _ in pairs), *(value for _, value in pairs)]
    kinds: tuple[Any, ...] = (list, tuple, set, deque, frozenset)
    base = next((base for base in kinds if issubclass(kind, base)), None)
    return [] if base is None else list(base.__iter__(container))


def dict_class_of(table: Any) -> Any:
    """The class of Python's own whose methods read and write a dict: an ``OrderedDict`` has another order."""
    return OrderedDict if issubclass(type(table), OrderedDict) else dict


def holds_more(value: Any) -> bool:
    """Whether an argument is neither a tensor nor a plain constant, so that it may hold tensors."""
    return not issubclass(type(value), (torch.Tensor, *VALUES))


def wants_gradient(value: Any) -> bool:
    """Whether an argument is a tensor that requires a gradient, or an object or a class that holds such a tensor."""
    if issubclass(type(value), torch.Tensor):
        return bool(value.requires_grad)
    if issubclass(type(value), type):
        held = [one for base in type.mro(value) for one in vars(base).values()]
    else:
        held = content(value) or list((attribute_table(value) or {}).values())
    leaves = held if all(type(inner) in _LEAVES for inner in held) else tree_leaves(held)
    return any(issubclass(type(inner), torch.Tensor) and inner.requires_grad for inner in leaves)
