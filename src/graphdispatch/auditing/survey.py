"""A watched eager run to its end: every operator with its line and modules, what it writes, and all that CUDA forbids.

A capture stops at the first operator that no graph can hold. A survey notes it and goes on.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ..backends.operators import OperatorKind, forbidden, kind_of, tensors_in, user_line
from ..backends.standins import HostReads, Listening, SaysCapturing, StandIns
from ..call.marks import ACTIVE, BREAKS
from ..capture.effects import EffectRecorder
from ..errors import CaptureError
from .result import Finding

__all__ = ["Operation", "Survey", "names_of"]

_CALLS_MODULE = nn.Module._call_impl.__code__
_LITERAL = torch.ops.aten.lift_fresh.default


class Operation(NamedTuple):
    """One operator of a run: what it is, the user's line, and the modules around it from the outermost by name."""

    name: str
    where: str
    modules: tuple[str, ...]
    constants: tuple[str, ...]
    """Its arguments but the tensors."""
    works: bool
    """Whether it does anything on a device: a view does not."""


class Survey(EffectRecorder):
    """Enter ``watching`` around a run. ``names`` has the name of each module by its ``id``.

    With ``piecewise`` the parts marked by ``eager_break`` may do what they like. Raises as a strict ``EffectRecorder``.
    """

    def __init__(self, names: Mapping[int, str], limit_bytes: int, *, piecewise: bool) -> None:
        super().__init__(limit_bytes, strict=True)
        self.operations: list[Operation] = []
        self._names = names
        self._piecewise = piecewise
        self._breaks = 0
        self._found: Counter[Finding] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what runs within the block."""
        token = ACTIVE.set(self._run_break) if self._piecewise else None
        try:
            with SaysCapturing(), HostReads(self._on_read), Listening(self._on_copy, _COPIES), self.guarding():
                yield
        finally:
            if token is not None:
                ACTIVE.reset(token)

    def _on_read(self, name: str, _: Any) -> None:
        why = "gives memory to the host, past torch's dispatcher; keep the value on the device"
        self.add("forbidden", name, why)

    def _on_copy(self, name: str) -> None:
        self.add("forbidden", f"Tensor.{name}", "copies from a GPU to the host; do it before or after the call")

    def findings(self, kind: str) -> tuple[Finding, ...]:
        """What was found of a kind, in the order of the run, each with the number of times."""
        return tuple(replace(found, times=times) for found, times in self._found.items() if found.kind == kind)

    def add(self, kind: str, what: str, why: str) -> None:
        """Note something at the user's line that runs now."""
        if not self._breaks:
            modules = self._modules()
            self._found[Finding(kind, what, user_line(), why, modules[-1] if modules else "")] += 1

    def watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note one operator, save what it overwrites, and run it."""
        is_break = func._schema.name in BREAKS or torch.Tag.cudagraph_unsafe in func.tags
        why = forbidden(func, args, kwargs, tensors_in(args, kwargs))
        if why is None and is_break and not self._piecewise:
            why = "breaks every graph: it is marked so, or tagged as unsafe for CUDA graphs"
        if why is not None and not (is_break and self._piecewise):
            self.add("forbidden", str(func), why)
        if func is _LITERAL:
            why = "a constant in the graph; on a GPU its copy from the host is refused: make it once, before the call"
            self.add("frozen", "a tensor made from Python values", f"is {why}")
        constants = tuple(repr(leaf) for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor))
        works = kind_of(func) not in (OperatorKind.VIEW, OperatorKind.EMPTY)
        self.operations.append(Operation(str(func), user_line(), self._modules(), constants, works))
        return super().watch(func, args, kwargs)

    def look_inside(self, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a Python operator, and watch what it runs."""
        self.add("frozen", str(func), "is Python: a graph keeps what it launched, and never runs it again")
        return super().look_inside(func, key, args, kwargs)

    def give_up(self, error: CaptureError) -> None:
        """Note what no graph can hold, and go on."""
        what, _, why = str(error).partition(" ")
        self.add("forbidden", what, why)

    def _modules(self) -> tuple[str, ...]:
        """The names of the modules whose calls are under way."""
        found: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALLS_MODULE:
                name = self._names.get(id(frame.f_locals["self"]))
                found += [name] if name is not None else []
            frame = frame.f_back
        return tuple(reversed(found))

    def _run_break(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._breaks += 1
        try:
            return fn(*args, **kwargs)
        finally:
            self._breaks -= 1


def _tell_of_copy(name: str, original: Any, listeners: Callable[[], list[Any]]) -> Any:
    @functools.wraps(original)
    def copy(*args: Any, **kwargs: Any) -> Any:
        texts = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str)]
        if name != "to" or "cpu" in texts:
            for on_copy in listeners():
                on_copy(name)
        return original(*args, **kwargs)

    return copy


_COPIES = StandIns([(torch.Tensor, name) for name in ("cpu", "pin_memory", "to")], _tell_of_copy)
"""Copies that do nothing on a CPU."""


def names_of(modules: Iterable[nn.Module]) -> dict[int, str]:
    """The names of modules by their ``id``: one that lies in no earlier one by its class, what is in it by its path."""
    names: dict[int, str] = {}
    for root in modules:
        if id(root) not in names:
            for path, module in root.named_modules():
                names.setdefault(id(module), path or type(root).__name__)
    return names
