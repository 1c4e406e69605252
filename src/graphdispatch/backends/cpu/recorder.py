"""Records the operators that a callable runs, as a program over memory slots.

The recording never holds a tensor that a recorded operator made. It notes the tensor's *slot* (its storage) and its
view of that slot, so memory is freed during recording as it is in eager. A tensor that is still alive when recording
ends belongs to the caller: an output, or anything that the callable kept. All other slots belong to the program, and
``program.py`` lays them out. A tensor that no recorded operator made is external: the program holds it and uses it at
its own address.

Most operators have an ``out=`` overload, which writes the results where a replay wants them. It is not trusted: it runs
once on the real arguments, and is used only if it gives the same bits. What it found holds for the recording's other
calls that a kernel cannot tell from this one but by the numbers: the layers of a model are tested once. An operator
without one is called as recorded, and its result is copied. So is one whose result might have another shape in another
replay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map, tree_map_only

from ..host_reads import HostReads, given_to_host
from ..operator_mode import OperatorMode, run_kernel
from ..operators import (
    LEAVES,
    OperatorKind,
    bits_equal,
    changes_view,
    check_geometry,
    forbidden,
    geometry,
    has_fixed_shapes,
    is_strided,
    kind_of,
    map_leaves,
    per_operator,
    storage_key,
    tensors_in,
    unsafe,
    written_tensors,
)

ALIGNMENT = 64
"""Of each tensor of a graph, in bytes: as in torch's CPU allocator, so that kernels take the same vector path as in
eager."""
_OPTIONS = frozenset(("dtype", "layout", "device", "pin_memory"))  # of operators that make a tensor of a given kind


_LIFT = torch.ops.aten.lift_fresh.default
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
_is_quantized = attrgetter("is_quantized")
_address = torch._C.TensorBase.data_ptr  # no host read, which would be refused


@dataclass(eq=False)
class Slot:
    """The memory of one storage that a recorded operator made."""

    nbytes: int
    weak: StorageWeakRef

    def live_storage(self) -> torch.UntypedStorage | None:
        """The storage, or None if nothing outside of the recording holds it any more."""
        if self.weak.expired():
            return None
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return storage


@dataclass(unsafe_hash=True, slots=True)  # a frozen one takes four times as long to make
class TensorRef:
    """A tensor on a slot: the part of the memory that it views, and how. Nobody changes it."""

    slot: Slot
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


@dataclass(eq=False)
class Instruction:
    """One operator to run again. ``args``, ``kwargs`` and ``outs`` hold a ``TensorRef`` for each tensor on a slot."""

    func: OpOverload
    kind: OperatorKind
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[TensorRef, ...]
    kernel: OpOverload | None
    """The overload that writes the results into ``outs``; None if they are copied there, or if it makes none."""
    writes: frozenset[Slot]
    reads: frozenset[Slot] = frozenset()
    touches_outside: bool = False
    """Whether any argument is external, and somebody else's."""


class Recording(NamedTuple):
    """What was recorded between two pauses."""

    program: list[Instruction]
    outputs: Any
    """The shared outputs, with a ``TensorRef`` for each tensor that this recording made."""


