"""One run of a program as the tests make it: ``judge(fn, make)``."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from graphdispatch.backends.operators import storage_key
from graphdispatch.proof.rows.batches import BatchSpace
from graphdispatch.proof.rows.run import RowRun
from graphdispatch.proof.rows.verdict import Verdict
from graphdispatch.proof.watch.effects import EffectRecorder

Batch = tuple[tuple[Any, ...], dict[str, Any], list[tuple[Tensor, dict[int, int]]]]
"""Arguments, keywords, and which dimensions of which tensors follow which axes."""


def watching(run: RowRun) -> AbstractContextManager[None]:
    """The block in which a callable runs once, watched as in a capture."""
    return EffectRecorder(1 << 30, strict=True).watching(run)


def tensors_of(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    """The tensors of an answer in order."""
    seen = seen if seen is not None else set()
    if isinstance(value, Tensor):
        return [value]
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return []
    seen.add(id(value))
    value = value.to_tuple() if hasattr(value, "to_tuple") else value
    value = list(value.values()) if isinstance(value, dict) else value
    if isinstance(value, (list, tuple)):
        return [t for one in value for t in tensors_of(one, seen)]
    is_object = hasattr(value, "__dict__") and not callable(value)
    return [t for one in vars(value).values() for t in tensors_of(one, seen)] if is_object else []


def reached(*roots: Any) -> set[int]:
    """The memory of the tensors within reach."""
    seen: set[int] = set()
    found: set[int] = set()
    left: list[Any] = list(roots)
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (str, int, float, bytes, type(None), type, ModuleType)):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.add(storage_key(one))
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
        elif isinstance(one, FunctionType):
            left += [c.cell_contents for c in one.__closure__ or () if c != CellType()]
            codes = [one.__code__, *(c for c in one.__code__.co_consts if hasattr(c, "co_names"))]
            left += [*(one.__defaults__ or ()), one.__dict__]
            left += [one.__globals__[n] for c in codes for n in c.co_names if n in one.__globals__]
        elif isinstance(one, MethodType):
            left += [one.__self__, one.__func__]
        elif hasattr(one, "__dict__"):
            left += [one.__dict__, getattr(type(one), "forward", None), type(one).__dict__.get("__call__")]
    return found


def judge(
    fn: Callable[..., Any],
    make: Callable[..., Any],
    own: Sequence[int] = (7,),
    extents: Sequence[range] = (range(1, 65), range(1, 49), range(1, 33)),
) -> Verdict:
    """The verdict of one run on the batch that ``make`` gives for these extents."""
    args, kwargs, followed = make(*own)
    space = BatchSpace(extents[: len(own)], own)
    run = RowRun(space, reached(fn, args, kwargs))
    for tensor, dims in followed:
        run.follow(tensor, dims if isinstance(dims, dict) else {dims: 0})
    with watching(run):
        out = fn(*args, **kwargs)
    return run.verdict(tensors_of(out))


def refusal(fn: Callable[..., Any], make: Callable[..., Any], own: Sequence[int] = (7,)) -> str:
    """Why the program is not proven for all batches: where rows mix, what is unknown, or a restriction; else empty."""
    try:
        verdict = judge(fn, make, own)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    return (
        verdict.mixes or verdict.unknown or (str(verdict.space.restrictions[0]) if verdict.space.restrictions else "")
    )
