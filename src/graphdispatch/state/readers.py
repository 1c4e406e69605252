"""What is compared of objects that keep something elsewhere than in attributes, slots and entries."""

import random
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial
from operator import attrgetter, eq, le, methodcaller
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from . import objects
from .objects import Reader
from .snapshot import random_holder

_STATES = {random.Random: "getstate", np.random.RandomState: "get_state", np.random.BitGenerator: "state"}
"""Names by which code reads the state of one, and does not change it."""


def unchanged(value: Any, before: Any, read: Callable[[Any], Any], compare: Callable[[Any, Any], Any] = eq) -> bool:
    """Whether what ``read`` gives of a value is what it was before; a cache may hold more (``le``)."""
    return bool(compare(before, read(value)))


def readers_of(value: Any, names: Collection[str]) -> list[Reader]:
    """What to compare of an object, besides its attributes, slots and entries, where code reads ``names``."""
    kind = type(value)
    found: list[Reader] = []
    if issubclass(kind, OrderedDict) and len(value) > 1:
        found.append(partial(unchanged, value, _order(value), _order))
    elif issubclass(kind, objects.CACHES):
        found.append(partial(unchanged, value, _read_cache(value), _read_cache, le))
    elif any(issubclass(kind, home) and name in names for home, name in _STATES.items()):
        holder = random_holder((), value)
        found.append(partial(unchanged, value, holder.before, holder.way.read))
    return found


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has an address to compare: not a lazy parameter, or one of a class that computes in its own way.
    Of these the identity is compared, and what they hold."""
    is_own = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_own and not is_lazy(tensor) and tensor.layout is torch.strided


def _bytes_beside(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() - tensor.nbytes


def _grad(tensor: torch.Tensor) -> Any:
    return tensor.grad if tensor.is_leaf else None  # of others torch warns


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # those of inference mode have none


TENSOR_READERS: dict[str, Callable[[Any], Any]] = {
    **{name: attrgetter(name) for name in ("_backward_hooks", "grad_fn", "is_leaf", "output_nr")},
    **{name: attrgetter(name) for name in ("requires_grad", "retains_grad")},
    **{
        name: methodcaller(name)
        for name in ("_is_view", "is_conj", "is_inference", "is_neg", "is_shared", "storage_offset")
    },
    **dict.fromkeys(("storage", "typed_storage", "untyped_storage", "_typed_storage"), _bytes_beside),
    **dict.fromkeys(("grad", "_grad"), _grad),
    "_base": methodcaller("_is_view"),
    "_version": _version,
}
"""What code can ask of a tensor besides its values and its form, by name."""


def tensor_readers(tensor: torch.Tensor, names: Collection[str]) -> list[Reader]:
    """What to compare of a tensor besides its address and form: what code asks for under ``names``, and whether numbers
    are conjugated."""
    if not has_memory(tensor):
        return [partial(getattr, tensor, "requires_grad")] if "requires_grad" in names else []
    asked = TENSOR_READERS.keys() & ({"is_conj", *names} if tensor.dtype.is_complex else names)
    return [partial(TENSOR_READERS[name], tensor) for name in sorted(asked)]


def _order(table: Any) -> list[int]:
    """The order of the keys of an ``OrderedDict``, which its dict does not tell."""
    return list(map(id, OrderedDict.keys(table)))


def _read_cache(cache: Any) -> set[Any]:
    """What a ``functools.lru_cache`` holds: constants by value, objects by identity."""
    outer = [inner for held in objects.referents(cache) for inner in (objects.content(held) or [held])]
    every = [*outer, *(inner for held in outer for inner in objects.referents(held))]
    return {(type(v), repr(v)) if issubclass(type(v), objects.CONSTANTS) else id(v) for v in every}
