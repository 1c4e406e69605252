"""The eager runs of an audit: what CUDA forbids, what a call reads, writes and rebinds, and what it does not repeat."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..errors import CaptureError
from .observe import Event, Observer, Run
from .result import Finding, Findings, Memory

_LONGEST = 60
_FURTHER_RUNS = 2


class Watched(NamedTuple):
    """What the runs of a call show.

    Attributes:
        findings: What they show; nothing if they failed.
        failures: Why no graph can be captured, as far as the runs show.
        operators: The operators of the last run.
        repeats: Whether equal calls did the same.
    """

    findings: Findings
    failures: tuple[str, ...] = ()
    operators: Sequence[Event] = ()
    repeats: bool = True


def watch(observer: Observer) -> Watched:
    """Run the call twice. If the first run went another way, as one that makes tables does, run it once more."""
    try:
        run = observer.run()
        changed: Sequence[Finding] = ()
        for _ in range(_FURTHER_RUNS):
            before, run = run, observer.run()
            changed = _differences(_of("operator", before), _of("operator", run))
            if not changed:
                break
    except CaptureError as error:
        return Watched(Findings(), (str(error),))
    constant = "is a constant of the graph; another value needs another graph"
    given = [(path, value) for path, value in observer.arguments.items() if not isinstance(value, torch.Tensor)]
    frozen = [Finding(f"argument {path} = {_short(repr(value))}", "", constant) for path, value in given]
    frozen += [*_counted(_of("frozen", run)), *changed]
    if run.draws is not None:
        frozen.append(Finding(f"what {run.draws} draws", "", "differs in each call; a graph keeps that of its capture"))
    if run.unseen is not None:
        frozen.append(Finding(run.unseen, "", "nobody can compare it or put it back; no graph would use it again"))
    operators, (reads, writes) = _of("operator", run), _memory(observer, run)
    findings = Findings(
        operators=sum(event.works for event in operators),
        forbidden=_counted(_of("forbidden", run)),
        reads=reads,
        writes=writes,
        rebinds=run.rebinds,
        frozen=tuple(frozen),
    )
    return Watched(findings, (), operators, not changed and run.draws is None and run.unseen is None)


def _of(kind: str, run: Run) -> list[Event]:
    return [event for event in run.events if event.kind == kind]


def _finding(event: Event, why: str) -> Finding:
    return Finding(event.what, event.where, why, event.modules[-1] if event.modules else "")


def _counted(events: Iterable[Event]) -> tuple[Finding, ...]:
    """Each finding once, in the order of the run, with the number of times."""
    found = Counter(_finding(event, event.why) for event in events)
    return tuple(replace(finding, times=times) for finding, times in found.items())


def _differences(first: Sequence[Event], second: Sequence[Event]) -> Sequence[Finding]:
    """What differs between two runs that began alike: a graph keeps what one of them had."""
    shapes = [[(event.what, len(event.constants)) for event in events] for events in (first, second)]
    if shapes[0] != shapes[1]:
        fork = next((at for at, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b), min(map(len, shapes)))
        where = max(first, second, key=len)[fork].where
        return [Finding("the path through the code", where, "differs between two calls; a graph keeps one")]
    found: Counter[Finding] = Counter()
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one.constants, other.constants, strict=True):
            if a != b:
                why = f"gets {_short(a)} in one call and {_short(b)} in the next; a graph keeps one of them"
                found[_finding(one, why)] += 1
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
    for module in observer.modules:
        for kind, tensors in (("parameters", module._parameters), ("buffers", module._buffers)):
            named += [(tensor, f"{observer.names[id(module)]}.{name}", kind) for name, tensor in tensors.items()]
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
