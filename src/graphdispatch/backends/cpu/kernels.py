"""How a replay writes an operator's results into existing memory, with the bits of eager.

Most operators have an ``out=`` overload. It is not trusted: while recording, it runs once on the real arguments, and is
used only if it gives the same bits. An operator without one is called as recorded, and its result is copied. So is one
whose result might have another shape in another replay.

Some kernels only call other operators: ``clone(out=)`` makes a copy and copies that; ``mean`` is a sum and a division;
``relu`` is a ``clamp_min``. These are replaced by the calls that torch's kernel makes (tests/backends/test_parts.py
compares the bits), for every value.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from ..operators import bits_equal, has_fixed_shapes

ALIGNMENT = 64
"""Of each tensor of a graph, in bytes: as in torch's CPU allocator, so that kernels take the same vector path as in
eager."""
_aten = torch.ops.aten
_OPTIONS = frozenset(("dtype", "layout", "device", "pin_memory"))  # of operators that make a tensor of a given kind
_FLOATS = (torch.float32, torch.float64)  # kernels of 16-bit floats sum in another dtype


def choose_kernel(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]
) -> OpOverload | None:
    """The overload that writes exactly these results into given tensors; None if the results must be copied."""
    overload = _out_overload(func) if has_fixed_shapes(func) else None
    if overload is None or len(results) != len(overload._schema.returns):
        return None
    outs = _in_one_storage(results)
    places = [t.data_ptr() for t in outs]
    try:
        overload(*args, **with_outs(overload, kwargs, outs))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    is_same = all(
        new.data_ptr() == place and new.stride() == old.stride() and bits_equal(new, old)
        for new, old, place in zip(outs, results, places, strict=True)
    )
    return overload if is_same else None


def _in_one_storage(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors like these, one behind another as in a graph's memory. A kernel may ask whether its results share a
    storage, and then go another way (``linalg_qr``)."""
    ends = [0]
    for one in results:
        ends.append(ends[-1] + -(-one.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT)
    storage = torch.empty(ends[-1], dtype=torch.uint8, device="cpu").untyped_storage()
    return [
        torch.empty(0, dtype=one.dtype, device="cpu").set_(storage, start // one.itemsize, one.size(), one.stride())
        for one, start in zip(results, ends, strict=False)
    ]


def with_outs(overload: OpOverload, kwargs: dict[str, Any], outs: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Keyword arguments for an ``out=`` overload: those of the functional one, and where the results go.

    What says of which kind a new tensor is (``dtype``, ``device``) is left out: the given tensor says it.
    """
    names, given_out = _keywords(overload)
    return {name: kwargs[name] for name in kwargs if name in names} | dict(zip(given_out, outs, strict=True))


@cache
def _keywords(overload: OpOverload) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names of the arguments of an overload that are given, and of those that take the results."""
    arguments = overload._schema.arguments
    given, outs = ([arg.name for arg in arguments if arg.is_out is is_out] for is_out in (False, True))
    return frozenset(given), tuple(outs)


@cache
def _out_overload(func: OpOverload) -> OpOverload | None:
    packet = func.overloadpacket
    wanted = [(arg.name, str(arg.type)) for arg in func._schema.arguments]
    if {name for name, _ in wanted} >= _OPTIONS:
        wanted = [(name, kind) for name, kind in wanted if name not in _OPTIONS]
    for name in packet.overloads():
        candidate: OpOverload = getattr(packet, name)
        arguments = candidate._schema.arguments
        if any(arg.is_out for arg in arguments) and wanted == [
            (arg.name, str(arg.type)) for arg in arguments if not arg.is_out
        ]:
            return candidate
    return None


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


def _relu(given: Mapping[str, Any]) -> list[Call] | None:
    return [Call(_aten.clamp_min.out, (given["self"], 0), {"out": given["out"]})]


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
    _aten.relu.out: _relu,
    _aten.embedding.out: _embedding,
    _aten.mean.out: _mean,
    _aten.mean.dtype_out: _mean,
}
