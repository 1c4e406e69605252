"""What comparing the weights on each call costs, by how many there are."""

import copy
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Graphed, graphed
from graphdispatch.proof.state.guards import StateGuard

from .peers import llama
from .timing import Effort, Row, row

__all__ = ["TITLE", "rows"]

TITLE = "graphed() call with the weight guard over one without"
_LAYERS = (0, 10, 100, 1000)
_SIZE = 8


class _Model(nn.Module):
    """Has layers, and computes next to nothing."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, columns] -> the same."""
        return x * 2


def rows(effort: Effort) -> list[Row]:
    """A model of up to a thousand linear layers, each with a weight and a bias."""
    x = torch.randn(_SIZE, 16)
    found = []
    for layers in _LAYERS:
        guarded, free = _settled(layers, guard=True), _settled(layers, guard=False)
        case = f"{2 * layers:4} parameters in {layers + 2:4} modules"
        found.append(row(case, lambda step=guarded: step(x), lambda step=free: step(x), effort.turns))  # type: ignore[misc]
    for layers in _LAYERS[1:]:
        guard = StateGuard([_Model(layers).eval()])
        if guard.holds() and guard.native is not None:
            case = f"{2 * layers:4} parameters: one check, native over Python"
            found.append(row(case, guard.native.holds, _python_check(guard), effort.turns))
    return found + _of_transformers(effort)


def _of_transformers(effort: Effort) -> list[Row]:
    """A decode step of a small Llama: what its code can reach is much more than parameters."""
    if importlib.util.find_spec("transformers") is None:
        return []

    model = llama()
    step, batch = model.make(1), model.batch(1)
    served = graphed(step, dynamic={})
    served.prewarm(*batch)
    served(*batch)
    (entry,) = served.entries
    assert isinstance(entry.guard, StateGuard)
    assert entry.guard.native is not None
    case = "a Llama of 4 layers: one check, native over Python"
    return [row(case, entry.guard.native.holds, _python_check(entry.guard), effort.turns)]


def _python_check(guard: StateGuard) -> Callable[[], bool]:
    """A check of the same guard by Python alone."""
    alone = copy.copy(guard)
    alone.native, alone._due = None, 0
    return alone.holds


def _settled(layers: int, *, guard: bool) -> Graphed[[Tensor], Tensor]:
    model = _Model(layers).eval()
    step = graphed(
        model, dynamic={"x": 0}, sizes=(_SIZE,), options=CUDAGraphOptions(guard_weights=guard, capture_after=1)
    )
    for _ in range(3):
        step(torch.randn(_SIZE, 16))
    decision = step.last_decision
    assert decision is not None
    assert decision.reason.is_graph
    return step
