"""Watches the operators of a capture, on any backend: names the line that fails, and refuses tensors of unknown origin.

Torch's dispatcher does not see some work (a compiled kernel, ctypes, numpy). Such work leaves tensors that no operator
made and that did not exist in the warm-up. A graph would read their first value for ever.
"""

from typing import Any, Self

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from ..backends.base import Capture
from ..backends.insight import OperatorMode
from ..backends.operators import forbidden, is_strided, is_unsafe, storage_key, tensors_in, user_line
from ..call.breaks import BREAKS, BreakRunner
from ..errors import CaptureError
from ..reasons import Reason


class CaptureWatch(OperatorMode):
    """Enter ``within(capture)`` around the callable.

    ``existing`` are the keys of the storages that existed before; the call may read these and what it makes itself.
    """

    def __init__(self, existing: set[int]) -> None:
        super().__init__()
        self._capture: Capture | None = None
        self._existing = existing
        self._made: dict[int, StorageWeakRef] = {}
        self._part = 0
        self._part_of: dict[int, int] = {}
        self.is_paused = False
        """True while a break runs: what it makes is noted, and nothing is refused."""
        self.on_break: BreakRunner | None = None
        """Called instead of each operator at which a PIECEWISE capture breaks."""
        self.crossing: list[torch.Tensor] = []
        """Tensors that one part made and a later one used."""
        self.unreturned: dict[int, str] = {}
        """Storages that a break made and did not return, and its name; later parts must not use them."""
        self.operators = 0
        """How many operators ran, in graphs and in breaks."""
        self.latest: object = "nothing"
        """The operator that ran last."""

    def within(self, capture: Capture) -> Self:
        """The watch itself, to be entered within this capture."""
        self._capture = capture
        return self

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator as a break, if it is one, or watch it."""
        if isinstance(func, HigherOrderOperator):
            return super().__torch_dispatch__(func, types, args, kwargs)
        is_break = func._schema.name in BREAKS or is_unsafe(func)
        if is_break and self.on_break is not None and not self.is_paused:
            return self.on_break(str(func), func, args, kwargs or {})
        if is_break and is_unsafe(func) and not self.is_paused:
            raise CaptureError(
                f"{func} is tagged cudagraph_unsafe; capture in PIECEWISE mode, where it is a break; at {user_line()}",
                Reason.CAPTURE_UNSAFE,
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def look_inside(self, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Watch what an operator's Python kernel runs, and refuse a result of unknown origin."""
        self.latest = func
        assert self._capture is not None
        result = self._capture.look_inside(self, func, key, args, kwargs)
        for tensor in tensors_in(result):
            if not self.is_paused and is_strided(tensor) and not self.has_seen(tensor):
                name = func._schema.name
                raise CaptureError(
                    f"{func} gives back a tensor of shape {tuple(tensor.shape)} that no operator inside it made, at "
                    f"{user_line()}; break there in PIECEWISE mode with eager_break({name!r}), or register it in C++",
                    Reason.CAPTURE_UNSAFE,
                )
            self._note(tensor)
        return result

    def watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check one operator's arguments, then run it."""
        self.latest = func
        self.operators += 1
        if func is torch.ops.aten.lift_fresh.default:
            self._note(args[0])
        self._note_crossing(args, kwargs)
        if not self.is_paused:
            self._check(func, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._note(tensor)
        return result

    def _check(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.check_returned(args, kwargs)
        tensors = tensors_in(args, kwargs)
        why = forbidden(func, args, kwargs, tensors)
        if why is not None:
            raise CaptureError(f"{func} {why}; at {user_line()}", Reason.CAPTURE_UNSAFE)
        for tensor in tensors:
            if is_strided(tensor) and not self.has_seen(tensor):
                raise CaptureError(
                    f"{func} is given a tensor of shape {tuple(tensor.shape)} that no operator of the call made "
                    f"and that did not exist before, at {user_line()}; work outside of torch's dispatcher "
                    "(numpy, ctypes, a compiler) must be a break of a PIECEWISE capture, or an operator in C++",
                    Reason.CAPTURE_UNSAFE,
                )

    def storages(self) -> set[int]:
        """The keys of all storages seen so far."""
        return self._existing | set(self._made)

    def check_returned(self, *trees: Any) -> None:
        """Raise ``CaptureError`` if a break made one of the tensors and did not return it: later parts would go on
        reading what the break made at the capture."""
        for tensor in tensors_in(*trees) if self.unreturned else ():
            name = self.unreturned.get(storage_key(tensor)) if is_strided(tensor) else None
            if name is not None:
                raise CaptureError(
                    f"a tensor of shape {tuple(tensor.shape)} that break {name!r} made is used at {user_line()}, but "
                    "the break did not return it; return it from the break",
                    Reason.CAPTURE_UNSAFE,
                )

    def next_part(self, given: Any = None) -> None:
        """Begin the next part of a PIECEWISE capture. ``given`` are tensors that the part so far hands over to it."""
        for tensor in tensors_in(given):
            self._note(tensor)
        self._part += 1

    def _note_crossing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._part:
            for tensor in tensors_in(args, kwargs):
                if is_strided(tensor) and self._part_of.get(storage_key(tensor), self._part) != self._part:
                    self.crossing.append(tensor.detach())
                    self._part_of[storage_key(tensor)] = self._part

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the captured call made the memory of ``tensor``."""
        return storage_key(tensor) in self._made

    def has_seen(self, tensor: torch.Tensor) -> bool:
        """Whether the call made the memory of ``tensor``, or it existed before."""
        key = storage_key(tensor)
        return key in self._made or key in self._existing

    def _note(self, tensor: torch.Tensor) -> None:
        if is_strided(tensor) and (key := storage_key(tensor)) not in self._existing and key not in self._made:
            self._made[key], self._part_of[key] = StorageWeakRef(tensor.untyped_storage()), self._part
