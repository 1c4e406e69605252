"""What code can ask of a tensor besides its values and its form: the names, and how each is read.

A guard compares these of the callable's own tensors, and ``memory/proof.py`` those of arguments.
"""

import types
from collections.abc import Callable, Collection, Iterable
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .bytecode import code_reads
from .objects import Reader, is_library_code, is_own_code

IDENTITY = "is"
"""Stands among the names for code that compares objects."""


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
"""How each of them is read, by its name."""


def tensor_readers(tensor: torch.Tensor, names: Collection[str]) -> list[Reader]:
    """What to compare of a tensor besides its address and form: what code asks for under ``names``, and whether numbers
    are conjugated."""
    if not has_memory(tensor):
        return [partial(getattr, tensor, "requires_grad")] if "requires_grad" in names else []
    asked = TENSOR_READERS.keys() & ({"is_conj", *names} if tensor.dtype.is_complex else names)
    return [partial(TENSOR_READERS[name], tensor) for name in sorted(asked)]


def metadata_names(codes: Iterable[types.CodeType]) -> list[str]:
    """What of ``TENSOR_READERS`` all this code of the user reads, of whatever tensors; and ``IDENTITY`` where any code
    compares objects."""
    others = [code for code in codes if not is_own_code(code.co_filename)]
    theirs = [code for code in others if not is_library_code(code.co_filename)]
    # Torch's attention compares the query with the key.
    compares = any(code_reads(code).compared for code in theirs) or any(
        not code_reads(code).compared.isdisjoint(code.co_varnames) for code in others
    )
    return sorted(TENSOR_READERS.keys() & set().union(*map(_spelled, theirs))) + [IDENTITY] * compares


def _spelled(code: types.CodeType) -> frozenset[str]:
    reads = code_reads(code)
    asks = not reads.variables.isdisjoint(("getattr", "hasattr"))
    return reads.attributes | reads.texts if asks else reads.attributes
