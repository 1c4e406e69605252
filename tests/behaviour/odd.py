"""Objects that answer wrongly, or not at all, to what is asked of objects in general."""

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np
import torch

__all__ = ["ODD", "ODD_CALLABLES"]


class EqRaises:
    def __eq__(self, other: object) -> bool:
        raise ValueError("eq")

    __hash__ = None  # type: ignore[assignment]


class EqArray:
    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    __hash__ = object.__hash__


class EqTensor:
    def __eq__(self, other: object) -> Any:
        return torch.ones(3)

    __hash__ = object.__hash__


class BoolRaises:
    def __bool__(self) -> bool:
        raise ValueError("bool")


class LenLies:
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class LenRaises:
    def __len__(self) -> int:
        raise ValueError("len")


class GetattrKey:
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class GetattrAnything:
    def __getattr__(self, name: str) -> Any:
        return self


class ReprRaises:
    def __repr__(self) -> str:
        raise ValueError("repr")


class HashRaises:
    def __hash__(self) -> int:
        raise ValueError("hash")


class ClassLies:
    @property
    def __class__(self) -> Any:
        return torch.Tensor


class ClassRaises:
    @property
    def __class__(self) -> Any:
        raise KeyError("class")


class OddNumber(int):
    def __eq__(self, other: object) -> bool:
        raise ValueError("eq")

    def __ne__(self, other: object) -> bool:
        raise ValueError("ne")

    def __repr__(self) -> str:
        raise ValueError("repr")

    __hash__ = int.__hash__


class OddMember(Enum):
    ONE = 1

    def __eq__(self, other: object) -> bool:
        raise ValueError("eq")

    def __hash__(self) -> int:
        return 3


class OddDict(dict[str, Any]):
    def __eq__(self, other: object) -> bool:
        raise ValueError("eq")

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


ODD: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (
        EqRaises, EqArray, EqTensor, BoolRaises, LenLies, LenRaises, GetattrKey, GetattrAnything, ReprRaises,
        HashRaises, ClassLies, ClassRaises,
    )
} | {
    "OddNumber": lambda: OddNumber(3),
    "OddMember": lambda: OddMember.ONE,
    "OddDict": lambda: OddDict(a=1),
    "array": lambda: np.ones(3),
}  # fmt: skip
"""How to make each of them, by name."""


class CallGetattrKey(GetattrKey):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class CallGetattrAnything(GetattrAnything):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class CallEqRaises(EqRaises):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class CallLenRaises(LenRaises):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def __bool__(self) -> bool:
        raise ValueError("bool")


ODD_CALLABLES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (CallGetattrKey, CallGetattrAnything, CallEqRaises, CallLenRaises)
}
"""Callables of the same kinds: each doubles ``x``."""
