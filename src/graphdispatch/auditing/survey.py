"""Watches eager runs of a callable to the end: every operator with its line and modules, and all that CUDA forbids.

A capture stops at the first operator that no graph can hold. A survey notes it and goes on.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..backends.insight import OperatorMode, run_kernel
from ..backends.operators import HOST_READS, OperatorKind, forbidden, kind_of, user_line
from ..call.breaks import ACTIVE, BREAKS
from .result import Finding

__all__ = ["Operation", "Survey", "kept_streams", "names_of"]

_CALLS_MODULE = nn.Module._call_impl.__code__
_TO_HOST = {torch.Tensor.cpu: "cpu", torch.Tensor.pin_memory: "pin_memory"}
_BUILT_IN = ("aten", "prims", "prim", "c10d", "_c10d_functional", "quantized", "inductor")
_LITERAL = torch.ops.aten.lift_fresh.default


class Operation(NamedTuple):
    """One operator of a run: what it is, the user's line, the modules around it, and its arguments but the tensors."""

    name: str
    where: str
    modules: tuple[str, ...]
    """From the outermost to the innermost, by name."""
    constants: tuple[str, ...]
    in_break: bool
    works: bool
    """Whether it does anything on a device: a view does not."""


class Survey:
    """Runs a callable once within ``watching`` and notes its operators.

    ``names`` has the name of each module by its ``id``. With ``piecewise`` the parts marked by ``eager_break`` may do
    what they like.
    """

    def __init__(self, names: Mapping[int, str], *, piecewise: bool) -> None:
        self.operations: list[Operation] = []
        self.draws_python_random = False
        """Whether the run drew from Python's or NumPy's global random generator."""
        self._names = names
        self._piecewise = piecewise
        self._depth = 0
        self._found: Counter[Finding] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what runs within the block. Enter it last: other modes must not see its operators twice."""
        before = _streams()
        token = ACTIVE.set(self._run_break) if self._piecewise else None
        try:
            with _HostReads(self), _Operators(self):
                yield
        finally:
            if token is not None:
                ACTIVE.reset(token)
            self.draws_python_random = _streams() != before

    def findings(self, kind: str) -> tuple[Finding, ...]:
        """What was found of a kind, in the order of the run, each with the number of times."""
        return tuple(replace(found, times=times) for found, times in self._found.items() if found.kind == kind)

    def add(self, kind: str, what: str, why: str) -> None:
        """Note something at the user's line that runs now."""
        if not self._depth:
            modules = self.modules()
            self._found[Finding(kind, what, user_line(), why, modules[-1] if modules else "")] += 1

    def modules(self) -> tuple[str, ...]:
        """The names of the modules whose calls are under way, the innermost last."""
        found, frame = [], sys._getframe(1)
        walk: FrameType | None = frame
        while walk is not None:
            if walk.f_code is _CALLS_MODULE:
                name = self._names.get(id(walk.f_locals["self"]))
                found += [name] if name is not None else []
            walk = walk.f_back
        return tuple(reversed(found))

    def operate(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note one operator and run it."""
        is_break = func._schema.name in BREAKS or torch.Tag.cudagraph_unsafe in func.tags
        if self._piecewise and is_break and not self._depth:
            return self._run_break(str(func), func, args, kwargs)
        why = forbidden(func, args, kwargs)
        if why is not None:
            self.add("forbidden", str(func), why)
        elif torch.Tag.cudagraph_unsafe in func.tags:
            self.add("forbidden", str(func), "is tagged as unsafe for CUDA graphs; mark it as a break")
        if func is _LITERAL:
            self.add(
                "frozen",
                "a tensor made from Python values",
                "a constant in the graph; on a GPU its copy from the host is refused: make it once, before the call",
            )
        constants = tuple(repr(leaf) for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor))
        works = kind_of(func) not in (OperatorKind.VIEW, OperatorKind.EMPTY)
        self.operations.append(Operation(str(func), user_line(), self.modules(), constants, bool(self._depth), works))
        return func(*args, **kwargs)

    def _run_break(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        try:
            return fn(*args, **kwargs)
        finally:
            self._depth -= 1


class _Operators(OperatorMode):
    """Sees every operator that reaches torch's dispatcher."""

    def __init__(self, survey: Survey) -> None:
        super().__init__()
        self._survey = survey

    def look_inside(self, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _HostReads(self._survey), self:
            return run_kernel(func, key, args, kwargs)

    def watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._survey.operate(func, args, kwargs)


class _HostReads(TorchFunctionMode):
    """Sees what passes the dispatcher by: memory given to the host, and copies that do nothing on a CPU."""

    def __init__(self, survey: Survey) -> None:
        super().__init__()
        self._survey = survey

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in HOST_READS:
            why = "gives memory to the host, past torch's dispatcher; keep the value on the device"
            self._survey.add("forbidden", f"Tensor.{HOST_READS[func]}", why)
        elif func in _TO_HOST or (func is torch.Tensor.to and "cpu" in (*args[1:], kwargs.get("device"))):
            why = "copies from a GPU to the host; do it before or after the call"
            self._survey.add("forbidden", f"Tensor.{_TO_HOST.get(func, 'to')}", why)
        return func(*args, **kwargs)


def names_of(roots: Iterable[nn.Module]) -> dict[int, str]:
    """The names of modules by their ``id``: a root by its class, what is in it by its path."""
    names: dict[int, str] = {}
    for root in roots:
        for path, module in root.named_modules():
            names.setdefault(id(module), path or type(root).__name__)
    return names


def _streams() -> tuple[Any, ...]:
    """The states of the global generators of Python and of NumPy."""
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), *numpy[2:]


@contextmanager
def kept_streams() -> Iterator[None]:
    """After the block the global generators of Python and of NumPy are as they were before it."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
