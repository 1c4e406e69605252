"""A recording bound to memory: what of it a replay runs, where its memory lies, and the calls in their order.

Note [calls of parts]
    Some ``out=`` kernels only call other operators: ``clone(out=)`` makes a copy and copies that; ``mean`` is a sum and
    a division; ``relu`` is a ``clamp_min``. These are replaced by the calls that torch's kernel makes, for every value
    (tests/backends/test_replays.py compares the bits). That takes half the time.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from ...errors import ReplayError
from ..operators import OperatorKind, map_leaves, per_operator, storage_key, tensors_in
from .recorder import ALIGNMENT, Instruction, Recording, Slot, TensorRef, with_outs

_aten = torch.ops.aten
_BITS_OF_INT = 63
_FLOATS = (torch.float32, torch.float64)  # kernels of 16-bit floats sum in another dtype


def split(program: list[Instruction], pinned: set[Slot]) -> tuple[list[Instruction], list[Instruction]]:
    """Split a program into the instructions that run once, to make constants, and those that run at each replay.

    ``pinned`` slots are read after the program. They must then hold what eager would have left in them.
    """
    overwritten = {slot for i in program if i.kind is OperatorKind.WRITE for slot in i.writes} | pinned
    constant = set[Slot]()
    once: list[Instruction] = []
    each: list[Instruction] = []
    for instruction in program:
        if (
            instruction.kind is OperatorKind.PURE
            and not instruction.touches_outside
            and instruction.reads <= constant
            and instruction.writes.isdisjoint(overwritten)
        ):
            constant |= instruction.writes
            once.append(instruction)
        else:
            each.append(instruction)
    return once, each


def lay_out(program: list[Instruction], private: set[Slot], outputs: set[Slot]) -> tuple[dict[Slot, int], int]:
    """Place each slot of ``program`` that is not ``private``, so that slots alive at the same time never overlap.

    ``outputs`` stay alive to the end, even those that no instruction touches. The result is each slot's byte offset in
    one arena, and the bytes of that arena.
    """
    touched = [*(instruction.reads | instruction.writes for instruction in program), outputs]
    last = {slot: index for index, slots in enumerate(touched) for slot in slots}
    offsets: dict[Slot, int] = {}
    alive: dict[Slot, tuple[int, int]] = {}
    top = 0
    for index, slots in enumerate(touched):
        for slot in sorted(slots, key=lambda s: -s.nbytes):
            if slot in private or slot in offsets:
                continue
            size = -(-max(slot.nbytes, 1) // ALIGNMENT) * ALIGNMENT
            offset = _lowest_gap(sorted(alive.values()), size)
            offsets[slot] = offset
            alive[slot] = (offset, offset + size)
            top = max(top, offset + size)
        for slot in [s for s in alive if last[s] == index]:
            del alive[slot]
    return offsets, top


def _lowest_gap(taken: list[tuple[int, int]], size: int) -> int:
    start = 0
    for begin, end in taken:
        if begin - start >= size:
            return start
        start = max(start, end)
    return start


class Step(NamedTuple):
    """One call of a replay, and the operator behind it.

    ``run`` is Python's call, and ``func`` what it calls. A tape may call the operator ``func`` with ``operands``, its
    ``args`` and ``kwargs``, instead; without them the call is Python's alone. New results are copied to ``outs``; where
    ``outs`` is None the operator itself writes them.
    """

    run: Callable[[], Any]
    func: Any
    operands: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    outs: tuple[torch.Tensor, ...] | None = None


def step_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[torch.Tensor, ...] | None = None
) -> Step:
    """The step that calls an operator or compiled code. New results are copied to ``outs``, if there are any."""
    func, args, kwargs = with_tensors(func, args, kwargs)
    run = partial(getattr(func, "_op", func), *args, **kwargs)
    if outs is not None:
        run = partial(run_and_copy, func, args, kwargs, outs)
    is_for_tape = isinstance(func, OpOverload) and func.namespace != "_c10d_functional"
    return Step(run, func, (args, kwargs) if is_for_tape else None, outs)


def tell(steps: Sequence[Step], position: int, what: BaseException | list[tuple[int, ...]]) -> None:
    """Note in an error which step raised it. Shapes that a step gave instead are a ``ReplayError``."""
    step = steps[position]
    if not isinstance(what, BaseException):
        raise _other_shapes(step.func, what, step.outs)
    what.add_note(f"raised by {step.func} in the replay of a graph")


def run_and_copy(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[torch.Tensor, ...]
) -> None:
    """Call an operator, and copy the new tensors that it makes to ``outs``. Raises ``ReplayError`` for other shapes."""
    results = tensors_in(func(*args, **kwargs))
    if func.namespace == "_c10d_functional":
        results = [torch.ops._c10d_functional.wait_tensor(t) for t in results]
    # A result that is one of the arguments needs no copy; the recorder made no output for it.
    own = set(map(storage_key, tensors_in(args, kwargs)))
    fresh = [t for t in results if storage_key(t) not in own]
    got = [tuple(t.shape) for t in fresh]
    if got != [tuple(t.shape) for t in outs]:
        raise _other_shapes(func, got, outs)
    for out, result in zip(outs, fresh, strict=True):
        out.copy_(result)


def run_collective(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call a collective and wait until its work is done."""
    result = func(*args, **kwargs)
    work = result[-1] if isinstance(result, tuple) else result
    work.wait()


