"""``audit``: everything that graphs would do with a callable, found out before it serves.

Two watched eager runs tell what it does. Captures that are thrown away tell whether graphs can hold it, and whether its
rows are independent. Whatever any run writes, rebinds or draws is put back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..api.graphed import Graphed
from ..capture.collector import swept_collector
from ..config import CUDAGraphOptions, parse_mode
from ..errors import ConfigError
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..sizes import named_sizes
from .result import Audit, BreakSet, Rows
from .runs import AuditedCall, WatchedRuns, watch_runs
from .trial import Trial, try_captures

__all__ = ["audit"]

_MANY_BREAKS = 64
_MOST_ROWS = 16


def audit(
    fn: Callable[..., Any],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Mapping[str, int] | None = None,
    sizes: Any = None,
    **options: Any,
) -> Audit:
    """What graphs would do with ``fn(*args, **kwargs)``: whether they can hold it, and everything that stands against.

    ``args`` are the positional arguments of one call: a tuple or list, one tensor alone, or a mapping, which is taken
    for keyword arguments as ``calibrate`` takes them. ``dynamic`` names the batch dimensions (default: dimension 0 of
    the first tensor, and of all that are as long there). ``sizes`` are captured (default: the powers of two up to the
    call's rows, at least 2 and at most 16). Other ``options`` go to ``graphed``: ``pad=``, ``static=``, ``mode=``, ...

    The callable runs a few dozen times; nobody else must use it meanwhile. Afterwards its tensors, its Python state and
    the random generators of torch, Python and NumPy are as before. An error that the callable raises for this very call
    passes through unchanged; ``ConfigError`` is for arguments that cannot be. What else goes wrong is in the result.
    """
    fn = fn.unwrap() if isinstance(fn, Graphed) else fn
    if not callable(fn):
        raise ConfigError(f"fn must be callable, got {fn!r}")
    args, kwargs = _spelled(args, {} if kwargs is None else kwargs)
    chosen = CUDAGraphOptions.or_default(options.get("options"), "options")
    mode = parse_mode(options.get("mode", CUDAGraphMode.FULL))
    call = AuditedCall(fn, args, kwargs, dynamic, chosen.state_limit_bytes)
    guessed = named_sizes("pow2", min(max(call.rows, 2), _MOST_ROWS))
    once = chosen.replace(gc_disable=False)  # one sweep for all captures together
    settings = options | {"dynamic": call.dims, "sizes": guessed if sizes is None else sizes, "options": once}
    pieces = None
    try:
        with torch.no_grad(), swept_collector(chosen.gc_disable):
            runs = watch_runs(call, piecewise=mode.has_piecewise_cudagraphs())
            call.state.restore(generators=True)
            call.state.restore(generators=True)
            trial = try_captures(fn, args, kwargs, settings)
            if chosen.breaks == "auto":
                pieces = trial
            elif Reason.CAPTURE_UNSAFE in trial.failures:
                auto = {"options": once.replace(breaks="auto", max_breaks=_MANY_BREAKS)}
                pieces = try_captures(fn, args, kwargs, settings | auto)
    finally:
        call.state.restore(generators=True)
    return _audit(call, mode, runs, trial, pieces)


def _audit(call: AuditedCall, mode: CUDAGraphMode, runs: WatchedRuns, trial: Trial, pieces: Trial | None) -> Audit:
    """What was found; ``pieces`` are the captures with automatic breaks, if there were any."""
    measured = trial if pieces is None or pieces.failures else pieces
    return Audit(
        name=call.name,
        device=str(call.backend.device),
        mode=mode.name,
        rows=call.rows,
        dynamic=dict(call.dims),
        capturable=not (runs.failures or trial.failures or (runs.forbidden and pieces is not trial)),
        failures=_failures(runs, trial),
        operators=sum(operation.works for operation in runs.operations),
        forbidden=runs.forbidden,
        reads=runs.reads,
        writes=runs.writes,
        rebinds=runs.rebinds,
        guarded=runs.guarded,
        frozen=runs.frozen,
        breaks=_break_set(call, runs, trial, pieces),
        independence=_independence(runs, measured),
        replays=tuple(measured.replays),
        pool_bytes=measured.pool_bytes,
        input_bytes=measured.input_bytes,
    )


def _spelled(args: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments of the call, from one of the ways to give them."""
    if isinstance(args, Mapping):
        return (), {**args, **kwargs}
    if isinstance(args, torch.Tensor):
        return (args,), dict(kwargs)
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise ConfigError(
            "args must be a tuple of positional arguments or a mapping of keyword arguments, and kwargs a mapping; got "
            f"{type(args).__name__} and {type(kwargs).__name__}"
        )
    return tuple(args), dict(kwargs)


def _independence(runs: WatchedRuns, trial: Trial) -> Rows:
    """A padded graph that differs from eager is another proof, as long as equal calls do the same."""
    text = trial.failures.get(Reason.VERIFICATION_FAILED, "") if trial.failed_padded and runs.repeats else ""
    return Rows("dependent", text) if text else trial.rows


def _failures(runs: WatchedRuns, trial: Trial) -> tuple[str, ...]:
    """Each once. What the watched run says of all forbidden operators is not said again of the first."""
    known = {Reason.CAPTURE_UNSAFE: Reason.CAPTURE_UNSAFE.text} if runs.forbidden else {}
    texts = [known.get(reason, text) for reason, text in trial.failures.items()]
    return tuple(dict.fromkeys([*runs.failures, *texts]))


def _break_set(call: AuditedCall, runs: WatchedRuns, trial: Trial, pieces: Trial | None) -> BreakSet | None:
    """The outermost of the modules that captures broke at, and what that gains; without such captures, of the modules
    that do what CUDA forbids. None if there is nothing to break at."""
    if pieces is None:
        broken = [found.module for found in runs.forbidden if found.module not in ("", call.served)]
    else:
        broken = [call.modules[id(module)] for module in pieces.broken]
    if not broken and (pieces is None or pieces is trial):
        return None
    working = [operation for operation in runs.operations if operation.works]
    inside = [operation for operation in working if not set(broken).isdisjoint(operation.modules)]
    share = 1 - len(inside) / max(len(working), 1)
    inner = {name for operation in runs.operations for name in _below(operation.modules, broken)}
    modules = tuple(name for name in dict.fromkeys(broken) if name not in inner)
    graphs = max((replay.graphs for replay in pieces.replays), default=0) if pieces is not None else 0
    failures = (trial if pieces is None else pieces).failures
    failure = next(iter(failures.values()), "")
    if Reason.CAPTURE_UNSAFE in failures:
        where = f"; {failure}" if modules else ", but a function around it can be marked with eager_break"
        failure = f"what stands against lies in no module that could run eagerly by itself{where}"
    return BreakSet(modules, share, graphs, failure)


def _below(modules: Sequence[str], broken: Sequence[str]) -> Sequence[str]:
    """The modules of a stack that run inside a broken one."""
    outermost = next((at for at, name in enumerate(modules) if name in broken), len(modules))
    return modules[outermost + 1 :]
