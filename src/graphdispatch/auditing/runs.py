"""The call that is audited, and its watched eager runs: what it does, writes, rebinds, and does not repeat."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..backends import Backend, get_backend
from ..backends.insight import reveal_operators
from ..backends.operators import storage_key
from ..call.rules import callable_name, make_rules
from ..call.spec import CallSpec, FlatCall
from ..capture.effects import EffectRecorder, retry_once, undo
from ..errors import CaptureError
from .result import Finding, Tensors
from .state import CallableState
from .survey import Operation, Survey, names_of

__all__ = ["AuditedCall", "WatchedRuns", "watch_runs"]

_LONGEST = 60


class AuditedCall:
    """One call of ``fn``. Each run of it leaves memory and torch's default generator as they were; ``state`` puts back
    what it leaves in Python."""

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
        self._call = FlatCall(fn, spec, values)
        leaves = self._call.flatten(values)
        assert leaves is not None  # they are the call's own
        self._leaves = list(leaves)  # as such, each run gets containers of its own
        self._limit_bytes = limit_bytes
        self.fn = fn
        self.name = callable_name(fn)
        self.leaves = [(leaf.path, value) for leaf, value in zip(self._call.leaves, leaves, strict=True)]
        self.tensors = {path: value for path, value in self.leaves if isinstance(value, torch.Tensor)}
        self.dims = make_rules(fn, self._guessed_dims() if dynamic is None else dynamic, {}, ()).dynamic
        """The batch dimensions, as given or as guessed."""
        self.rows = self._rows()
        """The rows of the first tensor that has a batch dimension; 1 if none has."""
        self.state = CallableState(fn)
        self.modules = names_of(self.state.modules)
        self.served = self.modules.get(id(fn), self.modules.get(id(getattr(fn, "__self__", None)), ""))
        """The name of the module that is called, or whose method is; empty for other callables."""
        self.effects = EffectRecorder(0)
        """What the latest run wrote, and which memory it used."""

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

    def run(self, *, piecewise: bool) -> Survey:
        """Run the call eagerly to its end. Raises what it raises, and ``CaptureError`` if it overwrites more than can
        be saved."""
        backend = self.backend
        reveal_operators()
        survey = Survey(self.modules, piecewise=piecewise)
        self.effects = effects = EffectRecorder(self._limit_bytes, strict=True)
        before = backend.rng_state()

        def put_back() -> None:
            undo(effects.regions)
            backend.set_rng_state(before)

        try:
            with effects, survey.watching():
                self._call(self._leaves)
        finally:
            retry_once(put_back, backend)
        return survey

    def reads(self) -> tuple[Tensors, ...]:
        """The memory that the latest run used and neither made nor was given."""
        names, found = self._tensor_names(), dict[str, Tensors]()
        for key, tensor in self.effects.outside.items():
            name, kind = names.get(key, (f"a tensor of shape {tuple(tensor.shape)}", "other tensors"))
            if kind == "argument":
                continue
            label = kind if kind in ("parameters", "buffers") else name
            nbytes = tensor.untyped_storage().nbytes() + (found[label].nbytes if label in found else 0)
            found[label] = Tensors(label, nbytes, nbytes)
        return tuple(found.values())

    def writes(self) -> tuple[Tensors, ...]:
        """The memory that the latest run wrote to and did not make, with the bytes written."""
        names, found = self._tensor_names(), dict[int, Tensors]()
        for region in self.effects.regions:
            if region.is_generator:
                continue
            key = storage_key(region.target)
            name = names.get(key, (f"a tensor of shape {tuple(region.target.shape)}", ""))[0]
            touched = region.before.nbytes + (found[key].touched if key in found else 0)
            whole = region.target.untyped_storage().nbytes()
            found[key] = Tensors(name, whole, min(touched, whole))
        return tuple(found.values())

    def _tensor_names(self) -> dict[int, tuple[str, str]]:
        """The name and the kind of each tensor that is known, by its storage."""
        named = [(tensor, f"argument {path}", "argument") for path, tensor in self.tensors.items()]
        for module in self.state.modules:
            prefix = self.modules[id(module)]
            for kind, tensors in (("parameters", module._parameters), ("buffers", module._buffers)):
                named += [(t, f"{prefix}.{name}", kind) for name, t in tensors.items() if t is not None]
        found: dict[int, tuple[str, str]] = {}
        for tensor, name, kind in named:
            if tensor.layout is torch.strided:
                found.setdefault(storage_key(tensor), (name, kind))
        return found

    def constants(self) -> list[Finding]:
        """The arguments that are no tensors: a graph keeps their values."""
        why = "is a constant of the graph; another value needs another graph"
        return [
            Finding("frozen", f"argument {path} = {_short(value)}", "", why)
            for path, value in self.leaves
            if not isinstance(value, torch.Tensor)
        ]


class WatchedRuns(NamedTuple):
    """What two or three watched runs of a call found."""

    operations: Sequence[Operation] = ()
    forbidden: tuple[Finding, ...] = ()
    frozen: tuple[Finding, ...] = ()
    rebinds: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    repeats: bool = True
    """Whether equal calls did the same."""


def watch_runs(call: AuditedCall, *, piecewise: bool) -> WatchedRuns:
    """Run a call twice. If the first run went another way, as one that makes tables does, run it once more.

    An error of the callable passes through, with everything put back.
    """
    try:
        survey, again = call.run(piecewise=piecewise), None
        for _ in range(2):
            before = CallableState(call.fn)
            again, survey = survey, call.run(piecewise=piecewise)
            rebinds = before.changed()
            frozen = _differences(again, survey)
            if not frozen:
                break
    except CaptureError as error:
        return WatchedRuns(failures=(str(error),))
    finally:
        call.state.restore()
    if survey.draws_python_random:
        why = "are drawn in each call; a graph keeps those of its capture"
        frozen.append(Finding("frozen", "random numbers of Python or NumPy", "", why))
    repeats = not frozen
    found = (*survey.findings("frozen"), *frozen)
    return WatchedRuns(survey.operations, survey.findings("forbidden"), found, rebinds, repeats=repeats)


def _differences(first: Survey, second: Survey) -> list[Finding]:
    """What differs between two runs that began alike: a graph keeps what one of them had."""
    for one, other in zip(first.operations, second.operations, strict=False):
        if one.name != other.name or len(one.constants) != len(other.constants):
            why = f"differs between two equal calls ({one.name}, then {other.name}); a graph keeps one path"
            return [Finding("frozen", "the path through the code", other.where, why)]
    if len(first.operations) != len(second.operations):
        longer = max(first.operations, second.operations, key=len)
        where = longer[min(len(first.operations), len(second.operations))].where
        return [Finding("frozen", "the path through the code", where, "differs between two equal calls")]
    found: dict[Finding, int] = {}
    for one, other in zip(first.operations, second.operations, strict=True):
        for a, b in zip(one.constants, other.constants, strict=True):
            if a != b:
                module = one.modules[-1] if one.modules else ""
                why = f"gets {_short(a)} in one call and {_short(b)} in the next; a graph keeps one of them"
                finding = Finding("frozen", one.name, one.where, why, module)
                found[finding] = found.get(finding, 0) + 1
    return [replace(finding, times=times) for finding, times in found.items()]


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
