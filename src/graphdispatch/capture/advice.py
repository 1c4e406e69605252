"""What a user can do about a capture that failed, as far as the failed run shows."""

from collections.abc import Iterator
from inspect import getattr_static
from traceback import walk_tb
from types import FunctionType
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


def places_within(error: BaseException) -> Iterator[tuple[nn.Module, str]]:
    """The methods of modules that an error came through, from the innermost; ``"forward"`` for a whole module."""
    cause = error.__cause__ if isinstance(error, CaptureError) and error.__cause__ is not None else error
    for frame, _ in reversed(list(walk_tb(cause.__traceback__))):
        code = frame.f_code
        module, name = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None, code.co_name
        if isinstance(module, nn.Module) and (found := getattr_static(type(module), name, None)) is not None:
            is_method = isinstance(found, FunctionType) and name not in _OF_ANY_CALL
            yield module, name if is_method else "forward"


_OF_ANY_CALL = frozenset(name for name in vars(nn.Module) if callable(getattr(nn.Module, name)))
"""What every module has: marking these would mark no part of a model."""


def _nearest_break(request: "CaptureRequest", error: Exception) -> str:
    """The smallest method or module around what no graph can hold, under its name in the served one."""
    fn: Any = request.call.fn
    within = list(places_within(error))
    outermost = within[-1][0] if within else None  # where a plain function calls the model
    root = next((one for one in (fn, getattr(fn, "__self__", None), outermost) if isinstance(one, nn.Module)), None)
    if root is None:
        return ""
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
