"""The call that is audited, and its watched eager runs: what it does, writes, rebinds, and does not repeat."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..backends import Backend, get_backend
from ..backends.operators import is_strided, storage_key
from ..call.rules import callable_name, make_rules
from ..call.spec import CallSpec, FlatCall
from ..capture.effects import retry_once, undo
from ..errors import CaptureError
from ..state.objects import CONSTANTS
from ..state.reads import StateReads
from ..state.trace import CodeTrace
from ..state.walk import StateWalk
from .result import Finding, Tensors
from .survey import Operation, Survey, names_of

__all__ = ["AuditedCall", "WatchedRuns", "watch_runs"]

_LONGEST = 60
_TWICE = 2


class AuditedCall:
    """One call of ``fn``, with its Python state as it was before: ``state.restore(generators=True)`` puts that back."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        dynamic: Mapping[str, int] | None,
        limit_bytes: int,
    ) -> None:
        spec = CallSpec(fn, len(args), tuple(kwargs))
        values = spec.values(args, kwargs)
        self.call = FlatCall(fn, spec, values)
        self.values = list(self.call.flatten(values) or ())  # a plain list, so that each run gets containers of its own
        self.leaves = [(leaf.path, value) for leaf, value in zip(self.call.leaves, self.values, strict=True)]
        self.tensors = {path: value for path, value in self.leaves if isinstance(value, torch.Tensor)}
        self.fn = fn
        self.name = callable_name(fn)
        self.limit_bytes = limit_bytes
        self.dims = make_rules(fn, self._guessed_dims() if dynamic is None else dynamic, {}, ()).dynamic
        """The batch dimensions, as given or as guessed."""
        self.rows = self._rows()
        """The rows of the first tensor that has a batch dimension; 1 if none has."""
        self.state = StateWalk(fn)
        self.modules = names_of(self.state.modules)
        self.served = self.modules.get(id(fn), self.modules.get(id(getattr(fn, "__self__", None)), ""))
        """The name of the module that is called, or whose method is; empty for other callables."""

    @property
    def backend(self) -> Backend:
        """The backend of the device of the first tensor. Raises ``BackendError`` if there is none."""
        device = next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))
        return get_backend("auto", device)

    def _guessed_dims(self) -> dict[str, int]:
        """Dimension 0 of the first tensor that has one, and of all that are as long there."""
        shaped = {path: tensor.shape[0] for path, tensor in self.tensors.items() if tensor.dim()}
        rows = next(iter(shaped.values()), 0)
        return {path: 0 for path, extent in shaped.items() if extent == rows}

    def _rows(self) -> int:
        for path, tensor in self.tensors.items():
            dim = self.dims.get(path, self.dims.get(path.partition("[")[0]))
            if dim is not None and -tensor.dim() <= dim < tensor.dim():
                return tensor.shape[dim]
        return 1

    def tensor_names(self) -> dict[int, tuple[str, str]]:
        """The name and the kind of each tensor that is known, by its storage."""
        named = [(tensor, f"argument {path}", "argument") for path, tensor in self.tensors.items()]
        for module in self.state.modules:
            prefix = self.modules[id(module)]
            for kind, tensors in (("parameters", module._parameters), ("buffers", module._buffers)):
                named += [(t, f"{prefix}.{name}", kind) for name, t in tensors.items() if t is not None]
        return {storage_key(t): (name, kind) for t, name, kind in reversed(named) if is_strided(t)}


@dataclass(frozen=True)
class WatchedRuns:
    """What two or three watched runs of a call found."""

    operations: Sequence[Operation] = ()
    forbidden: tuple[Finding, ...] = ()
    frozen: tuple[Finding, ...] = ()
    reads: tuple[Tensors, ...] = ()
    writes: tuple[Tensors, ...] = ()
    rebinds: tuple[str, ...] = ()
    guarded: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    repeats: bool = True
    """Whether equal calls did the same."""