class Recorder(OperatorMode):
    """Runs every operator of the calling thread and records it.

    Enter it around the callable, together with ``host_reads()``. Between ``pause`` and ``resume`` it stays entered and
    records nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._written: list[int] = []
        """The storages that operators wrote to, in order."""
        self._unwritten: set[int] = set()
        """The storages that an operator reserved and none wrote to."""
        self.resume()

    def host_reads(self, inside: OpOverload | None = None) -> HostReads:
        """What refuses host reads with a ``CaptureError``; ``inside`` is the operator whose Python runs."""

        def refuse(name: str, _: Any) -> None:
            if not self.is_paused:
                self.give_up(given_to_host(name) if inside is None else given_to_host(name, _left_torch(inside)))

        return HostReads(refuse)

    def pause(self) -> Recording:
        """End this recording. What it made is external to the next one, so its memory stays where it is."""
        self.is_paused = True
        return Recording(self.program, self._outputs)

    def share(self, outputs: Any) -> None:
        """Describe the outputs. From here on, the recording holds none of those that it made."""
        self._outputs = tree_map_only(
            torch.Tensor, lambda t: self._symbol(t) if self._slot_of(t) is not None else t, outputs
        )

    def resume(self) -> None:
        """Begin a new recording."""
        self.is_paused = False
        self.program: list[Instruction] = []
        self._slots: dict[int, Slot] = {}
        self._kernels: dict[Any, OpOverload | None] = {}
        """The overload that was chosen for each ``call_key``."""
        self._outputs = None

    def look_inside(
        self,
        func: OpOverload,
        key: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: OperatorMode | None = None,
    ) -> Any:
        """Record the operators that the Python kernel runs. A ``mode`` above this recorder sees them, too.

        Raises ``CaptureError`` if the kernel did its work where torch's dispatcher does not see it: it reads memory on
        the host, gives back memory that no operator wrote, or writes to no argument that its schema marks.
        """
        within = mode or self
        if self.is_paused:
            with within:
                return run_kernel(func, key, args, kwargs)
        start = len(self._written)
        with self.host_reads(func), within:
            result = run_kernel(func, key, args, kwargs)
        seen = set(self._written[start:])
        marked = (t for t in written_tensors(func, args, kwargs) if storage_key(t) not in seen)
        blank = (t for t in tensors_in(result) if storage_key(t) in self._unwritten)
        for what, tensors in (("writes to an argument", marked), ("gives back a tensor", blank)):
            for tensor in (t for t in tensors if t.numel()):
                what = f"{func} {what} of shape {tuple(tensor.shape)} that no operator inside it writes to"
                raise unsafe(f"{what}; {_left_torch(func)}")
        return result

    def watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator that has no parts and record it."""
        tensors = tensors_in(*args, *kwargs.values())
        return self._record(func, args, kwargs, tensors, forbidden(func, args, kwargs, tensors))

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """``watch`` for a mode in the recorder's place, which knows that the operator is not forbidden."""
        if self.is_paused:
            return func(*args, **kwargs)
        try:
            return self._record(func, args, kwargs, tensors, None)
        except Exception as error:
            self._note_error(func, error)
            raise

    def _record(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        why: str | None,
    ) -> Any:
        """Run an operator with these ``tensors`` and record it, unless there is a ``why`` not."""
        if why is not None or not all(map(_is_usual, tensors)):
            if any(map(_waits, tensors)):
                # Eager waits for a functional collective below all modes. Here the wait must be seen, to be recorded.
                with self:
                    args, kwargs = tree_map(lambda v: v.trigger_wait() if _waits(v) else v, (args, kwargs))
                    return func(*args, **kwargs)
            _refuse(func, tensors, why)
        kind = kind_of(func)
        if func is _LIFT and self._slot_of(args[0]) is None:
            self._make_literal(args[0])
        written = written_tensors(func, args, kwargs) if kind is OperatorKind.WRITE else []
        before = [(tensor, geometry(tensor)) for tensor in written if self._slot_of(tensor) is None]
        result = func(*args, **kwargs)
        if before:
            check_geometry(func, before)
        if func.namespace == "profiler":
            return result  # a range of the eager run, such as an optimizer's; a replay has none
        if type(result) is torch.Tensor and is_strided(result):
            made = [result]
        elif _waits(result):
            return result  # it only wraps its argument
        else:
            made = tensors_in(result)
            if not all(map(is_strided, made)):
                raise unsafe(f"{func} makes a nested tensor or one without strided layout")
        given = list(map(storage_key, tensors))
        results = [t for t in made if (key := storage_key(t)) not in given and key not in self._slots]
        if made and not results and (kind is OperatorKind.VIEW or kind is OperatorKind.PURE):
            return result  # it only looks at its arguments in another way
        if any(map(_is_quantized, results)):  # a place in memory has no scale
            what = f"{func} makes a quantized tensor, which no graph of the CPU holds"
            raise unsafe(f"{what}; dequantize() it outside, or use fake_quantize")
        for tensor in results:
            self._make_slot(tensor)
        if kind is OperatorKind.EMPTY:
            for tensor in results:
                self._fill(tensor)
            self._unwritten.update(map(storage_key, results))
            return result
        kernel = self._kernel_of(func, args, kwargs, results) if kind is OperatorKind.PURE else None
        for tensor in written:
            self._slot_grows(tensor, is_blank=changes_view(func))
        if changes_view(func):  # only the tensor looks at memory in another way, as after a view
            return result
        self._written.extend(map(storage_key, written))
        self._unwritten.difference_update(map(storage_key, written))
        used, writes = list(map(self._slots.get, given)), list(map(self._slot_of, written))
        sym_args, sym_kwargs = map_leaves(partial(self._symbol, aliases={}), (args, kwargs))
        self.program.append(
            Instruction(
                func,
                kind,
                sym_args,
                sym_kwargs,
                outs=tuple(map(self._symbol, results)),
                kernel=kernel,
                reads=frozenset(filter(None, used)),
                writes=frozenset(filter(None, (*writes, *map(self._slot_of, results)))),
                touches_outside=None in used,
            )
        )
        return result

    def _kernel_of(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]
    ) -> OpOverload | None:
        """``choose_kernel``, for the first of the calls that are alike."""
        key = call_key(func, args, kwargs, results)
        if key not in self._kernels:
            self._kernels[key] = choose_kernel(func, args, kwargs, results)
        return self._kernels[key]

    def _make_slot(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        # The weak reference keeps the address of a dead storage reserved, so the key stays unique.
        self._slots[storage_key(tensor)] = Slot(storage.nbytes(), StorageWeakRef(storage))

    def _make_literal(self, tensor: torch.Tensor) -> None:
        """Note a tensor that the callable made from Python values: a copy, which nobody writes to, makes it again."""
        self._make_slot(tensor)
        func, initial, ref = torch.ops.aten.clone, tensor.detach().clone(), self._symbol(tensor)
        made = Instruction(func.default, OperatorKind.PURE, (initial,), {}, (ref,), func.out, frozenset((ref.slot,)))
        self.program.append(made)

    def _slot_grows(self, tensor: torch.Tensor, *, is_blank: bool) -> None:
        slot, storage = self._slot_of(tensor), tensor.untyped_storage()
        if slot is not None and storage.nbytes() > slot.nbytes:
            start, slot.nbytes = slot.nbytes, storage.nbytes()
            if is_blank:
                first, end = start // tensor.dtype.itemsize, slot.nbytes // tensor.dtype.itemsize
                self._fill(tensor.new_empty(0).set_(storage, first, (end - first,), (1,)))

    def _fill(self, blank: torch.Tensor) -> None:
        """Have each replay fill new memory as torch does where only deterministic operators are allowed."""
        if torch._C._get_deterministic_algorithms():
            is_float = blank.is_floating_point() or blank.is_complex()
            value = math.nan if is_float else blank.dtype is torch.bool or torch.iinfo(blank.dtype).max
            self.watch(torch.ops.aten.fill_.Scalar, (blank, value), {})

    def _slot_of(self, tensor: torch.Tensor) -> Slot | None:
        return self._slots.get(storage_key(tensor))

    def _symbol(self, value: Any, aliases: dict[int, torch.Tensor] | None = None) -> Any:
        """What stands for an operand: a place on a slot, or an alias of somebody else's tensor. In one call the same
        tensor has one of the ``aliases``: a kernel may look whether two operands are one (self-attention)."""
        if not isinstance(value, torch.Tensor):
            return value
        slot = self._slot_of(value)
        if slot is None:
            return value.detach() if aliases is None else aliases.setdefault(id(value), value.detach())
        return TensorRef(
            slot,
            value.dtype,
            value.size(),
            value.stride(),
            int(value.storage_offset()),
            value.dtype.is_complex and value.is_conj(),
            value.is_neg(),
        )


def _left_torch(func: OpOverload) -> str:
    name = func._schema.name
    return (
        f"the Python of operator {name!r} works outside of torch's dispatcher, and a graph would freeze what it did: "
        f"break there in PIECEWISE mode with eager_break({name!r}), or register it in C++"
    )


def _refuse(func: OpOverload, tensors: list[torch.Tensor], why: str | None) -> None:
    for tensor in tensors:
        if type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH:
            why = f"is given a {type(tensor).__name__}, a tensor subclass with its own dispatch"
        elif not is_strided(tensor):
            why = f"is given a {'nested ' * tensor.is_nested}tensor of layout {tensor.layout}"
        elif not tensor.is_cpu:
            why = f"is given a tensor on {tensor.device}"
    if why is not None:
        raise unsafe(f"{func} {why}")


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _is_usual(tensor: torch.Tensor) -> bool:
    """Whether nothing speaks against a tensor that an operator is given, and nobody has to wait for it."""
    return type(tensor) in _PLAIN and tensor.is_cpu and is_strided(tensor)


def _waits(value: Any) -> bool:
    """Whether a value is the result of a collective that may still be under way."""
    return hasattr(value, "trigger_wait")


def call_key(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]
) -> tuple[Any, ...]:
    """What calls have in common that take the same way through an operator's kernels: all but the numbers in their
    tensors. A call that is given objects of other kinds has nothing in common with any other."""
    places: dict[int, int] = {}

    def described(value: Any) -> Any:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            # A kernel may look whether tensors share memory, and where in a vector's width they begin.
            place = places.setdefault(storage_key(value), len(places))
            begin = _address(value) % ALIGNMENT
            is_conj = value.dtype.is_complex and value.is_conj()
            return place, begin, value.dtype, value.size(), value.stride(), is_conj, value.is_neg()
        if kind is list or kind is tuple:
            return kind, tuple([described(part) for part in value])
        # -0.0 is another number.
        return kind, object() if kind not in LEAVES else repr(value) if kind is float else value

    given = map(described, (*args, *kwargs.values()))
    return id(func), *given, *kwargs, *[(one.dtype, one.size(), one.stride()) for one in results]


