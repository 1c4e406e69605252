"""Captures of all sizes that are thrown away: whether graphs can hold a call, and what a replay of each costs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..api.graphed import Graphed, graphed
from ..backends.cpu.graph import CPUGraph
from ..backends.operators import storage_key, tensors_in
from ..errors import CaptureError, ConfigError, DeviceLostError
from ..memory.entry import CUDAGraphEntry
from ..reasons import Reason
from .result import Replay, Rows

__all__ = ["Trial", "try_captures"]

_NONE_PADDED = (
    "no batch was padded, since each number of rows has a size; give an example of 4 rows or more, or sizes with gaps"
)


@dataclass
class Trial:
    """What came of the captures. ``failures`` has each reason with one text."""

    failures: dict[Reason, str] = field(default_factory=dict)
    replays: list[Replay] = field(default_factory=list)
    rows: Rows = field(default_factory=lambda: Rows("untested", ""))
    broken: list[nn.Module] = field(default_factory=list)
    """The modules that run eagerly between the graphs, with ``breaks="auto"``."""
    failed_padded: bool = False
    """Whether a graph that pads batches differed from eager."""
    pool_bytes: int = 0
    input_bytes: int = 0


def try_captures(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: dict[str, Any]
) -> Trial:
    """Capture and check all sizes, as ``prewarm`` does, and release them.

    An error that the callable raises for another number of rows is a failure like any other. Raises ``ConfigError``
    for options that ``graphed`` does not take.
    """
    served = graphed(fn, **(options | {"strict": False}))
    trial = Trial()
    try:
        line = served.explain(*args, **kwargs)  # raises for rules that do not fit the call
        is_one_table = served.sizes == served.mixed_sizes
        for sizes in [[size] for size in reversed(served.sizes)] if is_one_table else [None]:
            try:
                report = served.prewarm(*args, sizes=sizes, **kwargs)
            except DeviceLostError:
                raise
            except ConfigError:  # the call can have no graph, whatever its size
                trial.failures[Reason.ARGUMENTS_CHANGED] = line
                break
            except Exception as error:
                reason = error.reason if isinstance(error, CaptureError) else Reason.CALL_RAISED
                text = f"a graph of {sizes} rows would need a call that raises {type(error).__name__}: {error}"
                trial.failures.setdefault(reason, text)
                continue
            for (mode, size), why in report.left_out.items():
                reason, text = report.reasons[mode, size], f"{mode.name} graph of {size} rows: {why}"
                trial.failures.setdefault(reason, text)
                is_padded = size > 1 and size - 1 not in served.sizes
                trial.failed_padded |= is_padded and reason is Reason.VERIFICATION_FAILED
        _measure(trial, served)
    finally:
        trial.broken = list(served.automatic_breaks)
        served.clear()
    return trial


def _measure(trial: Trial, served: Graphed[..., Any]) -> None:
    memory, entries = served.memory_report(), served.entries
    trial.pool_bytes, trial.input_bytes = memory.pool_bytes, memory.input_bytes
    smaller = dict.fromkeys({entry.mode for entry in entries}, 0)
    for entry in entries:
        trial.replays.append(_replay(entry, smaller[entry.mode] + 1))
        smaller[entry.mode] = entry.size
    trial.rows = _rows(entries, trial.replays)


def _replay(entry: CUDAGraphEntry, first: int) -> Replay:
    parts = entry.graph.graphs
    known = [part for part in parts if isinstance(part, CPUGraph)]
    has_rows = entry.inputs.has_rows
    real = (first + entry.size) / 2 if has_rows else entry.size
    views, held = entry.inputs.views(entry.size), set(map(storage_key, entry.held))
    copied = [one for one in tensors_in(entry.output) if storage_key(one) not in held]
    return Replay(
        mode=entry.mode.name,
        size=entry.size,
        serves=first if has_rows else entry.size,
        graphs=len(parts),
        recorded=sum(part.num_recorded for part in known),
        replayed=sum(part.num_replayed for part in known),
        copied_in=sum(view.nbytes for view in views),
        copied_out=sum(one.nbytes for one in copied) + sum(views[index].nbytes for index in entry.mutated),
        own_bytes=entry.nbytes,
        padding=1 - real / entry.size,
    )


def _rows(entries: list[CUDAGraphEntry], replays: list[Replay]) -> Rows:
    """What the proofs of all graphs that pad batches come to: the first that failed, or what none could test."""
    if not entries:
        return Rows("untested", "no graph was captured that could be tried with other padding")
    if not any(entry.inputs.has_rows for entry in entries):
        return Rows("no batch dimension")
    proofs = [entry.proof for entry, one in zip(entries, replays, strict=True) if one.serves < one.size]
    known = [proof for proof in proofs if proof is not None]
    for proof in known:
        if not proof.independent:
            return Rows("dependent", proof.text, proof.perturbation, proof.what)
    if not known or any(not proof.is_complete for proof in known):
        return Rows("untested", next((proof.text for proof in known if not proof.is_complete), _NONE_PADDED))
    return Rows("independent", next((proof.text for proof in known if not proof.deterministic), ""))
