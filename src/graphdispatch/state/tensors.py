"""What code can ask of a tensor besides its values and its form. Loaded only where code asks it."""

from collections.abc import Callable, Collection
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import torch

from .objects import Reader
from .readers import has_memory

__all__ = ["TENSOR_READERS", "tensor_readers"]


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
"""What code can ask of a tensor besides its values and its form, by the names in ``notes.TENSOR_NAMES``."""


def tensor_readers(tensor: torch.Tensor, names: Collection[str]) -> list[Reader]:
    """What to compare of a tensor besides its address and form: what code asks for under ``names``, and whether numbers
    are conjugated."""
    if not has_memory(tensor):
        return [partial(getattr, tensor, "requires_grad")] if "requires_grad" in names else []
    asked = TENSOR_READERS.keys() & ({"is_conj", *names} if tensor.dtype.is_complex else names)
    return [partial(TENSOR_READERS[name], tensor) for name in sorted(asked)]