def _other_shapes(func: Any, got: list[tuple[int, ...]], outs: tuple[torch.Tensor, ...] | None) -> ReplayError:
    held = [tuple(t.shape) for t in outs or ()]
    return ReplayError(
        f"{func} gave new tensors of shapes {got} where the graph holds {held}: the "
        "shapes of its results, or whether they are its arguments, depend on data; make it a break of a PIECEWISE "
        "capture"
    )


class Binding:
    """A recording's calls on tensors: what is still alive stays where it is, and the rest is laid out in one arena.

    Args:
        recording: The recording.
        take_arena: Gives memory of at least so many bytes.
    """

    def __init__(self, recording: Recording, take_arena: Callable[[int], torch.Tensor]) -> None:
        self._storages: dict[Slot, torch.UntypedStorage] = {}
        self._tensors: dict[TensorRef, torch.Tensor] = {}
        shared = {ref.slot for ref in tree_leaves(recording.outputs) if isinstance(ref, TensorRef)}
        slots = shared.union(*(i.reads | i.writes for i in recording.program))
        for slot in slots:
            storage = slot.live_storage()
            if storage is not None:
                self._storages[slot] = storage
        once, each = split(recording.program, shared | set(self._storages))
        constant = {slot for i in once for slot in i.reads | i.writes}
        for slot in constant - set(self._storages):
            self._storages[slot] = torch.empty(slot.nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        self._offsets, nbytes = lay_out(each, set(self._storages), shared)
        self.arena = take_arena(nbytes) if nbytes else None
        if self.arena is not None:
            self._storages |= dict.fromkeys(self._offsets, self.arena.untyped_storage())
        self.memory = [s for slot, s in self._storages.items() if slot not in self._offsets]
        with torch.inference_mode(False), torch.no_grad():
            for step in chain.from_iterable(map(self._bind, once)):
                step.run()
            self.steps = list(chain.from_iterable(map(self._bind, each)))
            self.outputs = tree_map_only(TensorRef, self._tensor, recording.outputs)

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        tensor = self._tensors.get(ref)
        if tensor is None:
            offset = self._offsets.get(ref.slot, 0) // ref.dtype.itemsize + ref.offset
            tensor = torch.empty(0, dtype=ref.dtype, device="cpu").set_(
                self._storages[ref.slot], offset, ref.size, ref.stride
            )
            if ref.conj:
                tensor = tensor.conj()
            if ref.neg:
                tensor = torch._neg_view(tensor)
            self._tensors[ref] = tensor
        return tensor

    def _bound(self, value: Any) -> Any:
        return self._tensor(value) if type(value) is TensorRef else value

    def _bind(self, instruction: Instruction) -> list[Step]:
        args, kwargs = map_leaves(self._bound, instruction.args), map_leaves(self._bound, instruction.kwargs)
        outs = tuple(map(self._tensor, instruction.outs))
        func, kernel = instruction.func, instruction.kernel
        if kernel is not None:
            kwargs = with_outs(kernel, kwargs, outs)
            parts = parts_of(kernel, args, kwargs) or [Call(kernel, args, kwargs)]
            return [step_of(*part) for part in parts]
        if func.namespace == "c10d":
            return [Step(partial(run_collective, func, args, kwargs), func)]
        return [step_of(func, args, kwargs, outs if outs or instruction.kind is OperatorKind.OPAQUE else None)]


class Call(NamedTuple):
    """A call of an operator that writes its result to a tensor among its operands."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def with_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The same call with the tensor that torch would make, at each call, of a number in the second place.

    It has the dtype of the first operand, with the bits of a cast, whatever the number. Kernels of 16-bit floats look
    at the number itself.
    """
    overload, (first, number) = _for_tensors(func), args[:2] if len(args) > 1 else (None, None)
    kind = {float: torch.float64, int: torch.int64}.get(type(number))
    if overload is None or kind is None or (kind is torch.int64 and number.bit_length() > _BITS_OF_INT):
        return Call(func, args, kwargs)
    if first.dtype not in _FLOATS or kwargs.get("out", first).dtype not in (first.dtype, torch.bool):
        return Call(func, args, kwargs)
    number = torch.tensor(number, dtype=kind, device="cpu").to(first.dtype)
    named = {"alpha": args[2]} if len(args) > 2 else {}  # which the overload for a number takes by its place
    return Call(overload, (first, number), named | kwargs)


def parts_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call] | None:
    """What to call instead of an ``out=`` overload: see Note [calls of parts]. None: call the overload."""
    row = _row_of(func)
    if row is None:
        return None
    names = (formal.name for formal in func._schema.arguments)
    return row(dict(zip(names, args, strict=False)) | kwargs)


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


_OF_TENSORS: dict[Any, OpOverload] = {
    **{getattr(p, o): p.out for p in (_aten.add, _aten.sub, _aten.mul, _aten.div) for o in ("out", "Scalar_out")},
    **{getattr(p, o): p.Tensor for p in (_aten.add_, _aten.sub_, _aten.mul_, _aten.div_) for o in ("Tensor", "Scalar")},
    **{p.Scalar_out: p.Tensor_out for p in (_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge)},
}
"""Operators of a tensor and a number or tensor, with the overload for two tensors."""


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
_for_tensors, _row_of = per_operator(_OF_TENSORS.get), per_operator(_ROWS.get)
