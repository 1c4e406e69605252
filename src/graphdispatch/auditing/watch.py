"""The eager runs of an audit: what CUDA forbids, what a call reads, writes and rebinds, and what it does not repeat."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import CaptureError
from .observe import Event, Observer, Run
from .result import Finding, Findings, Memory

__all__ = ["Step", "Watched", "watch"]

_CALLS_MODULE = nn.Module._call_impl.__code__
_LONGEST = 60
_FURTHER_RUNS = 2


class Step(NamedTuple):
    """An event, and the names of the modules around it, from the outermost."""

    event: Event
    modules: tuple[str, ...]

    def finding(self, why: str) -> Finding:
        """It as something to be told."""
        return Finding(self.event.what, self.event.where, why, self.modules[-1] if self.modules else "")


class Watched(NamedTuple):
    """What the runs of a call show.

    Attributes:
        findings: What can be told of them; nothing if they failed.
        failures: Why no graph can be captured, as far as the runs show.
        operators: The operators of the last run.
        repeats: Whether equal calls did the same.
    """

    findings: Findings
    failures: tuple[str, ...] = ()
    operators: Sequence[Step] = ()
    repeats: bool = True


def watch(observer: Observer) -> Watched:
    """Run the call twice. If the first run went another way, as one that makes tables does, run it once more."""
    try:
        steps, run = _observed(observer)
        changed: Sequence[Finding] = ()
        for _ in range(_FURTHER_RUNS):
            before, (steps, run) = steps, _observed(observer)
            changed = _differences(_of("operator", before), _of("operator", steps))
            if not changed:
                break
    except CaptureError as error:
        return Watched(Findings(), (str(error),))
    constant = "is a constant of the graph; another value needs another graph"
    given = [(path, value) for path, value in observer.arguments.items() if not isinstance(value, torch.Tensor)]
    frozen = [Finding(f"argument {path} = {_short(repr(value))}", "", constant) for path, value in given]
    frozen += [*_counted(_of("frozen", steps)), *changed]
    if run.draws is not None:
        frozen.append(Finding(f"what {run.draws} draws", "", "differs in each call; a graph keeps that of its capture"))
    if run.unseen is not None:
        frozen.append(Finding(run.unseen, "", "nobody can compare it or put it back; no graph would use it again"))
    operators, (reads, writes) = _of("operator", steps), _memory(observer, run)
    findings = Findings(
        operators=sum(step.event.works for step in operators),
        forbidden=_counted(_of("forbidden", steps)),
        reads=reads,
        writes=writes,
        rebinds=run.rebinds,
        frozen=tuple(frozen),
    )
    return Watched(findings, (), operators, not changed and run.draws is None and run.unseen is None)


def names_of(modules: Iterable[nn.Module]) -> dict[int, str]:
    """The names of modules by their ``id``: one that lies in no earlier one by its class, what is in it by its path."""
    names: dict[int, str] = {}
    for root in modules:
        if id(root) not in names:
            for path, module in root.named_modules():
                names.setdefault(id(module), path or type(root).__name__)
    return names


def _observed(observer: Observer) -> tuple[list[Step], Run]:
    """The events of one run, with the modules around each."""
    events: list[tuple[Event, list[int]]] = []
    run = observer.run(lambda event: events.append((event, _modules_that_run())))
    names = names_of(observer.modules)
    return [Step(event, tuple(names[key] for key in around if key in names)) for event, around in events], run


def _modules_that_run() -> list[int]:
    """The modules whose calls are under way, by their ``id``, from the outermost."""
    found: list[int] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALLS_MODULE:
            found.append(id(frame.f_locals["self"]))
        frame = frame.f_back
    return found[::-1]


def _of(kind: str, steps: Iterable[Step]) -> list[Step]:
    return [step for step in steps if step.event.kind == kind]


def _counted(steps: Iterable[Step]) -> tuple[Finding, ...]:
    """Each finding once, in the order of the run, with the number of times."""
    found = Counter(step.finding(step.event.why) for step in steps)
    return tuple(replace(finding, times=times) for finding, times in found.items())


def _differences(first: Sequence[Step], second: Sequence[Step]) -> Sequence[Finding]:
    """What differs between two runs that began alike: a graph keeps what one of them had."""
    shapes = [[(step.event.what, len(step.event.constants)) for step in steps] for steps in (first, second)]
    if shapes[0] != shapes[1]:
        fork = next((at for at, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b), min(map(len, shapes)))
        where = max(first, second, key=len)[fork].event.where
        return [Finding("the path through the code", where, "differs between two calls; a graph keeps one")]
    found: Counter[Finding] = Counter()
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one.event.constants, other.event.constants, strict=True):
            if a != b:
                why = f"gets {_short(a)} in one call and {_short(b)} in the next; a graph keeps one of them"
                found[one.finding(why)] += 1
    return [replace(finding, times=times) for finding, times in found.items()]


def _memory(observer: Observer, run: Run) -> tuple[tuple[Memory, ...], tuple[Memory, ...]]:
    """What a run read and wrote and neither made nor was given, by name."""
    names, reads = _tensor_names(observer), Counter[str]()
    for tensor in run.uses:
        name, kind = names.get(_key(tensor), (_nameless(tensor), ""))
        if kind != "argument":
            reads[kind or name] += tensor.untyped_storage().nbytes()
    writes: dict[int, Memory] = {}
    for tensor, nbytes in run.writes:
        key, whole = _key(tensor), tensor.untyped_storage().nbytes()
        touched = nbytes + (writes[key].touched if key in writes else 0)
        writes[key] = Memory(names.get(key, (_nameless(tensor), ""))[0], whole, min(touched, whole))
    return tuple(Memory(name, nbytes, nbytes) for name, nbytes in reads.items()), tuple(writes.values())


def _tensor_names(observer: Observer) -> Mapping[int, tuple[str, str]]:
    """The name and the kind of each tensor that is known, by its storage."""
    given = observer.arguments.items()
    named: list[tuple[Any, str, str]] = [(value, f"argument {path}", "argument") for path, value in given]
    names = names_of(observer.modules)
    for module in observer.modules:
        for kind, tensors in (("parameters", module._parameters), ("buffers", module._buffers)):
            named += [(tensor, f"{names[id(module)]}.{name}", kind) for name, tensor in tensors.items()]
    known = [one for one in reversed(named) if isinstance(one[0], torch.Tensor) and one[0].layout is torch.strided]
    return {_key(tensor): (name, kind) for tensor, name, kind in known}


def _key(tensor: torch.Tensor) -> int:
    """What tells a storage from all others."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _nameless(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
