"""Calls that do what torch's own kernel of an operator does, without what it prepares anew at each call.

Some kernels only call other operators: ``clone(out=)`` makes a copy and copies that; ``mean`` is a sum and a division.
And each number that meets a tensor becomes a tensor of the result's dtype. A replay knows all that beforehand.

Note [the same bits]
    A row here holds for every value, not only for those of the capture: the calls are those that torch's kernel makes
    (tests/backends/test_parts.py compares them with what the profiler sees), and a number becomes the tensor that torch
    makes of it. So the rows take only what is sure: no 16-bit floats, whose kernels look at the number itself.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

__all__ = ["Call", "parts_of"]

_aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float64)
_BITS_OF_INT = 63


class Call(NamedTuple):
    """A call of an operator that writes its result to a tensor among its operands."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def run(self) -> Callable[[], Any]:
        """Python's fastest way to make the call: the tensor's method, or the function of ``torch``."""
        name = self.func._schema.name.removeprefix("aten::")
        if name.endswith("_"):
            return partial(getattr(self.args[0], name), *self.args[1:], **self.kwargs)
        return partial(getattr(torch._C._VariableFunctions, name), *self.args, **self.kwargs)


_Named = Mapping[str, Any]


def _copy(given: _Named) -> list[Call] | None:
    return [Call(_aten.copy_.default, (given["out"], given["self"]), {})]


def _fill(given: _Named, value: int | None = None) -> list[Call] | None:
    return [Call(_aten.fill_.Scalar, (given["out"], given["fill_value"] if value is None else value), {})]


def _masked_fill(given: _Named) -> list[Call] | None:
    write = Call(_aten.masked_fill_.Scalar, (given["out"], given["mask"], given["value"]), {})
    return [Call(_aten.copy_.default, (given["out"], given["self"]), {}), write]


def _embedding(given: _Named) -> list[Call] | None:
    weight, indices, out = given["weight"], given["indices"], given["out"]
    if not (indices.is_contiguous() and out.is_contiguous()):
        return None
    rows = out.view(indices.numel(), weight.shape[1])
    return [Call(_aten.index_select.out, (weight, 0, indices.view(-1)), {"out": rows})]


def _mean(given: _Named) -> list[Call] | None:
    x, out = given["self"], given["out"]
    dims = given.get("dim") or range(x.dim())
    count = _number(prod(x.shape[dim] for dim in dims) if x.dim() else 1, out.dtype)
    if out.dtype not in _FLOATS or x.dtype != out.dtype or not x.numel() or count is None:
        return None
    summed = Call(_aten.sum.IntList_out, (x, list(dims), given.get("keepdim", False)), {"out": out})
    return [summed, Call(_aten.div_.Tensor, (out, count), {})]


_ROWS: dict[Any, Callable[[_Named], list[Call] | None]] = {
    **dict.fromkeys((_aten.clone.out, _aten._to_copy.out), _copy),
    **dict.fromkeys((_aten.zeros_like.out, _aten.new_zeros.out, _aten.zeros.out), partial(_fill, value=0)),
    **dict.fromkeys((_aten.ones_like.out, _aten.new_ones.out, _aten.ones.out), partial(_fill, value=1)),
    **dict.fromkeys((_aten.full_like.out, _aten.new_full.out, _aten.full.out), _fill),
    _aten.masked_fill.Scalar_out: _masked_fill,
    _aten.embedding.out: _embedding,
    _aten.mean.out: _mean,
    _aten.mean.dtype_out: _mean,
}
# Operators of two numbers or tensors, with the overload that takes two tensors.
_BINARY: dict[Any, OpOverload] = {
    **{getattr(p, o): p.out for p in (_aten.add, _aten.sub, _aten.mul, _aten.div) for o in ("out", "Scalar_out")},
    **{getattr(p, o): p.Tensor for p in (_aten.add_, _aten.sub_, _aten.mul_, _aten.div_) for o in ("Tensor", "Scalar")},
    **{p.Scalar_out: p.Tensor_out for p in (_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge)},
}


def parts_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call] | None:
    """The calls to make instead of this call of an overload that writes to its arguments; None: make this call.

    They give the same bits for all values: see Note [the same bits]. Numbers among the operands become tensors, which
    the calls own.
    """
    if func in _ROWS:
        names = (formal.name for formal in func._schema.arguments)
        return _ROWS[func](dict(zip(names, args, strict=False)) | kwargs)
    if func not in _BINARY or not isinstance(args[0], torch.Tensor):
        return None
    number = _number(args[1], args[0].dtype)
    if number is None or kwargs.get("out", args[0]).dtype not in (args[0].dtype, torch.bool):
        return None
    # A third argument is alpha of a Scalar overload, which the other one takes by its name.
    named = {"alpha": args[2]} if len(args) > 2 else {}
    return [Call(_BINARY[func], (args[0], number), named | kwargs)]


def _number(value: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor that torch makes of a number among operands of ``dtype``; None where it is not sure."""
    if dtype in _FLOATS and type(value) is float:
        return torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype)
    if type(value) is int and value.bit_length() <= _BITS_OF_INT and (dtype in _FLOATS or dtype is torch.int64):
        return torch.tensor(value, dtype=torch.int64, device="cpu").to(dtype)
    return None
