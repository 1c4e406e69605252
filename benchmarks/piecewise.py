"""What breaks cost: a replay in pieces over the same work in one graph, and the tiny decoder in both modes."""

from collections.abc import Callable

import torch
from torch import Tensor

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Graphed, Pad, eager_break, graphed
from graphdispatch.demo import PRESETS, Decoder

from .timing import Effort, Row, compared, interleaved

__all__ = ["TITLE", "rows"]

TITLE = "PIECEWISE: replay in pieces over one graph, and tiny decoder steps over eager"
_BREAKS = (1, 4, 16)
_BATCHES = (1, 8, 64)
_ROWS = 8


def rows(effort: Effort) -> list[Row]:
    """What each break adds to a bare replay, and decode steps in FULL and PIECEWISE, attention being the break."""
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "returning its argument": lambda x: x,
        "returning a fresh tensor": torch.neg,
    }
    found = [row for name, part in kinds.items() for row in _per_break(name, part, effort)]
    return found + _decoder(effort)


def _per_break(name: str, part: Callable[[Tensor], Tensor], effort: Effort) -> list[Row]:
    """Bare replays with so many breaks, over one graph of the same operators; the last line is for one break."""
    found = []
    extra_s = 0.0
    for count in _BREAKS:
        sides = [_replay(count, part, mode) for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)]
        pieces_s, full_s = interleaved(sides, effort.turns)
        extra_s = (pieces_s.median - full_s.median) / count
        found.append(compared(f"{count:2} breaks {name}", pieces_s, full_s))
    return [*found, Row(f"   each of {_BREAKS[-1]}, with its graph", extra_s * 1e6)]


def _replay(count: int, part: Callable[[Tensor], Tensor], mode: CUDAGraphMode) -> Callable[[], object]:
    broken = eager_break(part)

    def model(x: Tensor) -> Tensor:
        for _ in range(count):
            x = broken(x + 1)
        return x + 1

    served = graphed(model, dynamic={"x": 0}, sizes=(_ROWS,), mode=mode, backend="cpu")
    served.prewarm(x=torch.randn(_ROWS, 64))
    (entry,) = served.entries
    return entry.graph.replay


def _decoder(effort: Effort) -> list[Row]:
    largest = max(_BATCHES)
    eager = Decoder(PRESETS["tiny"], largest)
    steps = {mode: _step(eager, mode) for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)}
    found = []
    for count in _BATCHES:
        row = torch.arange(count)
        batch = {"token_ids": row, "slots": row, "positions": row % 32}
        sides = [lambda s=s, b=batch: s(**b) for s in (*steps.values(), eager)]
        *graph_s, eager_s = interleaved(sides, effort.turns)
        for (mode, step), seconds in zip(steps.items(), graph_s, strict=True):
            assert step.last_decision is not None
            assert step.last_decision.mode is mode
            found.append(compared(f"decoder, batch {count:2}, {mode.name}", seconds, eager_s))
    return found


def _step(eager: Decoder, mode: CUDAGraphMode) -> Graphed[[Tensor, Tensor, Tensor], Tensor]:
    """A twin of the decoder behind ``graphed``, prewarmed, the attention of each layer marked."""
    twin = eager.twin()
    for layer in twin.layers:
        eager_break(layer.get_submodule("attention"))
    step = graphed(
        twin,
        dynamic={"token_ids": 0, "slots": 0, "positions": 0},
        pad={"slots": Pad.value(twin.scratch_slot)},
        sizes=_BATCHES,
        mode=mode,
        options=CUDAGraphOptions(padding_writes="allow"),
        backend="cpu",
    )
    row = torch.arange(max(_BATCHES))
    step.prewarm(token_ids=row, slots=row, positions=row % 32)
    return step