def watch_runs(call: AuditedCall, *, piecewise: bool) -> WatchedRuns:
    """Run a call twice. If the first run went another way, as one that makes tables does, run it once more.

    An error of the callable passes through, with the memory put back that it wrote.
    """
    try:
        trace = CodeTrace(call.state, skips_breaks=piecewise)
        before, frozen = _run(call, trace, piecewise), [Finding("", "", "", "")]
        for _ in range(_TWICE):
            if frozen:
                trace = CodeTrace(StateWalk(call.fn), skips_breaks=piecewise)
                survey = _run(call, trace, piecewise)
                frozen, before = _differences(before, survey), survey
    except CaptureError as error:
        return WatchedRuns(failures=(str(error),))
    drew = trace.walk.drew()
    if drew is not None:
        why = "differs in each call; a graph keeps the draws of its capture"
        frozen.append(Finding("frozen", f"what {drew} draws", "", why))
    unseen = trace.unseen()
    if unseen is not None:
        frozen.append(
            Finding("frozen", unseen, "", "nobody can compare it or put it back; no graph would use it again")
        )
    names = call.tensor_names()
    return WatchedRuns(
        operations=survey.operations,
        forbidden=survey.findings("forbidden"),
        frozen=(*_constants(call), *survey.findings("frozen"), *frozen),
        reads=_reads(survey, names),
        writes=_writes(survey, names),
        rebinds=tuple(trace.walk.changes(trace.spelled)),
        guarded=_guarded(StateReads(call.fn, trace)),
        repeats=not frozen,
    )


def _run(call: AuditedCall, trace: CodeTrace, piecewise: bool) -> Survey:
    """Run the call eagerly to its end, and put back the memory that it wrote and torch's generator.

    Raises what it raises, and ``CaptureError`` if it overwrites more than can be saved.
    """
    backend, survey = call.backend, Survey(call.modules, call.limit_bytes, piecewise=piecewise)
    before = backend.rng_state()

    def put_back() -> None:
        undo(survey.regions)
        backend.set_rng_state(before)

    try:
        with trace, survey.watching():
            call.call(call.values)
    finally:
        retry_once(put_back, backend)
    return survey


def _reads(survey: Survey, names: Mapping[int, tuple[str, str]]) -> tuple[Tensors, ...]:
    """The memory that a run used and neither made nor was given."""
    found: Counter[str] = Counter()
    for key, tensor in survey.outside.items():
        name, kind = names.get(key, (_nameless(tensor), ""))
        if kind != "argument":
            found[kind or name] += tensor.untyped_storage().nbytes()
    return tuple(Tensors(name, nbytes, nbytes) for name, nbytes in found.items())


def _writes(survey: Survey, names: Mapping[int, tuple[str, str]]) -> tuple[Tensors, ...]:
    """The memory that a run wrote to and did not make, with the bytes written."""
    found: dict[int, Tensors] = {}
    for region in (region for region in survey.regions if not region.is_generator):
        key, whole = storage_key(region.target), region.target.untyped_storage().nbytes()
        touched = region.before.nbytes + (found[key].touched if key in found else 0)
        name = names.get(key, (_nameless(region.target), ""))[0]
        found[key] = Tensors(name, whole, min(touched, whole))
    return tuple(found.values())


def _nameless(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"


def _guarded(reads: StateReads) -> tuple[str, ...]:
    """What is compared at each hit: tensors, and by name the attributes and variables that hold constants."""
    tables = [(table, names) for table, names in reads.attributes if type(table) is dict]  # not those of classes
    held = [(name, table.get(name)) for table, names in tables for name in names if name[0] != "_"]
    counts = Counter(name for name, value in held if isinstance(value, CONSTANTS))
    texts = [f"the addresses of {len(reads.tensors)} tensors"] if reads.tensors else []
    for name, times in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        texts.append(f"{name} of {times} objects" if times > 1 else name)
    return tuple(texts)


def _constants(call: AuditedCall) -> list[Finding]:
    why = "is a constant of the graph; another value needs another graph"
    given = [(path, value) for path, value in call.leaves if not isinstance(value, torch.Tensor)]
    return [Finding("frozen", f"argument {path} = {_short(repr(value))}", "", why) for path, value in given]


def _differences(first: Survey, second: Survey) -> list[Finding]:
    """What differs between two runs that began alike: a graph keeps what one of them had."""
    a, b = first.operations, second.operations
    shapes = [[(one.name, len(one.constants)) for one in run] for run in (a, b)]
    if shapes[0] != shapes[1]:
        fork = next((at for at, (x, y) in enumerate(zip(*shapes, strict=False)) if x != y), min(len(a), len(b)))
        where = max(a, b, key=len)[fork].where
        return [Finding("frozen", "the path through the code", where, "differs between two calls; a graph keeps one")]
    found: Counter[Finding] = Counter()
    for one, other in zip(a, b, strict=True):
        for x, y in zip(one.constants, other.constants, strict=True):
            if x != y:
                module = one.modules[-1] if one.modules else ""
                why = f"gets {_short(x)} in one call and {_short(y)} in the next; a graph keeps one of them"
                found[Finding("frozen", one.name, one.where, why, module)] += 1
    return [replace(finding, times=times) for finding, times in found.items()]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
