"""Watches the operators of a capture, on any backend: names the line that fails, and refuses memory from nowhere.

Work that torch's dispatcher cannot see (a compiled kernel, ctypes, numpy) leaves tensors that no operator made and
that did not exist in the warm-up. A graph would read their first value for ever.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..backends.operators import forbidden, is_composite, tensors_in, user_line
from ..call.breaks import BREAKS
from ..errors import CaptureError
from ..reasons import Reason

__all__ = ["CaptureWatch", "storage_key"]


class CaptureWatch(TorchDispatchMode):
    """Enter it around the callable within a capture; ``known`` holds the keys of all storages that may be read."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self._made: dict[int, StorageWeakRef] = {}
        self._part = 0
        self._part_of: dict[int, int] = {}
        self.is_paused = False
        """Set while a break runs: what it does is noted, and nothing is refused."""
        self.on_break: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any] | None = None
        """Called instead of an operator at which a PIECEWISE capture breaks."""
        self.crossing: list[torch.Tensor] = []
        """Tensors that one part made and another one used."""
        self._kept_back: dict[int, str] = {}
        self.latest = "nothing"
        """The operator that ran last."""

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check one operator's arguments, then run it."""
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if self._breaks_at(func):
            return self._break(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            self.latest = str(func)
            if func is torch.ops.aten.lift_fresh.default:
                self._note(args[0])
            self._note_crossing(args, kwargs)
            if not self.is_paused:
                self.refuse_kept_back(args, kwargs)
            why = forbidden(func, args, kwargs) if not self.is_paused else None
            if why is not None:
                raise CaptureError(f"{func} {why}; at {user_line()}", Reason.CAPTURE_UNSAFE)
            for tensor in tensors_in(args, kwargs):
                if tensor.layout is torch.strided and not self.has_seen(tensor) and not self.is_paused:
                    raise CaptureError(
                        f"{func} is given a tensor of shape {tuple(tensor.shape)} that no operator of the call made "
                        f"and that did not exist before, at {user_line()}; work outside of torch's dispatcher "
                        "(compiled code, numpy, ctypes) must become a custom operator",
                        Reason.CAPTURE_UNSAFE,
                    )
            result = func(*args, **kwargs)
            for tensor in tensors_in(result):
                self._note(tensor)
        return result

    def storages(self) -> set[int]:
        """The keys of all storages seen so far."""
        return self._known | set(self._made)

    def keep_back(self, storages: set[int], name: str) -> None:
        """Refuse these to later parts: break ``name`` made them and did not return them."""
        self._kept_back |= dict.fromkeys(storages, name)

    def refuse_kept_back(self, *trees: Any) -> None:
        """Raise ``CaptureError`` if a tensor comes from a break that did not return it: a replay would not see what
        the break makes then."""
        for tensor in tensors_in(*trees) if self._kept_back else ():
            name = self._kept_back.get(storage_key(tensor)) if tensor.layout is torch.strided else None
            if name is not None:
                raise CaptureError(
                    f"a tensor of shape {tuple(tensor.shape)} that break {name!r} made is used at {user_line()}, but "
                    "the break did not return it; return it from the break",
                    Reason.CAPTURE_UNSAFE,
                )

    def next_part(self, given: Any = None) -> None:
        """What is made from now on belongs to the next part of a PIECEWISE capture; ``given`` by the former one."""
        for tensor in tensors_in(given):
            self._note(tensor)
        self._part += 1

    def _breaks_at(self, func: OpOverload) -> bool:
        if self.on_break is None or self.is_paused:
            return False
        return func._schema.name in BREAKS or torch.Tag.cudagraph_unsafe in func.tags

    def _break(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.on_break is not None
        return self.on_break(func, args, kwargs)

    def _note_crossing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._part:
            for tensor in tensors_in(args, kwargs):
                if tensor.layout is torch.strided and self._part_of.get(storage_key(tensor), self._part) != self._part:
                    self.crossing.append(tensor.detach())
                    self._part_of[storage_key(tensor)] = self._part

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the captured call made the memory of ``tensor``."""
        return storage_key(tensor) in self._made

    def has_seen(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of ``tensor`` was made by the call or known before."""
        key = storage_key(tensor)
        return key in self._made or key in self._known

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided and storage_key(tensor) not in self._known:
            self._made.setdefault(storage_key(tensor), StorageWeakRef(tensor.untyped_storage()))
            self._part_of.setdefault(storage_key(tensor), self._part)


def storage_key(tensor: torch.Tensor) -> int:
    """What tells the storage of a strided tensor from all others, as long as something holds it."""
    key: int = tensor.untyped_storage()._cdata
    return key
