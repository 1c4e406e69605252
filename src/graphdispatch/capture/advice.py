"""What a user can do about a capture that failed, as far as the failed run shows."""

from collections.abc import Iterator
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import CaptureError
from ..reasons import Reason

if TYPE_CHECKING:
    from .request import CaptureRequest


_OF_A_MISSING_ENTRY = (
    Reason.CAPTURE_FAILED,
    Reason.OUTPUT_ROWS_UNKNOWN,
    Reason.REPLAY_FAILED,
    Reason.VERIFICATION_FAILED,
)


def advice(request: "CaptureRequest", error: Exception, reason: Reason) -> str:
    """A remedy, to be added to a refusal; empty if there is none to give."""
    if reason is Reason.CAPTURE_UNSAFE:
        return _nearest_break(request, error)
    parts = [_missing_entries(request)] if reason in _OF_A_MISSING_ENTRY else []
    if reason is Reason.VERIFICATION_FAILED:
        parts.append(_same_tensors(request))
    return "".join(parts)


def modules_within(error: BaseException) -> Iterator[nn.Module]:
    """The modules whose methods an error came through, from the innermost."""
    cause = error.__cause__ if isinstance(error, CaptureError) and error.__cause__ is not None else error
    for frame, _ in reversed(list(walk_tb(cause.__traceback__))):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module


def _nearest_break(request: "CaptureRequest", error: Exception) -> str:
    """The smallest module around what no graph can hold, under its name in the served one."""
    fn: Any = request.call.fn
    within = list(modules_within(error))
    outermost = within[-1] if within else None  # where a plain function calls the model
    root = next((one for one in (fn, getattr(fn, "__self__", None), outermost) if isinstance(one, nn.Module)), None)
    if root is None:
        return ""
    names = {module: name for name, module in root.named_modules() if name}
    name = next((names[module] for module in within if module in names), "")
    model = "model" if root is not outermost or root is fn else type(root).__name__
    mode = "" if request.is_piecewise else " with mode='PIECEWISE'"
    return f"; or break there: eager_break({model}.get_submodule({name!r})){mode}" if name else ""


def _missing_entries(request: "CaptureRequest") -> str:
    """Which tensors seem to follow the batch though ``dynamic`` does not name them."""
    specs, rows = request.inputs.specs, request.rows
    found = {s.name: s.shape.index(rows) for s in specs if not s.spans and rows > 1 and rows in s.shape}
    if not found or not any(spec.spans for spec in specs):
        return ""
    entries = ", ".join(f"{name!r}: {dim}" for name, dim in found.items())
    return f"; dynamic= may lack {entries}, since {', '.join(found)} had as many rows as the batch, {rows}"


def _same_tensors(request: "CaptureRequest") -> str:
    """Which arguments are one tensor: the callable may tell that, and a graph gets copies."""
    groups: dict[int, list[str]] = {}
    for spec in request.inputs.specs:
        groups.setdefault(id(request.values[spec.position]), []).append(spec.name)
    same = next((names for names in groups.values() if len(names) > 1), None)
    if same is None:
        return ""
    return f"; {', '.join(same)} are one tensor, and the graph has a copy for each: wrap a function that takes it once"
