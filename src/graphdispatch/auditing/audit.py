"""``audit``: what graphs would do with a callable, found out before it serves.

Watched eager runs tell what it does. Captures that are thrown away tell whether graphs can hold it, and whether its
rows are independent. Whatever any run writes, rebinds or draws is put back.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..api.graphed import Graphed, graphed
from ..config import CUDAGraphOptions, parse_mode
from ..errors import CaptureError, ConfigError, DeviceLostError
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..sizes import named_sizes
from .observe import Observer, proofs_of
from .result import Audit, Breaks, Rows
from .watch import Watched, watch

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

    The callable runs a few dozen times; nobody else may use it meanwhile. Afterwards its tensors, its Python state and
    random generators are as before. Its own error for this very call passes through; others are in the result.

    Args:
        fn: The callable, such as a module, a function or what ``graphed`` made.
        args: The positional arguments of a call: a tuple or list, one tensor alone, or a mapping of all arguments.
        kwargs: The keyword arguments.
        dynamic: The batch dimensions. Default: dimension 0 of the first tensor, and of all that are as long there.
        sizes: The sizes to capture. Default: the powers of two up to the call's rows, at least 2 and at most 16.
        options: Further options of ``graphed``, such as ``pad=``, ``static=`` or ``mode=``.

    Raises:
        ConfigError: Arguments that cannot be.
    """
    fn = fn.unwrap() if isinstance(fn, Graphed) else fn
    if not callable(fn):
        raise ConfigError(f"fn must be callable, got {fn!r}")
    args, kwargs = _call(args, {} if kwargs is None else kwargs)
    chosen = CUDAGraphOptions.or_default(options.get("options"), "options")
    mode = parse_mode(options.get("mode", CUDAGraphMode.FULL))
    observer = Observer(fn, args, kwargs, chosen.state_limit_bytes, skips_breaks=mode.has_piecewise_cudagraphs())
    dims, rows = _batch(observer.arguments, dynamic)
    sizes = named_sizes("pow2", min(max(rows, 2), _MOST_ROWS)) if sizes is None else sizes
    served = graphed(fn, **(options | {"dynamic": dims, "sizes": sizes, "strict": False}))
    try:
        with torch.no_grad():
            watched = watch(observer)  # what the first run alone makes, such as a table, stays for the captures
            failures, difference = _try_captures(served, args, kwargs)
        findings, memory = watched.findings, served.memory_report()
        if findings.forbidden and Reason.CAPTURE_UNSAFE in failures:  # said of each operator already
            failures[Reason.CAPTURE_UNSAFE] = Reason.CAPTURE_UNSAFE.text
        return Audit(
            name=fn.__qualname__ if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn).__qualname__,
            device=str(observer.backend.device),
            mode=mode.name,
            rows=rows,
            dynamic=dims,
            capturable=not (watched.failures or failures or findings.forbidden),
            failures=tuple(dict.fromkeys([*watched.failures, *failures.values()])),
            sizes=tuple(sorted({entry.size for entry in served.entries})),
            breaks=_breaks(served, observer, watched) if findings.forbidden else None,
            independence=_rows(served, observer, dims, difference if watched.repeats else ""),
            memory={
                "pool": memory.pool_bytes,
                "inputs": memory.input_bytes,
                "graphs": memory.entry_bytes + memory.driver_bytes,
            },
            **vars(findings),
        )
    finally:
        served.clear()
        observer.restore()


