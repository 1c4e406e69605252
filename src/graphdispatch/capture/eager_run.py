"""The watched eager run that every capture and verification begins with; it also shows what no graph can hold."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import parametrize

from ..backends.operators import tensors_in
from ..call.signature import PLAIN_TENSORS
from ..call.spec import Leaves
from ..errors import CaptureError
from ..reasons import Reason
from ..state.guards import StateSnapshot, same_objects
from .effects import EffectRecorder, retry_once, undo
from .request import CaptureRequest, CaptureResult, failed_result

__all__ = ["EagerRun", "check_may_capture", "run_eagerly", "undo_run"]


@dataclass
class EagerRun:
    """One watched run on the real rows: its answer, what it wrote, and the random generator before and after."""

    answer: Any
    effects: EffectRecorder
    outputs: list[torch.Tensor]
    """Copies of the output tensors, in order."""
    written_inputs: dict[int, torch.Tensor]
    """Copies of the arguments that the run wrote to, by index in the request's input specs."""
    rng_before: Any
    rng_after: Any
    rebinds_state: bool
    """Whether an attribute or variable of the callable is another object than before the run."""


def run_eagerly(request: CaptureRequest) -> EagerRun | CaptureResult:
    """Run the call on the real rows, and watch what it writes.

    An error of the callable passes through. If the request does not want the effects, they are undone on every way out
    by an error. A ``CaptureResult`` says why there can be no graph: what the run overwrites could not be saved, or what
    it did could not be noted (no memory left).
    """
    before = request.backend.rng_state()
    attributes = request.guard.attributes()
    snapshot = request.guard.snapshot() if not request.keep_effects else None
    effects = EffectRecorder(request.options.state_limit_bytes, strict=not request.keep_effects)
    answer, has_run = None, False
    try:
        with effects:
            answer = request.call(request.values)
        has_run = True
        after = request.backend.rng_state()
        rebinds_state = not same_objects(attributes, request.guard.attributes())
        for region in effects.regions:
            region.after = region.read().clone()
        outputs = [tensor.detach().clone() for tensor in tensors_in(answer)]
        written = {i: t.detach().clone() for i, t in enumerate(request.arguments()) if effects.writes_to(t)}
    except BaseException as error:
        if not request.keep_effects:
            undo_run(request, effects, before, snapshot)
        if isinstance(error, Exception) and has_run:
            return failed_result(request, answer, error, "noting what the eager run did")
        if isinstance(error, Exception) and not request.keep_effects and effects.unsaved is not None:
            return failed_result(request, None, error, "saving what it overwrites")
        raise
    if snapshot is not None and rebinds_state:
        snapshot.restore()
    return EagerRun(answer, effects, outputs, written, before, after, rebinds_state)


def undo_run(
    request: CaptureRequest, effects: EffectRecorder, rng_before: Any, snapshot: StateSnapshot | None = None
) -> None:
    """Put back what a run wrote and rebound, and the random generator. Raises ``DeviceLostError``."""

    def put_back() -> None:
        if snapshot is not None:
            snapshot.restore()
        undo(effects.regions)
        request.backend.set_rng_state(rng_before)

    retry_once(put_back, request.backend)


def check_may_capture(request: CaptureRequest, eager: EagerRun) -> None:
    """Raise ``CaptureError`` if the eager run shows that no graph can hold the call.

    Call it before anything is run again: a run that cannot be undone must not be repeated.
    """
    unsaved = eager.effects.unsaved
    if isinstance(unsaved, CaptureError):
        raise unsaved
    if unsaved is not None:
        raise CaptureError(
            f"saving what the call overwrites failed: {unsaved}", request.backend.classify_error(unsaved)
        )
    if eager.rebinds_state or not request.guard.holds():
        raise CaptureError(
            "the call rebinds a parameter, buffer, attribute or captured variable (self.x = ..., self.n += 1); keep it "
            "in a tensor and write that in place (self.x.copy_(...)), or a graph would go on using the old value",
            Reason.STATE_REBOUND,
        )
    if getattr(parametrize, "_cache_enabled", 0):
        raise CaptureError(
            "parametrizations are cached (torch.nn.utils.parametrize.cached()), and a graph would go on reading the "
            "cached values; capture outside that block, for example with prewarm()",
            Reason.CAPTURE_UNSAFE,
        )
    if isinstance(request.values, Leaves) and not request.values.still_fit():
        raise CaptureError(
            "the call changes a dict or list that it was given (d[...] = ..., list.append), which a replay would leave "
            "as it is; return the new values instead",
            Reason.STATE_REBOUND,
        )
    for output in tensors_in(eager.answer):
        if output.requires_grad:
            raise CaptureError("an output requires a gradient; call under torch.no_grad()", Reason.NEEDS_GRADIENTS)
        if type(output) not in PLAIN_TENSORS or output.layout is not torch.strided:
            raise CaptureError(
                f"an output is a {type(output).__name__} with layout {output.layout}", Reason.OUTPUT_UNSUPPORTED
            )
