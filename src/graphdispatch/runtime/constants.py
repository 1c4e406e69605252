"""Constants among arguments: what no callable can tell from an equal one."""

from collections.abc import Callable, Iterator
from enum import Enum
from itertools import chain
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Types of plain constants: each is its own description."""
_EQUAL = (
    *(bool, int, str, bytes, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Equal values of one of these types look the same."""
_EXACT: dict[type, Callable[[Any], Any]] = {
    float: float.hex,
    complex: repr,
    range: lambda value: (value.start, value.stop, value.step),
    torch.Size: lambda value: tuple(map(exactly, value)),
    **dict.fromkeys(
        (kind for kind in np.sctypeDict.values() if not issubclass(kind, (np.object_, np.void))),
        lambda value: (value.dtype, value.tobytes()),
    ),
}
"""Types whose equality is too coarse (0.0 equals -0.0) or too fine (NaN is not NaN), and what to compare instead."""
CONSTANTS = frozenset((*_EXACT, *_EQUAL))
"""The types of constants."""
IN_CORE = frozenset((float, complex, *_EQUAL))
"""Those that the native core compares as exactly."""
_BY_IDENTITY = (FunctionType, BuiltinFunctionType, type, ModuleType, Enum)
"""Compared by identity: the code and state of a function are followed as those of the callable itself."""


def is_constant(value: Any) -> bool:
    """Whether a value is compared by what it is, or is followed as the callable is."""
    return type(value) in CONSTANTS or issubclass(type(value), _BY_IDENTITY)


def exactly(value: Any) -> tuple[type, Any]:
    """A constant as something that is equal exactly where it looks the same to a callable."""
    kind = type(value)
    return kind, _EXACT[kind](value) if kind in _EXACT else value


def frozen(value: Any) -> Any:
    """What is equal exactly where two constants, or lists, tuples and dicts of them, look the same. It keeps nothing of
    a container; of any other object the identity counts, so that somebody has to hold that."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind, *map(frozen, value)
    if kind is dict:
        return kind, frozen(list(value)), frozen(list(value.values()))
    return exactly(value) if kind in CONSTANTS else (object, id(value))


def within(value: Any) -> Iterator[Any]:
    """A nest of lists, tuples and dicts, and all that is in it, keys among it."""
    yield value
    if type(value) is dict:
        value = [*value, *value.values()]
    if type(value) in (list, tuple):
        yield from chain.from_iterable(map(within, value))
