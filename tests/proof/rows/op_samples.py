"""Torch's own samples of its operators as an oracle for the rules: ``python -m tests.proof.rows.op_samples [SECONDS]``.

One dimension of one tensor of a sample follows the rows. Where the labels say that an element belongs to a row, it
keeps its value when another row changes; where they say that it belongs to none, it keeps its value anyway.
"""

import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from graphdispatch.backends.operators import storage_key, tensors_in
from graphdispatch.proof.rows import rules
from graphdispatch.proof.rows.batches import BatchSpace
from graphdispatch.proof.rows.labels import Label, own_size, plain_dims
from graphdispatch.proof.rows.run import RowRun

from .runs import watching

MOST_ROWS = 64
_UNWRITTEN = "empty"
"""In the names of operators that give memory which nothing wrote."""


class Case(NamedTuple):
    """One sample of an operator, and the dimension of one of its tensors that follows the rows."""

    name: str
    op: Callable[..., Any]
    sample: Any
    target: Tensor
    dim: int


def operators() -> list[Any]:
    """All operators of torch's own tests."""
    sys.modules.setdefault(
        "expecttest",
        types.SimpleNamespace(TestCase=object, assert_expected_inline=None),  # type: ignore[arg-type]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return list(op_db)


def cases(part: int = 0, parts: int = 1, most_samples: int = 10) -> Iterator[Case]:
    """The cases of every ``parts``-th operator."""
    for op in operators()[part::parts]:
        types_of = op.supported_dtypes("cpu")
        dtype = torch.float32 if torch.float32 in types_of else next(iter(sorted(types_of, key=str)), None)
        if dtype is None or _UNWRITTEN in op.name:
            continue
        torch.manual_seed(0)
        try:
            samples = list(op.sample_inputs("cpu", dtype))[:most_samples]
        except Exception:  # no samples for this build of torch
            continue
        for sample in samples:
            leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
            tensors = [t for t in leaves if isinstance(t, Tensor) and t.layout is torch.strided and t.numel()]
            for target in tensors[:3]:
                for dim in range(target.dim()):
                    if 2 <= target.shape[dim] <= MOST_ROWS:
                        yield Case(op.name, op.op, sample, target, dim)


def _copied(case: Case) -> tuple[tuple[Any, ...], Tensor]:
    copies: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return copies.setdefault(id(value), value.detach().clone(memory_format=torch.preserve_format))

    given = tuple(tree_map(copy, part) for part in (case.sample.input, case.sample.args, case.sample.kwargs))
    return given, copies[id(case.target)]


def _plain_run(case: Case, change: Callable[[Tensor], None]) -> list[Tensor]:
    (first, args, kwargs), target = _copied(case)
    torch.manual_seed(0)
    change(target)
    return tensors_in(case.op(first, *args, **kwargs))


def labelled_run(case: Case) -> list[Label] | None:
    """The labels of the results, if the run is not refused and speaks for all numbers of rows."""
    (first, args, kwargs), target = _copied(case)
    torch.manual_seed(0)
    space = BatchSpace([range(1, MOST_ROWS + 1)], [target.shape[case.dim]])
    run = RowRun(space, {storage_key(t) for t in tree_leaves((first, args, kwargs)) if isinstance(t, Tensor)})
    run.follow(target, {case.dim: 0})
    with watching(run):
        outs = tensors_in(case.op(first, *args, **kwargs))
    verdict = run.verdict(outs)
    if verdict.unknown or space.restrictions:
        return None
    return [run.label(out) or Label(plain_dims(out.shape)) for out in outs]


def _rows_of(label: Label, shape: torch.Size) -> Tensor:
    """The row of each element; -1: none."""
    for d, dim in enumerate(label.dims):
        place = next((i for i, atom in enumerate(dim) if type(atom) is not int), None)
        if place is None:
            continue
        view = [1] * len(shape)
        view[d] = shape[d]
        rows = torch.arange(shape[d]) // own_size(dim[place + 1 :]) % own_size(dim[place : place + 1])
        return rows.view(view).expand(shape)
    return torch.full(shape, -1)


def wrong(case: Case) -> str:
    """What the labels of a case promise that is not true; ``"refused"`` if they promise nothing; else empty."""
    try:
        labels = labelled_run(case)
    except Exception:  # torch's own
        return "refused"
    good = [i for i, label in enumerate(labels or ()) if label.fault is None and not label.is_lost]
    if not labels or not good:
        return "refused"
    base, rows = _plain_run(case, lambda x: None), case.target.shape[case.dim]
    for row in sorted({0, rows // 2, rows - 1}):
        for scale, shift in ((1.0, 0.0), (1.7, 0.3)):

            def change(x: Tensor, row: int = row, scale: float = scale, shift: float = shift) -> None:
                other = case.target.detach().select(case.dim, (row + 1) % rows)
                is_number = x.is_floating_point() or x.is_complex()
                x.select(case.dim, row).copy_(other * scale + shift if is_number else other)

            try:
                got = _plain_run(case, change)
            except Exception:  # its data is out of range now
                continue
            for i in good:
                if base[i].shape != got[i].shape:
                    return f"{case.name}: a shape that follows data"
                is_number = base[i].is_floating_point() or base[i].is_complex()
                same = torch.isclose(base[i], got[i], 1e-5, 1e-6, equal_nan=True) if is_number else base[i] == got[i]
                if bool(((_rows_of(labels[i], base[i].shape) != row) & ~same).any()):
                    where = f"{tuple(case.target.shape)}, dimension {case.dim}, row {row}"
                    return f"{case.name} of {where}: {str(case.sample.args)[:80]} {str(case.sample.kwargs)[:80]}"
    return ""


def main(seconds: float, part: int = 0, parts: int = 1) -> int:
    """Print what is wrong, and how many cases were row by row."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rules.IS_CHECKED = True  # of a torch that the rules were not checked with: it is checked now
    start, counts, found = time.monotonic(), {"": 0, "refused": 0}, 0
    names = set()
    for case in cases(part, parts):
        if time.monotonic() - start > seconds:
            print("not all")
            break
        outcome = wrong(case)
        counts[outcome if outcome in counts else ""] += 1
        if outcome not in counts:
            found += 1
            print("WRONG", outcome, flush=True)
        elif outcome == "":
            names.add(case.name)
    print(f"row by row {counts['']}, of {len(names)} operators; refused {counts['refused']}; wrong {found}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 1e9, *map(int, sys.argv[2:])))