def choose_kernel(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]
) -> OpOverload | None:
    """The overload that writes exactly these results into given tensors; None if the results must be copied."""
    is_fit = has_fixed_shapes(func) and func._schema.name not in _RESIZE
    overload = _out_overload(func) if is_fit else None
    if overload is None or len(results) != len(overload._schema.returns):
        return None
    outs = _in_one_storage(results)
    places = [_address(t) for t in outs]
    sizes = [t.untyped_storage().nbytes() for t in outs]
    try:
        overload(*args, **with_outs(overload, kwargs, outs))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    is_same = all(
        _address(new) == place and new.stride() == old.stride() and bits_equal(new, old)
        for new, old, place in zip(outs, results, places, strict=True)
    )
    # One that wants more memory for a while, as for a loss before its mean, writes over what lies behind.
    has_room = sizes == [t.untyped_storage().nbytes() for t in outs]
    return overload if is_same and has_room else None


_RESIZE = frozenset(f"aten::{name}_loss" for name in ("mse", "smooth_l1", "huber", "soft_margin"))
"""Losses that resize the given tensor for a while, of which torch warns at each call."""


def _in_one_storage(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors like these, one behind another as in a graph's memory. A kernel may look whether its results share a
    storage, and then go another way (``linalg_qr``)."""
    ends, last = [0], 0
    for one in results:
        last = ends[-1] + one.untyped_storage().nbytes()
        ends.append(-(-last // ALIGNMENT) * ALIGNMENT)
    storage = torch.empty(last, dtype=torch.uint8, device="cpu").untyped_storage()
    return [
        torch.empty(0, dtype=one.dtype, device="cpu").set_(storage, start // one.itemsize, one.size(), one.stride())
        for one, start in zip(results, ends, strict=False)
    ]


def with_outs(overload: OpOverload, kwargs: dict[str, Any], outs: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Keyword arguments for an ``out=`` overload: those of the functional one, and where the results go.

    What says of which kind a new tensor is (``dtype``, ``device``) is left out: the given tensor says it.
    """
    names, given_out = _keywords(overload)
    placed = dict(zip(given_out, outs, strict=True))
    return {name: kwargs[name] for name in kwargs if name in names} | placed if kwargs else placed


@per_operator
def _keywords(overload: OpOverload) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names of the arguments of an overload that are given, and of those that take the results."""
    arguments = overload._schema.arguments
    given, outs = ([arg.name for arg in arguments if arg.is_out is is_out] for is_out in (False, True))
    return frozenset(given), tuple(outs)


@per_operator
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
