"""What a capture or a verification is given and gives back, and the watched eager run that both begin with."""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten

from ..backends.base import Backend, Pool
from ..call.signature import PLAIN_TENSORS
from ..call.spec import Leaves
from ..config import CUDAGraphOptions
from ..descriptors import BatchDescriptor
from ..errors import CaptureError, ConfigError, GraphDispatchError, ReplayError, VerificationError
from ..memory.buffers import OutputBuffers
from ..memory.entry import CUDAGraphEntry
from ..memory.inputs import StaticInputs
from ..memory.outputs import OutputRule
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..state.guards import StateGuard, same_objects
from .autobreak import AutoBreaks
from .effects import EffectRecorder, retry_once, undo

__all__ = ["CaptureRequest", "CaptureResult", "EagerRun", "failure", "keep_small", "refusal_of", "run_eagerly"]

_SMALL_BYTES = 1 << 20
_log = logging.getLogger("graphdispatch")


@dataclass
class CaptureRequest:
    """What to capture, or to verify: a callable on flat values, the real batch, and where the graph's parts go."""

    call: Callable[[Sequence[Any]], Any]
    values: Sequence[Any]
    rows: int
    size: int
    descriptor: BatchDescriptor
    mode: CUDAGraphMode
    key: Hashable
    inputs: StaticInputs
    pool: Pool
    backend: Backend
    options: CUDAGraphOptions
    guard: StateGuard
    rule: OutputRule | None = None
    """How outputs follow the batch, if a former capture of the same signature learnt it."""
    buffers: OutputBuffers | None = None
    """Where copies of outputs go, if they go to preallocated memory."""
    auto_breaks: AutoBreaks | None = None
    """The modules to break at, to which a failed capture adds; None if only marks count."""
    keep_effects: bool = True
    """Whether the caller wants the call itself (one execution's effects) or only the graph (none)."""

    def static_values(self) -> list[Any]:
        """The call's values with every copied tensor replaced by its static buffer."""
        values = list(self.values)
        for spec, view in zip(self.inputs.specs, self.inputs.views(self.size), strict=True):
            values[spec.position] = view
        return values


@dataclass
class CaptureResult:
    """What came of it: eager's answer always; an entry, or the reason why there is none."""

    result: Any
    entry: CUDAGraphEntry | None
    reason: Reason
    detail: str = ""
    error: BaseException | None = None

    def answer(self) -> Any:
        """The result. Lets go of the error: its traceback leads back to the frame that holds this, with the batch."""
        self.error = None
        return self.result


@dataclass
class EagerRun:
    """One watched run on the real rows: its answer, what it wrote, and the generator before and after."""

    result: Any
    effects: EffectRecorder
    tensors: list[torch.Tensor]
    written_inputs: dict[int, torch.Tensor]
    """What the arguments that it writes (by index in the inputs' specs) held after it."""
    rng_before: Any
    rng_after: Any
    rebinds: bool
    """Whether it left another object in an attribute, dict or list than was there before."""

    @property
    def drew_nothing(self) -> bool:
        """Whether the default random generator is where it was."""
        return torch.equal(self.rng_before, self.rng_after)


def run_eagerly(request: CaptureRequest) -> EagerRun | CaptureResult:
    """The watched run; an error of the callable passes through. A run whose effects are not wanted is undone on the
    way out. A ``CaptureResult`` is why there can be no graph: what the run wrote could not be saved, or what it did
    could not be noted (no memory left)."""
    before = request.backend.rng_state()
    attributes = request.guard.attributes()
    effects = EffectRecorder(request.options.state_limit_bytes, strict=not request.keep_effects)

    def take_back() -> None:
        if not request.keep_effects:
            undo(effects.regions)
            request.backend.set_rng_state(before)

    try:
        with effects:
            result = request.call(request.values)
    except BaseException as error:
        retry_once(take_back, request.backend)
        if effects.unsaved is not None and not request.keep_effects and isinstance(error, Exception):
            return failure(request, None, error, "saving what it overwrites")
        raise
    try:
        after = request.backend.rng_state()
        rebinds = not same_objects(attributes, request.guard.attributes())
        for region in effects.regions:
            region.keep_after()
        tensors = [t.detach().clone() for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        arguments = [request.values[spec.position] for spec in request.inputs.specs]
        written = {i: t.detach().clone() for i, t in enumerate(arguments) if effects.writes_to(t)}
    except BaseException as error:
        retry_once(take_back, request.backend)
        if isinstance(error, Exception):
            return failure(request, result, error, "noting what the eager run did")
        raise
    return EagerRun(result, effects, tensors, written, before, after, rebinds)


def failure(request: CaptureRequest, result: Any, error: Exception, stage: str) -> CaptureResult:
    """The outcome of a capture or verification that failed while it did ``stage``. Raises ``DeviceLostError``, and a
    ``ConfigError`` for what the user gave (``out=``), which no later try would mend."""
    request.backend.raise_if_lost(error)
    if isinstance(error, ConfigError):
        raise error
    reason = error.reason if isinstance(error, CaptureError) else request.backend.classify_error(error)
    if isinstance(error, VerificationError):
        reason = Reason.VERIFICATION_FAILED
    elif isinstance(error, ReplayError):
        reason = Reason.REPLAY_FAILED
    detail = str(error) if isinstance(error, GraphDispatchError) else f"{type(error).__name__}: {error}"
    detail = f"{detail} (while {stage})" if stage else detail
    _log.debug("no graph for %s: %s", request.key, detail)
    return CaptureResult(result, None, reason, detail, error)


def refusal_of(request: CaptureRequest, eager: EagerRun) -> CaptureError | None:
    """Why this call must not be captured, seen from its eager run."""
    unsaved = eager.effects.unsaved
    if unsaved is not None:
        if isinstance(unsaved, CaptureError):
            return unsaved
        return CaptureError(
            f"saving what the call overwrites failed: {unsaved}", request.backend.classify_error(unsaved)
        )
    if eager.rebinds or not request.guard.holds():
        return CaptureError(
            "the call rebinds a parameter, buffer, attribute or captured variable (self.x = ..., self.n += 1); keep it "
            "in a tensor and write that in place (self.x.copy_(...)), or a graph would go on using the old value",
            Reason.STATE_REBOUND,
        )
    if getattr(parametrize, "_cache_enabled", 0):
        return CaptureError(
            "parametrizations are cached (torch.nn.utils.parametrize.cached()), and a graph would go on reading what "
            "is cached now; capture outside of it, as by prewarm()",
            Reason.CAPTURE_UNSAFE,
        )
    if isinstance(request.values, Leaves) and not request.values.still_fit():
        return CaptureError(
            "the call changes a dict or list that it was given (d[...] = ..., list.append), which a replay would leave "
            "as it is; return the new values instead",
            Reason.STATE_REBOUND,
        )
    for leaf in tree_flatten(eager.result)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return CaptureError("an output requires a gradient; call under torch.no_grad()", Reason.NEEDS_GRADIENTS)
        if isinstance(leaf, torch.Tensor) and (type(leaf) not in PLAIN_TENSORS or leaf.layout is not torch.strided):
            return CaptureError(f"an output is a {type(leaf).__name__}, {leaf.layout}", Reason.OUTPUT_UNSUPPORTED)
    return None


def keep_small(value: Any) -> Any:
    """A copy of an argument by which the next batch can be told from this one; None for anything but small tensors."""
    small = isinstance(value, torch.Tensor) and value.nbytes <= _SMALL_BYTES
    return value.detach().clone() if small else None
