"""What a ``graphed()`` call adds to the bare replay of the same entry, by number of inputs."""

from collections.abc import Callable

import torch
from torch import Tensor

from graphdispatch import graphed

from .timing import Effort, Row, row

__all__ = ["TITLE", "rows"]

TITLE = "graphed() call over bare replay"
_SIZE = 8
_INPUTS = (1, 4, 16)


def rows(effort: Effort) -> list[Row]:
    """1, 4 and 16 inputs; a full batch, and one with a row of padding."""
    found = []
    for inputs in _INPUTS:
        for count in (_SIZE, _SIZE - 1):
            call, replay = _settled(inputs, count)
            padding = "exact" if count == _SIZE else "padded"
            found.append(row(f"{inputs:2} inputs, {padding}", call, replay, effort.turns))
    return found


def _settled(inputs: int, count: int) -> tuple[Callable[[], object], Callable[[], object]]:
    names = [f"x{number}" for number in range(inputs)]

    def total(**tensors: Tensor) -> Tensor:
        return sum(tensors.values(), torch.zeros(()))

    step = graphed(total, dynamic=dict.fromkeys(names, 0), sizes=(_SIZE,), capture_after=1)
    for shift in range(3):
        batch = {name: torch.randn(count, 16) + shift for name in names}
        step(**batch)
    decision = step.last_decision
    assert decision is not None
    assert decision.reason.is_graph
    return lambda: step(**batch), step.entries[0].graph.replay
