"""What is compared of objects that keep something elsewhere than in attributes, slots and entries."""

import sys
from abc import ABCMeta, get_cache_token
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from operator import eq, le
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from . import objects
from .objects import Reader

__all__ = [
    "PLAIN_READERS",
    "SETTINGS",
    "class_readers",
    "has_memory",
    "in_order",
    "is_set",
    "read_compiled",
    "readers_of",
    "setting_readers",
    "unchanged",
    "write_compiled",
]

_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    defaultdict: ("default_factory",),
    partial: ("func", "args", "keywords"),
    BaseException: ("args",),
}
"""Attributes that compiled classes keep outside of ``__dict__``."""
_KEEPERS = tuple(_ATTRIBUTES)
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "get_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "are_deterministic_algorithms_enabled": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
    ),
    "get_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "flash_sdp_enabled": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "math_sdp_enabled": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "mem_efficient_sdp_enabled": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "get_float32_matmul_precision": (torch.get_float32_matmul_precision, None),
    "getrecursionlimit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "geterr": (lambda: tuple(np.geterr().items()), lambda before: np.seterr(**dict(before))),
}
"""Settings of the process by the name of the function that reads them: that function, and what writes them. Without
the latter, a setting is read only where code does so: torch may warn of it."""


def unchanged(value: Any, before: Any, read: Callable[[Any], Any], compare: Callable[[Any, Any], Any] = eq) -> bool:
    """Whether what ``read`` gives of a value is what it was before; a cache may hold more (``le``)."""
    return bool(compare(before, read(value)))


def readers_of(value: Any) -> list[Reader]:
    """What to compare of an object, besides its attributes, slots and entries."""
    kind = type(value)
    found: list[Reader] = [partial(member.__get__, value) for member in _members_of(value).values()]
    reads: list[tuple[Any, ...]] = []
    if issubclass(kind, OrderedDict) and len(value) > 1:
        reads.append((_order,))
    elif issubclass(kind, objects.CACHES):
        from .rare import read_cache

        reads.append((read_cache, le))
    return [*found, *(partial(unchanged, value, read(value), read, *compare) for read, *compare in reads)]


def read_compiled(value: Any) -> dict[str, Any]:
    """The attributes that an object's compiled classes keep; empty for most."""
    return {label: member.__get__(value) for label, member in _members_of(value).items()}


def _members_of(value: Any) -> dict[str, Any]:
    """Their descriptors by label, from the compiled class: a subclass may have code of its own under the name."""
    kind = type(value)
    if not issubclass(kind, _KEEPERS):
        return {}
    found = ((base, name) for base, names in _ATTRIBUTES.items() if issubclass(kind, base) for name in names)
    return {f".{name}": vars(base)[name] for base, name in found}


def write_compiled(value: Any, before: dict[str, Any]) -> None:
    """Put them back."""
    if issubclass(type(value), partial):
        value.__setstate__((*before.values(), value.__dict__ or None))
        return
    for label, member in _members_of(value).items():
        member.__set__(value, before[label])


def setting_readers(names: Collection[str]) -> list[Reader]:
    """What to compare of the settings that code asks for under ``names``."""
    return [partial(is_set, read, read()) for name, (read, _) in SETTINGS.items() if name in names]


def is_set(read: Reader, before: Any) -> bool:
    """Whether a setting is what it was."""
    return bool(read() == before)


def in_order(tables: list[Mapping[str, Any]], names: list[list[str]]) -> bool:
    """Whether tables whose order counts have the names that they had, in that order."""
    return list(map(list, tables)) == names


PLAIN_READERS = (unchanged, is_set, in_order)
"""Readers that tell whether something is as it was; their second argument is how it was, as plain data."""


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has an address to compare: not a lazy parameter, or one of a class that computes in its own way.
    Of these the identity is compared, and what they hold."""
    is_own = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_own and not is_lazy(tensor) and tensor.layout is torch.strided


def class_readers(kind: type, names: Collection[str]) -> list[Reader]:
    """What to compare of a class of the user that code may ask for its subclasses, or whether something is one."""
    found: list[Reader] = []
    if "__subclasses__" in names:
        found.append(partial(unchanged, kind, _subclasses(kind), _subclasses))
    if issubclass(type(kind), ABCMeta):  # others may register with it; that is not kept per class
        found.append(partial(is_set, get_cache_token, get_cache_token()))
    return found


def _subclasses(kind: type) -> list[int]:
    return list(map(id, type.__subclasses__(kind)))


def _order(table: Any) -> list[int]:
    """The order of the keys of an ``OrderedDict``, which its dict does not tell."""
    return list(map(id, OrderedDict.keys(table)))
