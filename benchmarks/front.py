"""What a ``graphed()`` call adds to the bare replay of the same entry, by number of inputs: native and in Python."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Graphed, graphed
from graphdispatch.native.bound import CORE
from graphdispatch.runtime.replay import ReplayPlan

from .timing import Effort, Row, compared, in_python, interleaved

__all__ = ["TITLE", "rows"]

TITLE = "graphed() call over bare replay"
_SIZE = 8
_INPUTS = (1, 4, 16)
_LAYERS = 20  # of two parameters each


class _PythonPlan(ReplayPlan):
    """A plan that runs in Python though there is a core."""

    __slots__ = ()
    run = ReplayPlan.run_in_python


class _Model(nn.Module):
    """The sum of its inputs, in a model of 40 parameters, two of which it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(_LAYERS))

    def forward(self, **tensors: Tensor) -> Tensor:
        """Any number of ``[rows, 16]`` -> ``[rows, 16]``."""
        first: Tensor = self.layers[0](sum(tensors.values(), torch.zeros(())))
        return first


def rows(effort: Effort) -> list[Row]:
    """1, 4 and 16 inputs; a full batch, and one with a row of padding; gradients off, and on as by default; then a
    model of 40 parameters."""
    found = []
    for inputs in _INPUTS:
        for count in (_SIZE, _SIZE - 1):
            for gradients in (False, True):
                found += _compared(inputs, count, gradients, _total, "", effort)
    for inputs in _INPUTS:
        found += _compared(inputs, _SIZE, True, _Model().eval(), ", 40 parameters", effort)
    return found


def _compared(
    inputs: int, count: int, gradients: bool, fn: Callable[..., Tensor], note: str, effort: Effort
) -> list[Row]:
    """The lines of one case: served by the core where there is one, and by Python."""
    case = (
        f"{inputs:2} inputs, {'exact' if count == _SIZE else 'padded'}, gradients {'on' if gradients else 'off'}{note}"
    )
    names = ["native", "Python"] if CORE is not None else ["Python"]
    with torch.set_grad_enabled(gradients):
        steps = [_settled(inputs, count, fn) for _ in names]
        served = [steps[0][0], _in_python(steps[-1][0])][-len(names) :]
        calls = [partial(step, **batch) for step, (_, batch) in zip(served, steps, strict=True)]
        *seconds, base = interleaved([*calls, steps[0][0].entries[0].graph.replay], effort.turns)
    return [compared(f"{case}: {name}", took, base) for name, took in zip(names, seconds, strict=True)]


def _total(**tensors: Tensor) -> Tensor:
    return sum(tensors.values(), torch.zeros(()))


def _settled(inputs: int, count: int, fn: Callable[..., Tensor]) -> tuple[Graphed[..., Tensor], dict[str, Tensor]]:
    """A served function whose next call of the batch is a hit."""
    names = [f"x{number}" for number in range(inputs)]
    step = graphed(fn, dynamic=dict.fromkeys(names, 0), sizes=(_SIZE,), options=CUDAGraphOptions(capture_after=1))
    for shift in range(5):
        batch = {name: torch.randn(count, 16) + shift for name in names}
        step(**batch)
    decision = step.last_decision
    assert decision is not None
    assert decision.reason.is_graph
    return step, batch


def _in_python(step: Graphed[..., Tensor]) -> Callable[..., Tensor]:
    """The same, each call of which is served in Python, as where there is no core."""
    entry = step.entries[0]
    for plan in entry._plans.values():
        plan.__class__ = _PythonPlan
    if entry.guard is not None:
        entry.guard.native, entry.guard._due = None, 0
    return in_python(step)
