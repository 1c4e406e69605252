"""Records the operators that a callable runs, as a program over memory slots.

The recording never holds a tensor that a recorded operator made. It notes the tensor's *slot* (its storage) and its
view of that slot, so memory is freed during recording as it is in eager. A tensor that is still alive when recording
ends belongs to the caller: an output, or anything that the callable kept. All other slots belong to the program, and
``planner`` lays them out. A tensor that no recorded operator made is external: the program holds it and uses it at
its own address.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from ...errors import CaptureError
from ...reasons import Reason
from ..operators import (
    HOST_READS,
    OperatorKind,
    forbidden,
    is_composite,
    kind_of,
    storage_key,
    tensors_in,
    user_line,
    written_tensors,
)
from .kernels import Kernel, choose_kernel

__all__ = ["HostReadGuard", "Instruction", "Literal", "Recorder", "Recording", "Slot", "TensorRef"]


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


@dataclass(frozen=True)
class TensorRef:
    """A tensor on a slot: the part of the memory that it views, and how."""

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
    kernel: Kernel | None
    reads: frozenset[Slot]
    writes: frozenset[Slot]
    touches_outside: bool
    """Whether any argument is external."""
    writes_outside: bool
    """Whether it writes to an external argument."""


class Literal(NamedTuple):
    """A tensor that the callable made from Python values (``torch.tensor(...)``). No operator can make it again."""

    ref: TensorRef
    initial: torch.Tensor
    """A copy of its value. If an operator writes to the tensor, each replay restores this copy first."""


class HostReadGuard(TorchFunctionMode):
    """Refuses the host reads that torch's dispatcher does not see: ``numpy``, ``tolist``, DLPack, ``data_ptr``."""

    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise ``CaptureError`` for a host read; make any other call."""
        name = HOST_READS.get(func)
        if name is not None and not self._recorder.is_paused:
            raise CaptureError(
                f"Tensor.{name} gives memory to the host while a graph is captured, at {user_line()}; "
                "keep the value on the device, or move the read out of the call",
                Reason.CAPTURE_UNSAFE,
            )
        return func(*args, **(kwargs or {}))


class Recording(NamedTuple):
    """What was recorded between two pauses."""

    program: list[Instruction]
    literals: list[Literal]
    outputs: Any
    """The shared outputs, with a ``TensorRef`` for each tensor that this recording made."""


class Recorder(TorchDispatchMode):
    """Runs every operator of the calling thread and records it.

    Enter it around the callable, together with a ``HostReadGuard``. Between ``pause`` and ``resume`` it stays entered
    and records nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.resume()

    def pause(self) -> Recording:
        """End this recording. What it made is external to the next one, so its memory stays where it is."""
        self.is_paused = True
        return Recording(self.program, self.literals, self._outputs)

    def share(self, outputs: Any) -> None:
        """Describe the outputs. From here on, the recording holds none of those that it made."""
        self._outputs = tree_map_only(
            torch.Tensor, lambda t: self._symbol(t) if self._slot_of(t) is not None else t, outputs
        )

    def resume(self) -> None:
        """Begin a new recording."""
        self.is_paused = False
        self.program: list[Instruction] = []
        self.literals: list[Literal] = []
        self._slots: dict[int, Slot] = {}
        self._outputs = None

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and record it."""
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if any(hasattr(t, "trigger_wait") for t in tensors_in(args, kwargs)):
            # Eager waits for a functional collective below all modes. Here the wait must be seen, to be recorded.
            with self:
                args, kwargs = tree_map(lambda v: v.trigger_wait() if hasattr(v, "trigger_wait") else v, (args, kwargs))
                return func(*args, **kwargs)
        self._refuse(func, args, kwargs)
        kind = kind_of(func)
        if func is torch.ops.aten.lift_fresh.default and self._slot_of(args[0]) is None:
            self._make_slot(args[0])
            self.literals.append(Literal(self._symbol(args[0]), args[0].detach().clone()))
        result = func(*args, **kwargs)
        if hasattr(result, "trigger_wait"):
            return result  # it only wraps its argument
        if any(t.layout is not torch.strided for t in tensors_in(result)):
            raise CaptureError(f"{func} makes a tensor without strided layout; at {user_line()}", Reason.CAPTURE_UNSAFE)
        given = set(map(storage_key, tensors_in(args, kwargs)))
        results = [t for t in tensors_in(result) if self._slot_of(t) is None and storage_key(t) not in given]
        if kind is OperatorKind.VIEW and not results:
            return result
        for tensor in results:
            self._make_slot(tensor)
        if kind is OperatorKind.EMPTY:
            return result
        kernel = choose_kernel(func, args, kwargs, results) if kind is OperatorKind.PURE else None
        written = written_tensors(func, args, kwargs) if kind is OperatorKind.WRITE else []
        used = [self._slot_of(t) for t in tensors_in(args, kwargs)]
        writes = list(map(self._slot_of, written))
        sym_args, sym_kwargs = tree_map(self._symbol, (args, kwargs))
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
                writes_outside=None in writes,
            )
        )
        return result

    def _refuse(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        why = forbidden(func, args, kwargs)
        for tensor in tensors_in(args, kwargs):
            if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                why = f"is given a {type(tensor).__name__}, a tensor subclass with its own dispatch"
            elif tensor.layout is not torch.strided:
                why = f"is given a tensor of layout {tensor.layout}"
            elif tensor.device.type != "cpu":
                why = f"is given a tensor on {tensor.device}"
        if why is not None:
            raise CaptureError(f"{func} {why}; at {user_line()}", Reason.CAPTURE_UNSAFE)

    def _make_slot(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        # The weak reference keeps the address of a dead storage reserved, so the key stays unique.
        self._slots[storage_key(tensor)] = Slot(storage.nbytes(), StorageWeakRef(storage))

    def _slot_of(self, tensor: torch.Tensor) -> Slot | None:
        return self._slots.get(storage_key(tensor))

    def _symbol(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        slot = self._slot_of(value)
        if slot is None:
            return value.detach()
        return TensorRef(
            slot,
            value.dtype,
            value.size(),
            value.stride(),
            int(value.storage_offset()),
            value.is_conj(),
            value.is_neg(),
        )
