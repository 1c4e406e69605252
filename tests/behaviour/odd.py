"""Objects that answer wrongly, or not at all, to what is asked of objects in general."""

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch

__all__ = ["ODD", "ODD_CALLABLES"]


def fails(self: Any, *args: Any) -> Any:
    """A method that raises."""
    raise ValueError("odd")


def has_no_key(self: Any, *args: Any) -> Any:
    """A method that raises what looks like a missing key."""
    raise KeyError("odd")


_METHODS: dict[str, dict[str, Any]] = {
    "EqRaises": {"__eq__": fails, "__hash__": None},
    "EqArray": {"__eq__": lambda self, other: np.array([True, False]), "__hash__": object.__hash__},
    "EqTensor": {"__eq__": lambda self, other: torch.ones(3), "__hash__": object.__hash__},
    "BoolRaises": {"__bool__": fails},
    "LenLies": {"__len__": lambda self: 5, "__iter__": lambda self: iter(())},
    "LenRaises": {"__len__": fails},
    "GetattrKey": {"__getattr__": has_no_key},
    "GetattrAnything": {"__getattr__": lambda self, name: self},
    "ReprRaises": {"__repr__": fails},
    "HashRaises": {"__hash__": fails},
    "ClassLies": {"__class__": property(lambda self: torch.Tensor)},
    "ClassRaises": {"__class__": property(has_no_key)},
}
_PLAIN = {name: type(name, (), methods) for name, methods in _METHODS.items()}
_NUMBER = {"__eq__": fails, "__ne__": fails, "__repr__": fails, "__hash__": int.__hash__}


class OddMember(Enum):
    ONE = 1
    __eq__ = fails

    def __hash__(self) -> int:
        return 3


class OddDict(dict[str, Any]):
    __eq__, __getattr__ = fails, has_no_key  # type: ignore[assignment]


ODD: dict[str, Callable[[], Any]] = {
    **_PLAIN,
    "OddNumber": lambda: type("OddNumber", (int,), _NUMBER)(3),
    "OddMember": lambda: OddMember.ONE,
    "OddDict": lambda: OddDict(a=1),
    "array": lambda: np.ones(3),
}
"""How to make each of them, by name."""
_CALLED = {"GetattrKey": {}, "GetattrAnything": {}, "EqRaises": {}, "LenRaises": {"__bool__": fails}}
ODD_CALLABLES: dict[str, Callable[[], Any]] = {
    name: type(f"Call{name}", (_PLAIN[name],), {"__call__": lambda self, x: x * 2, **more})
    for name, more in _CALLED.items()
}
"""Callables of the same kinds: each doubles ``x``."""
