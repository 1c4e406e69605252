"""What a call does, for whoever wants to know before it is captured: watched eager runs, of which nothing is left.

A capture stops at the first operator that no graph can hold. An observed run notes it and goes on.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ..backends import get_backend
from ..backends.host_reads import HostReads, Listening, SaysCapturing, StandIns
from ..backends.operators import (
    OperatorKind,
    forbidden,
    is_strided,
    is_unsafe,
    kind_of,
    storage_key,
    tensors_in,
    user_line,
)
from ..errors import CaptureError
from ..proof.breaks import BREAKS
from ..proof.check.licence import RowProof, shown_of
from ..proof.check.outputs import Opener
from ..proof.rows.batches import BatchSpace
from ..proof.rows.run import RowRun
from ..proof.rows.verdict import Verdict
from ..proof.state.reads import StateReads
from ..proof.state.walk import StateWalk
from ..proof.watch.effects import EffectRecorder, retry_once, undo
from ..proof.watch.trace import CodeTrace
from ..runtime.entry import CUDAGraphEntry
from ..runtime.flatten import CallSpec, FlatCall

_FEW_ROWS, _MOST_FOLLOWED = (7, 11, 13, 17, 19, 23), 65
"""How many rows a run has whose rows are followed: such that no size is taken for them; and for which it speaks."""
_CALLS_MODULE = nn.Module._call_impl.__code__


def _tell_of_copy(name: str, original: Any, listeners: Callable[[], list[Any]]) -> Any:
    @wraps(original)
    def copy(*args: Any, **kwargs: Any) -> Any:
        texts = [value.partition(":")[0] for value in (*args[1:], *kwargs.values()) if isinstance(value, str)]
        if name != "to" or "cpu" in texts:
            for on_copy in listeners():
                on_copy(f"Tensor.{name}")
        return original(*args, **kwargs)

    return copy


_COPIES = StandIns([(torch.Tensor, name) for name in ("cpu", "pin_memory", "to")], _tell_of_copy)
"""Copies to the host, which do nothing on a CPU."""


class Event(NamedTuple):
    """Something that a run does.

    Attributes:
        kind: ``"operator"``; ``"forbidden"``, which no graph can hold; or ``"frozen"``, which a graph keeps as it was.
        what: The operator, or the method of tensors.
        where: The user's line, as ``file:line: source``.
        why: What is wrong with it, and what to do; empty for operators.
        modules: The names of the modules around it, from the outermost.
        constants: The arguments of an operator but the tensors.
        works: Whether an operator does anything on a device: a view does not.
    """

    kind: str
    what: str
    where: str
    why: str
    modules: tuple[str, ...]
    constants: tuple[str, ...]
    works: bool


class Run(NamedTuple):
    """What a run did and leaves behind, noted before it is put back.

    Attributes:
        events: What it did, in order.
        uses: A tensor for each storage that it used and did not make, arguments included.
        writes: Each tensor that it wrote to and did not make, with the number of bytes written.
        rebinds: Python attributes and variables that it changed, in words.
        draws: The random generator of Python or NumPy that it drew from, or None.
        unseen: What nobody can compare or put back, in words, or None.
    """

    events: list[Event]
    uses: list[torch.Tensor]
    writes: list[tuple[torch.Tensor, int]]
    rebinds: tuple[str, ...]
    draws: str | None
    unseen: str | None


class Observer:
    """Runs one call eagerly, as often as needed, and watches it.

    Args:
        fn: The callable. Nobody else may use it meanwhile.
        args: The positional arguments.
        kwargs: The keyword arguments.
        limit_bytes: How much of the memory that a run overwrites may be saved.
        skips_breaks: Whether parts that are marked by ``eager_break`` may do what they like, which nothing reports.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        limit_bytes: int,
        *,
        skips_breaks: bool,
    ) -> None:
        spec = CallSpec(fn, len(args), tuple(kwargs))
        values = spec.values(args, kwargs)
        self._call, self._limit_bytes, self._skips_breaks = FlatCall(fn, spec, values), limit_bytes, skips_breaks
        self._values = list(self._call.flatten(values) or ())  # a plain list: each run gets containers of its own
        self._walks: list[StateWalk] = []
        self.arguments = {leaf.path: value for leaf, value in zip(self._call.leaves, self._values, strict=True)}
        """All values by their paths, such as ``batch['ids']``."""
        devices = (value.device for value in self._values if isinstance(value, torch.Tensor))
        self.backend = get_backend("auto", next(devices, torch.device("cpu")))
        """That of the first tensor."""
        self.modules: list[nn.Module] = []
        """The modules that the callable reached before its latest run."""
        self.names: Mapping[int, str] = {}
        """Their names and those of all modules in them, by ``id``."""

    def run(self) -> Run:
        """Run the call to its end, and put back the memory that it wrote and torch's generator. Python state stays.

        Raises what the call raises, and ``CaptureError`` if it overwrites more than can be saved.
        """
        walk = StateWalk(self._call.fn)
        self._walks.append(walk)
        self.modules = StateReads([self._call.fn], None).modules
        self.names = _names_of(self.modules)
        trace, generator = CodeTrace(walk, skips_breaks=self._skips_breaks), self.backend.rng_state()
        watch = _Watch(self._limit_bytes, self.names, trace, skips_breaks=self._skips_breaks)

        def put_back() -> None:
            undo(watch.regions)
            self.backend.set_rng_state(generator)

        reads, copies = HostReads(watch.on_read), Listening(watch.on_copy, _COPIES)
        try:
            with trace, SaysCapturing(), reads, copies, watch.watching():
                self._call(self._values)
        finally:
            retry_once(put_back, self.backend)
        writes = [(one.target, one.before.nbytes) for one in watch.regions if not one.is_generator]
        rebinds = tuple(walk.changes())
        return Run(watch.events, list(watch.outside.values()), writes, rebinds, walk.drew(), trace.unseen())

    def follow_rows(self, dims: Mapping[str, int]) -> Verdict:
        """What a run shows of the rows, whether or not graphs can hold the call. It runs on a few rows of the call's.

        Args:
            dims: The batch dimensions of tensors, by their paths or those of what holds them.

        Raises:
            CaptureError: The call overwrites more than can be saved. What the call raises for so many rows passes.
        """
        walk = StateWalk(self._call.fn)
        self._walks.append(walk)
        found = {path: dims.get(path, dims.get(path.partition("[")[0])) for path in self.arguments}
        along = [found[path] if isinstance(value, torch.Tensor) else None for path, value in self.arguments.items()]
        given = [value for value in self._values if isinstance(value, torch.Tensor)]
        taken = {extent for tensor in (*given, *walk.tensors) for extent in tensor.shape}
        rows = next((one for one in _FEW_ROWS if one not in taken), _FEW_ROWS[0])
        values = [
            value
            if dim is None
            else value.index_select(dim, torch.arange(rows, device=value.device) % value.shape[dim])
            for value, dim in zip(self._values, along, strict=True)
        ]
        reached = {storage_key(one) for one in (*walk.tensors, *tensors_in(values)) if is_strided(one)}
        run = RowRun(BatchSpace([range(2, _MOST_FOLLOWED)], [rows]), reached)
        for value, dim in zip(values, along, strict=True):
            if dim is not None:
                run.follow(value, {dim % value.dim(): 0})
        effects, generator = EffectRecorder(self._limit_bytes, strict=True), self.backend.rng_state()

        def put_back() -> None:
            undo(effects.regions)
            self.backend.set_rng_state(generator)

        try:
            with effects.watching(run):
                output = self._call(values)
            return run.verdict(tensors_in(Opener(walk.has_met).open(output)))
        finally:
            retry_once(put_back, self.backend)

    def restore(self) -> None:
        """Put back all Python state, and the generators of Python and NumPy, as they were before the first run."""
        for walk in reversed(self._walks):
            walk.restore(generators=True)


