"""The self-test of the CPU tape's extension: operators by the tape and by Python with equal bits."""

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["find_fault"]

_Step = tuple[OpOverload, tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...] | None]


def find_fault(module: ModuleType) -> str:
    """What the tape of this extension does otherwise than Python; empty if nothing. Draws no random numbers."""
    called: list[str] = []
    with torch.inference_mode(False), torch.no_grad():
        steps, got = _program()
        tape = module.Tape(print, print)
        for func, args, kwargs, outs in steps:
            if not tape.add(print, func._schema.name, func._schema.overload_name, args, kwargs, outs):
                return f"it does not take {func}"
        tape.add_call(partial(called.append, "called"))
        for _ in range(2):
            tape.replay()
        steps, want = _program()
        for _ in range(2):
            _run(steps)
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            if not torch.equal(a, b):
                return f"tensor {index} differs"
        if called != ["called"] * 2:
            return "a Python call did not run"
        return ""


def _program() -> tuple[list[_Step], list[torch.Tensor]]:
    """Operators over new tensors, and the tensors that they write."""
    aten, x, index = torch.ops.aten, torch.arange(6.0).reshape(2, 3), torch.tensor([1, 0])
    product, total, wide = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 6)
    double, most, where = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    sums, rows = torch.zeros(2, 1), torch.ones(2, 3)
    steps: list[_Step] = [
        (aten.mul.out, (x, 2.5), {"out": product}, None),
        (aten.add.out, (product, rows), {"alpha": 3, "out": total}, None),
        (aten.cat.out, ([product, total], 1), {"out": wide}, None),
        (aten.index_put_.default, (rows, [index, None], product), {}, None),
        (aten.sum.IntList_out, (wide, [1], True), {"dtype": torch.float32, "out": sums}, None),
        (aten._to_copy.default, (total,), {"dtype": torch.float64}, (double,)),
        (aten.max.dim, (total, 1), {}, (most, where)),
        (aten.add_.Tensor, (rows, 1), {}, None),
    ]
    return steps, [product, total, wide, double, most, where, sums, rows]


def _run(steps: list[_Step]) -> None:
    for func, args, kwargs, outs in steps:
        result = func(*args, **kwargs)
        if outs is not None:
            for out, value in zip(outs, result if isinstance(result, tuple) else (result,), strict=True):
                out.copy_(value)
