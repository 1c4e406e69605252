"""One run of a program as the tests make it, ``judge(fn, make)``, and what makes its batch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from graphdispatch.backends.operators import storage_key, tensors_in
from graphdispatch.proof.rows.batches import BatchSpace
from graphdispatch.proof.rows.run import RowRun
from graphdispatch.proof.rows.verdict import Verdict
from graphdispatch.proof.watch.effects import EffectRecorder

D = 8
"""The width of a row."""
Batch = tuple[tuple[Any, ...], list[tuple[Tensor, dict[int, int]]]]
"""Arguments, and which dimensions of which tensors follow which axes."""


def by_rows(*tensors: Tensor, others: Sequence[Tensor] = ()) -> Batch:
    """Arguments of which some have rows, and no lengths."""
    return (*tensors, *others), [(one, {0: 0}) for one in tensors]


def floats(*shape: int) -> Callable[[int], Batch]:
    """What makes rows of numbers of a shape."""
    return lambda n: by_rows(torch.randn(n, *shape))


rows, sequences = floats(D), floats(5, D)


def ids(n: int) -> Batch:
    """Five numbers of tokens for each row."""
    return by_rows(torch.randint(0, 50, (n, 5)))


def rows_and_ids(n: int) -> Batch:
    """A number for each row."""
    return by_rows(torch.randn(n, D), torch.randint(0, 6, (n,)))


def rows_and_mask(n: int) -> Batch:
    """Sequences, and which of their tokens count."""
    mask = (torch.rand(n, 5) > 0.3).long()
    mask[:, 0] = 1
    return by_rows(torch.randn(n, 5, D), mask)


def grid(n: int, s: int) -> Batch:
    """Rows and a length."""
    x = torch.randn(n, s, D)
    return (x,), [(x, {0: 0, 1: 1})]


def watching(run: RowRun) -> AbstractContextManager[None]:
    """The block in which a callable runs once, watched as in a capture."""
    return EffectRecorder(1 << 30, strict=True).watching(run)


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
            left += [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values(), one.__dict__]
            left += [one.__globals__[n] for c in codes for n in c.co_names if n in one.__globals__]
        elif isinstance(one, MethodType):
            left += [one.__self__, one.__func__]
        elif hasattr(one, "__dict__"):
            left += [one.__dict__, getattr(type(one), "forward", None), type(one).__dict__.get("__call__")]
    return found


def judge(
    fn: Callable[..., Any],
    make: Callable[..., Batch] = rows,
    own: Sequence[int] = (7,),
    extents: Sequence[range] = (range(1, 65), range(1, 49), range(1, 33)),
) -> Verdict:
    """The verdict of one run on the batch that ``make`` gives for these extents."""
    args, followed = make(*own)
    run = RowRun(BatchSpace(extents[: len(own)], own), reached(fn, args))
    for tensor, dims in followed:
        run.follow(tensor, dims)
    with watching(run):
        out = fn(*args)
    return run.verdict(tensors_in(out))


def refusal(fn: Callable[..., Any], make: Callable[..., Batch] = rows, own: Sequence[int] = (7,)) -> str:
    """Why the program is not proven for all batches: where rows mix, what is unknown, or a restriction; else empty."""
    try:
        verdict = judge(fn, make, own)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    return verdict.mixes or verdict.unknown or "".join(map(str, verdict.space.restrictions))


def put(x: Tensor, place: Any, value: Any) -> Tensor:
    """A copy that has a value at a place."""
    y = x * 1
    y[place] = value
    return y


def of_batches(make: Callable[..., Batch], **tables: dict[str, Any]) -> dict[str, tuple[Any, Callable[..., Batch]]]:
    """The programs of some tables, each with what makes its batch."""
    return {f"{table}: {name}": (fn, make) for table, cases in tables.items() for name, fn in cases.items()}