class _Watch(EffectRecorder):
    """Notes what a run does, and saves what it overwrites."""

    def __init__(self, limit: int, names: Mapping[int, str], trace: CodeTrace, *, skips_breaks: bool) -> None:
        super().__init__(limit, strict=True)
        self._names, self._trace, self._skips_breaks = names, trace, skips_breaks
        self.events: list[Event] = []

    def on_read(self, name: str, _: Any) -> None:
        """Note memory that the host gets hold of."""
        self._note("forbidden", name, "gives memory to the host, past torch's dispatcher; keep the value on the device")

    def on_copy(self, name: str) -> None:
        """Note a copy that does nothing on a CPU."""
        self._note("forbidden", name, "copies from a GPU to the host; do it before or after the call")

    def watch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note one operator, save what it overwrites, and run it."""
        why = forbidden(func, args, kwargs, tensors_in(args, kwargs))
        if func._schema.name in BREAKS or is_unsafe(func):
            why = None if self._skips_breaks else why or "breaks every graph: it is marked, or tagged as unsafe"
        if why is not None:
            self._note("forbidden", str(func), why)
        if func is torch.ops.aten.lift_fresh.default:
            why = (
                "is a constant in the graph; on a GPU its copy from the host is refused: make it once, before the call"
            )
            self._note("frozen", "a tensor made from Python values", why)
        constants = tuple(repr(leaf) for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor))
        self._note("operator", str(func), "", constants, kind_of(func) not in (OperatorKind.VIEW, OperatorKind.EMPTY))
        return super().watch(func, args, kwargs)

    def look_inside(self, func: OpOverload, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a Python operator, and watch what it runs."""
        self._note("frozen", str(func), "is Python: a graph keeps what it launched, and never runs it again")
        return super().look_inside(func, key, args, kwargs)

    def give_up(self, error: CaptureError) -> None:
        """Note what no graph can hold, and go on."""
        what, _, why = str(error).partition(" ")
        self._note("forbidden", what, why)

    def _note(self, kind: str, what: str, why: str, constants: tuple[str, ...] = (), works: bool = False) -> None:
        if not self._trace.is_in_break():
            modules = tuple(self._names[key] for key in _modules_that_run() if key in self._names)
            self.events.append(Event(kind, what, user_line(), why, modules, constants, works))


def _names_of(modules: Iterable[nn.Module]) -> dict[int, str]:
    """The names of modules by their ``id``: one that lies in no earlier one by its class, what is in it by its path."""
    names: dict[int, str] = {}
    for root in modules:
        if id(root) not in names:
            for path, module in root.named_modules():
                names.setdefault(id(module), path or type(root).__name__)
    return names


def _modules_that_run() -> list[int]:
    """The modules whose calls are under way, by their ``id``, from the outermost."""
    found: list[int] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALLS_MODULE:
            found.append(id(frame.f_locals["self"]))
        frame = frame.f_back
    return found[::-1]


def proofs_of(entries: Iterable[CUDAGraphEntry]) -> list[RowProof]:
    """What is shown of the rows of graphs, as far as there is a proof."""
    shown = (shown_of(entry) for entry in entries)
    return [one.proof for one in shown if one is not None and one.proof is not None]
