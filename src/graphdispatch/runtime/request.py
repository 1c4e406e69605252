"""What a capture or a verification is given, and what it gives back: with a remedy where it failed."""

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..backends.base import Backend, Pool
from ..backends.operators import storage_key
from ..config import CUDAGraphOptions
from ..descriptors import REAL_ROWS, BatchDescriptor
from ..errors import GraphDispatchError, ReplayError, VerificationError
from ..modes import CUDAGraphMode
from ..proof.check.piecewise import is_check_of_distribution, optimizer_within, places_within
from ..proof.check.windows import storages_of
from ..proof.state.objects import CONSTANTS
from ..reasons import Reason
from .entry import CUDAGraphEntry
from .flatten import FlatCall
from .signature import Signature
from .static_inputs import StaticInputs

_log = logging.getLogger("graphdispatch")


@dataclass
class CaptureRequest:
    """What to capture or to verify: a callable on flat values, the real batch, and where the graph's parts go."""

    call: FlatCall
    values: Sequence[Any]
    rows: int
    size: int
    descriptor: BatchDescriptor
    mode: CUDAGraphMode
    key: Hashable
    inputs: StaticInputs
    signature: Signature
    pool: Pool
    backend: Backend
    options: CUDAGraphOptions
    peers: Sequence[CUDAGraphEntry] = ()
    """The graphs of other sizes of the same signature, in the present state of the callable."""
    tensors: Sequence[torch.Tensor] = ()
    """The tensors that the callable reaches."""
    follows_rows: bool = True
    """Whether a run is made whose rows are followed: it speaks for batches that are padded, and for other sizes."""
    keep_effects: bool = True
    """Whether the caller wants the call itself, with the effects of one run, or only the graph and no effects."""
    judges_gain: bool = False
    """Whether a new graph that replays slower than eager is given up."""
    real_rows: int | None = field(default_factory=REAL_ROWS.get)
    """How many rows of a batch that the caller has padded are real, if the caller says so."""
    clock: Callable[[], float] = time.perf_counter
    """The clock of the capture time, and of what is timed for the gain, in seconds."""

    @property
    def reach(self) -> set[int]:
        """The addresses of the storages that the callable reaches: see Note [windows] in ``proof/check/windows.py``."""
        return storages_of(self.tensors)

    @property
    def is_piecewise(self) -> bool:
        """Whether the user's marks break the capture into pieces."""
        return self.mode is CUDAGraphMode.PIECEWISE

    @property
    def roots(self) -> list[Any]:
        """Where the Python state of the call begins: the callable, and the arguments that are not copied."""
        copied = set(self.inputs.positions)
        kept = (value for place, value in enumerate(self.values) if place not in copied)
        return [self.call.fn, *(value for value in kept if not issubclass(type(value), CONSTANTS))]

    @property
    def is_padded(self) -> bool:
        """Whether the graph has more rows than the batch."""
        return self.rows != self.size

    @property
    def has_gaps(self) -> bool:
        """Whether an argument leaves gaps in memory, which its static buffer does not: code may ask for that."""
        return not all(spec.is_dense for spec in self.inputs.specs)

    def real_rows_of(self, value: torch.Tensor) -> torch.Tensor:
        """The real rows of an output or argument, if the caller padded the batch and said how many are real: of what
        has as many rows as the descriptor has tokens. Else all of it."""
        rows, padded = self.real_rows, self.descriptor.num_tokens
        is_padded_by_caller = rows is not None and not self.inputs.has_rows
        if is_padded_by_caller and value.dim() and value.shape[0] == padded:
            return value[:rows]
        return value

    def arguments(self) -> list[torch.Tensor]:
        """The call's tensors that are copied to static inputs, in the order of ``inputs.specs``."""
        return [self.values[spec.position] for spec in self.inputs.specs]

    def values_with(self, copied: Iterable[Any]) -> list[Any]:
        """The call's values, with ``copied`` in the places of the tensors that are copied to static inputs."""
        values = list(self.values)
        for spec, value in zip(self.inputs.specs, copied, strict=False):
            values[spec.position] = value
        return values

    def static_values(self) -> list[Any]:
        """The call's values, with each copied tensor replaced by its static buffer."""
        return self.values_with(self.inputs.views(self.size))

    def buffer_storages(self) -> set[int]:
        """The keys of the storages of the static buffers."""
        return set(map(storage_key, self.inputs.views(self.size)))


