"""Entries used directly: the checks of inputs that are given by name, and their replay."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from ..backends.operators import is_strided
from ..call.inputs import InputSpec
from ..call.spec import is_tensor
from ..errors import GuardError, ReplayError
from ..reasons import Reason

if TYPE_CHECKING:
    from .entry import CUDAGraphEntry

__all__ = ["check_inputs", "mismatch", "replay"]


def replay(entry: "CUDAGraphEntry", inputs: Mapping[str, torch.Tensor] | None) -> Any:
    """``CUDAGraphEntry.replay``."""
    _refuse_unserved(entry)
    if inputs is None:
        return entry.plan(entry.size).run(None, entry.stats)
    values, rows = check_inputs(entry, inputs)
    if entry.depends_on_padding(rows) and entry.proof is not None:
        raise ReplayError(f"{rows} rows in a graph of {entry.size}: {entry.proof.text}")
    is_as_proven = rows == entry.size or entry.proof is None or entry.proof.holds_for(values)
    if not (entry.may_pad(rows) and is_as_proven):
        raise ReplayError(
            f"{rows} rows in a graph of {entry.size}: {Reason.PADDING_UNPROVEN.text}; or serve the batch through "
            "the wrapper, manager or dispatcher that has the graph, which compares it"
        )
    return entry.serve_timed(values, rows, entry.stats)


def _refuse_unserved(entry: "CUDAGraphEntry") -> None:
    """Raise ``ReplayError`` if no batch may be replayed now, whatever it holds."""
    if entry.backend.is_watched():
        raise ReplayError(Reason.INSIDE_CAPTURE.text)
    if not entry.fits_modes():
        raise ReplayError(Reason.MODE_ACTIVE.text)
    if forward_ad._current_level >= 0:
        raise ReplayError(f"forward-mode differentiation is under way: {Reason.NEEDS_GRADIENTS.text}")
    if not entry.is_current():
        raise ReplayError(f"weights or captured variables of the graph for {entry.key} moved; capture it again")
    if entry.replay_count >= entry.verify_at:
        raise ReplayError(
            f"the graph for {entry.key} must be compared with eager now (verify_every); serve a batch through the "
            "wrapper, manager or dispatcher that has it"
        )


def check_inputs(entry: "CUDAGraphEntry", inputs: Mapping[str, Any]) -> tuple[Sequence[Any], int]:
    """``CUDAGraphEntry.check``."""
    if not isinstance(inputs, Mapping):
        raise GuardError(f"inputs must be a mapping from name to tensor, got a {type(inputs).__name__}")
    names = [spec.name for spec in entry.inputs.specs]
    values = list(entry.example)
    if len(inputs) != len(names) or not set(names) <= inputs.keys():
        places = {leaf.path: place for place, leaf in enumerate(entry.call.leaves)} if entry.call is not None else {}
        if not set(names) <= set(inputs) <= {*names, *places}:
            raise GuardError(f"inputs must be named {names}, got {list(inputs)}")
        for name in set(inputs) - set(names):
            values[places[name]] = inputs[name]
    rows = -1
    for spec in entry.inputs.specs:
        tensor = values[spec.position] = inputs[spec.name]
        rows = _rows_of(spec, tensor, rows)
    if rows < 0:
        rows = entry.size
    if not 1 <= rows <= entry.size:
        raise GuardError(f"inputs must have 1 to {entry.size} rows for this graph, got {rows}")
    clash = entry.plan(rows).clash(values)
    if clash is not None:
        raise GuardError(f"{clash}; pass copies")
    if entry.carries(values):
        raise GuardError("an input carries attributes that the captured code may read; pass them as arguments")
    if entry.told is not None and not entry.told.knows(values):
        raise GuardError(f"{entry.told.text}, and capture with a call like this one")
    if entry.signature is not None and not entry.signature.fits(values):
        raise GuardError(
            "the call differs from the captured one: in autocast, a constant, the address of a static tensor, or "
            "the memory layout of an input; capture again for such calls"
        )
    return values, rows


def mismatch(entry: "CUDAGraphEntry", values: Sequence[Any]) -> str:
    """What is wrong with a call whose values do not fit, as a sentence."""
    try:
        check_inputs(entry, {spec.name: values[spec.position] for spec in entry.inputs.specs})
    except GuardError as error:
        return str(error)
    return "a constant, a static tensor or the spelling of the call is not that of the captured one"


def _rows_of(spec: InputSpec, tensor: Any, rows: int) -> int:
    """The rows of a call, as far as an input tells (-1: not yet). Raises ``GuardError`` if it does not fit."""
    if not is_tensor(tensor) or not is_strided(tensor):
        got = tensor.layout if is_tensor(tensor) else type(tensor).__name__
        raise GuardError(f"input {spec.name!r} must be a strided tensor, got {got}; pass a dense tensor")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise GuardError(
            f"input {spec.name!r} requires a gradient, which no graph gives; use torch.no_grad() or detach() it"
        )
    if spec.spans and rows < 0 and tensor.dim() == len(spec.shape):
        rows = tensor.shape[spec.spans[0][0]]
    wanted = spec.sized(max(rows, 0))
    if tensor.shape != wanted or tensor.dtype is not spec.dtype or tensor.device != spec.device:
        raise GuardError(
            f"input {spec.name!r} must have shape {wanted}, {spec.dtype} on {spec.device}, "
            f"got {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}; cast or reshape it, or capture anew"
        )
    return rows
