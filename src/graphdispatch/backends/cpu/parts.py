"""Calls that do what torch's own kernel of an operator does, without what it makes anew at each call.

Some kernels only call other operators: ``clone(out=)`` makes a copy and copies that; ``mean`` is a sum and a division.
The calls here are those that torch's kernel makes (tests/backends/test_parts.py compares the bits), for every value.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

_aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float64)  # kernels of 16-bit floats sum in another dtype


class Call(NamedTuple):
    """A call of an operator that writes its result to a tensor among its operands."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def parts_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call] | None:
    """The calls to make instead of this call of an ``out=`` overload; None: make this call."""
    if func not in _ROWS:
        return None
    names = (formal.name for formal in func._schema.arguments)
    return _ROWS[func](dict(zip(names, args, strict=False)) | kwargs)


def _copy(given: Mapping[str, Any]) -> list[Call] | None:
    return [Call(_aten.copy_.default, (given["out"], given["self"]), {})]


def _fill(given: Mapping[str, Any], value: int | None = None) -> list[Call] | None:
    return [Call(_aten.fill_.Scalar, (given["out"], given["fill_value"] if value is None else value), {})]


def _masked_fill(given: Mapping[str, Any]) -> list[Call] | None:
    return [*(_copy(given) or ()), Call(_aten.masked_fill_.Scalar, (given["out"], given["mask"], given["value"]), {})]


def _embedding(given: Mapping[str, Any]) -> list[Call] | None:
    weight, indices, out = given["weight"], given["indices"], given["out"]
    if not (indices.is_contiguous() and out.is_contiguous()):
        return None
    rows = out.view(indices.numel(), weight.shape[1])
    return [Call(_aten.index_select.out, (weight, 0, indices.view(-1)), {"out": rows})]


def _mean(given: Mapping[str, Any]) -> list[Call] | None:
    x, out = given["self"], given["out"]
    dims = list(given.get("dim") or range(x.dim()))
    if out.dtype not in _FLOATS or x.dtype != out.dtype or not x.numel():
        return None
    count = prod(x.shape[dim] for dim in dims) if x.dim() else 1
    summed = Call(_aten.sum.IntList_out, (x, dims, given.get("keepdim", False)), {"out": out})
    return [summed, Call(_aten.div_.Tensor, (out, count), {})]


_ROWS: dict[Any, Callable[[Mapping[str, Any]], list[Call] | None]] = {
    **dict.fromkeys((_aten.clone.out, _aten._to_copy.out), _copy),
    **dict.fromkeys((_aten.zeros_like.out, _aten.new_zeros.out, _aten.zeros.out), partial(_fill, value=0)),
    **dict.fromkeys((_aten.ones_like.out, _aten.new_ones.out, _aten.ones.out), partial(_fill, value=1)),
    **dict.fromkeys((_aten.full_like.out, _aten.new_full.out, _aten.full.out), _fill),
    _aten.masked_fill.Scalar_out: _masked_fill,
    _aten.embedding.out: _embedding,
    _aten.mean.out: _mean,
    _aten.mean.dtype_out: _mean,
}
