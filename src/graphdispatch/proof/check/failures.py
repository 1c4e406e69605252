"""Why a capture or a comparison failed: its reason, in words, with a remedy."""

import sys
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from ...errors import GraphDispatchError, ReplayError, VerificationError
from ...reasons import Reason
from ...runtime.flatten import FlatCall
from ...runtime.protocols import CaptureRequest, CaptureResult
from .piecewise import is_check_of_distribution, optimizer_within, places_within


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
    return CaptureResult(answer, None, reason, detail + advice(request, error, reason), error)


def running_frames() -> TracebackType | None:
    """The frames of the running call, as the traceback that an error raised here would bring out of it."""
    frame: FrameType | None = sys._getframe()
    found: TracebackType | None = None
    while frame is not None and frame.f_code is not FlatCall.__call__.__code__:
        found, frame = TracebackType(found, frame, frame.f_lasti, frame.f_lineno), frame.f_back
    return found


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
    missing = request.inputs.missing_entries(request.rows)
    if reason is Reason.VERIFICATION_FAILED and request.is_padded:
        return f"{missing}; call eval(), give a mask or a pad rule, or have a size for it (sizes=)"
    if reason not in _OF_A_MISSING_ENTRY:
        return ""
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