@dataclass
class CaptureResult:
    """What a capture or a verification gave: eager's answer, and an entry or the reason why there is none."""

    answer: Any
    entry: CUDAGraphEntry | None
    reason: Reason
    detail: str = ""
    error: BaseException | None = None


def failed_result(request: CaptureRequest, answer: Any, error: Exception, stage: str) -> CaptureResult:
    """The result of a capture or verification that failed with ``error`` during ``stage``.

    Raises ``DeviceLostError``.
    """
    request.backend.raise_if_lost(error)
    reason = request.backend.classify_error(error)
    if isinstance(error, VerificationError):
        reason = Reason.VERIFICATION_FAILED
    elif isinstance(error, ReplayError):
        reason = Reason.REPLAY_FAILED
    detail = str(error) if isinstance(error, GraphDispatchError) else f"{type(error).__name__}: {error}"
    detail = f"{detail} (while {stage})" if stage else detail
    detail += advice(request, error, reason)
    _log.debug("no graph for %s: %s", request.key, detail)
    return CaptureResult(answer, None, reason, detail, error)


_OF_A_MISSING_ENTRY = (
    Reason.CAPTURE_FAILED,
    Reason.OUTPUT_ROWS_UNKNOWN,
    Reason.REPLAY_FAILED,
    Reason.VERIFICATION_FAILED,
)


def advice(request: CaptureRequest, error: Exception, reason: Reason) -> str:
    """A remedy, to be added to a refusal; empty if there is none to give."""
    if reason is Reason.CAPTURE_UNSAFE and is_check_of_distribution(error):
        return "; or leave the check out: torch.distributions.Distribution.set_default_validate_args(False)"
    if reason is Reason.CAPTURE_UNSAFE:
        return _other_optimizer(request, error) or _nearest_break(request, error)
    if (
        reason is Reason.VERIFICATION_FAILED
        and request.is_padded
        and not isinstance(error.__cause__, VerificationError)
    ):
        return f"{_missing_entries(request)}; call eval(), give a mask or a pad rule, or have a size for it (sizes=)"
    missing = _missing_entries(request) if reason in _OF_A_MISSING_ENTRY else ""
    if request.is_padded and not missing and reason in (Reason.CAPTURE_FAILED, Reason.REPLAY_FAILED):
        return "; if that is for padding rows, give them a rule (pad=), or have a size for the batch (sizes=)"
    return missing


def _other_optimizer(request: CaptureRequest, error: Exception) -> str:
    """How to make the optimizer whose step no graph can hold, where its class has such a way."""
    optimizer = optimizer_within(error)
    if optimizer is None:
        return ""
    wanted = {"fused": True} if request.backend.device_type == "cpu" else {"capturable": True}
    name = f"{type(optimizer).__name__}({', '.join(f'{key}={value}' for key, value in wanted.items())})"
    if any(optimizer.defaults.get(key, True) for key in wanted):
        return ""
    return f"; make the optimizer as {name}"


def _nearest_break(request: CaptureRequest, error: Exception) -> str:
    """The smallest method or module around what no graph can hold, under its name in the served one."""
    fn: Any = request.call.fn
    within = list(places_within(error))
    if not within:
        return ""
    outermost = within[-1][0]  # where a plain function calls the model
    root = next((one for one in (fn, getattr(fn, "__self__", None)) if isinstance(one, nn.Module)), outermost)
    found = {module: name for name, module in root.named_modules()}
    served = {"forward", getattr(fn, "__name__", "forward")}
    place = next(((m, method) for m, method in within if m in found and (found[m] or method not in served)), None)
    if place is None:
        return ""
    module, method = place
    model = "model" if root is not outermost or root is fn else type(root).__name__
    part = f"{model}.get_submodule({found[module]!r})" if found[module] else model
    part += f", {method!r}" if method != "forward" else ""
    mode = "" if request.is_piecewise else " with mode='PIECEWISE'"
    return f"; or break there: eager_break({part}){mode}"


def _missing_entries(request: CaptureRequest) -> str:
    """Which tensors seem to follow the batch though ``dynamic`` does not name them."""
    specs, rows = request.inputs.specs, request.rows
    found = {s.name: s.shape.index(rows) for s in specs if not s.spans and rows > 1 and rows in s.shape}
    if not found or not any(spec.spans for spec in specs):
        return ""
    entries = ", ".join(f"{name!r}: {dim}" for name, dim in found.items())
    return f"; dynamic= may lack {entries}, since {', '.join(found)} had as many rows as the batch, {rows}"