def _call(args: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def _batch(arguments: Mapping[str, Any], dynamic: Any) -> tuple[dict[str, int], int]:
    """The batch dimensions, as given or as guessed, and the rows of the first tensor that has one; 1 if none has."""
    shapes = {path: value.shape for path, value in arguments.items() if isinstance(value, torch.Tensor)}
    if dynamic is None:
        extent = next((shape[0] for shape in shapes.values() if shape), 0)
        dynamic = {path: 0 for path, shape in shapes.items() if shape and shape[0] == extent}
    if not isinstance(dynamic, Mapping) or not all(isinstance(dim, int) for dim in dynamic.values()):
        raise ConfigError(f"dynamic must map argument names to one dimension each, as {{'x': 0}}, got {dynamic!r}")
    for path, shape in shapes.items():
        dim = dynamic.get(path, dynamic.get(path.partition("[")[0]))
        if dim is not None and -len(shape) <= dim < len(shape):
            return dict(dynamic), shape[dim]
    return dict(dynamic), 1


def _try_captures(
    served: Graphed[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[Reason, str], str]:
    """Capture and check all sizes, as ``prewarm`` does. Returns each reason why some failed, with a text; and the text
    of a graph that pads batches and differed from eager.

    Raises ``ConfigError`` for rules that do not fit the call.
    """
    line = served.explain(*args, **kwargs)
    try:
        report = served.prewarm(*args, **kwargs)
    except DeviceLostError:
        raise
    except (CaptureError, ConfigError):  # the call can have no graph, whatever its size
        return {Reason.ARGUMENTS_CHANGED: line}, ""
    except Exception as error:
        return {Reason.CALL_RAISED: f"with another number of rows the call raises {type(error).__name__}: {error}"}, ""
    failures: dict[Reason, str] = {}
    difference = ""
    for size, why in report.left_out.items():
        reason, text = report.reasons[size], f"{report.mode.name} graph of {size} rows: {why}"
        failures.setdefault(reason, text)
        if reason is Reason.VERIFICATION_FAILED and size > 1 and size - 1 not in served.sizes:
            difference = text
    return failures, difference


def _rows(served: Graphed[..., Any], observer: Observer, dims: Mapping[str, int], difference: str) -> Rows:
    """What the proofs of all graphs that pad batches come to: the first that speaks against it. A padded graph that
    differs from eager does, too. Where there is no such graph, a run is followed."""
    if not dims:
        return Rows("no batch dimension")
    held = {(entry.mode, entry.size) for entry in served.entries}
    padded = [entry for entry in served.entries if entry.size > 1 and (entry.mode, entry.size - 1) not in held]
    proofs = proofs_of(padded)
    text = difference or next((proof.text for proof in proofs if not proof.independent), "")
    if text:
        found = [proof.refused or proof.against_rows for proof in proofs]
        is_unknown = not difference and all(one[0] is Reason.PADDING_UNPROVEN for one in found if one is not None)
        return Rows("unknown" if is_unknown else "dependent", text)
    return Rows("independent", proofs[0].text) if proofs else _rows_of_run(observer, dims)


def _rows_of_run(observer: Observer, dims: Mapping[str, int]) -> Rows:
    """What a run of a few rows shows, where no graph was captured that pads batches."""
    try:
        verdict = observer.follow_rows(dims)
    except DeviceLostError:
        raise
    except Exception as error:
        return Rows("untested", f"for a few rows the call raises {type(error).__name__}: {error}")
    if text := verdict.mixes or verdict.unknown:
        return Rows("dependent" if verdict.mixes else "unknown", text)
    return Rows("independent")


def _breaks(served: Graphed[..., Any], observer: Observer, watched: Watched) -> Breaks:
    """The outermost of the modules that do what CUDA forbids, but not the served one itself; and what that gains."""
    names, fn = observer.names, served.unwrap()
    root = (names.get(id(fn)), names.get(id(getattr(fn, "__self__", None))), "")
    found = [one.module for one in watched.findings.forbidden]
    broken = dict.fromkeys(name for name in found if name not in root)
    stacks = [event.modules for event in watched.operators if event.works]
    inner = {name for stack in stacks for at, name in enumerate(stack) if not broken.keys().isdisjoint(stack[:at])}
    share = sum(broken.keys().isdisjoint(stack) for stack in stacks) / max(len(stacks), 1)
    return Breaks(tuple(name for name in broken if name not in inner), share if broken else 0.0)
