"""The demo's tiny decoder on the CPU, a step of many small operators, and an MLP, of few: graphed over eager.

The replays of Python's loop stand beside those of the native tape.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Graphed, Pad, graphed
from graphdispatch.backends.base import Graph
from graphdispatch.backends.cpu.graph import CPUGraph
from graphdispatch.backends.cpu.program import loop
from graphdispatch.demo import PRESETS, Decoder

from .timing import Effort, Row, interleaved

__all__ = ["TITLE", "python_loop", "rows", "tiny_step"]

TITLE = "graphed over eager: a tiny decoder step (aim: 1.3 times faster at batch 1), and a small MLP"
_BATCHES = (1, 8, 64)


def rows(effort: Effort) -> list[Row]:
    """For each batch size: the graphed step and the bare replay, each compared with eager in the same turns."""
    largest = max(_BATCHES)
    eager, step = tiny_step(largest, _BATCHES)
    step.prewarm(**_batch(largest))
    entries = {entry.size: entry for entry in step.entries}
    found = []
    for count in _BATCHES:
        batch = _batch(count)
        for shift in range(2):
            step(**{**batch, "positions": batch["positions"] + shift})
        decision = step.last_decision
        assert decision is not None
        assert decision.reason.is_graph
        graph = entries[count].graph
        sides = [lambda b=batch: step(**b), graph.replay, python_loop(graph), lambda b=batch: eager(**b)]
        *graphs_s, eager_s = interleaved(sides, effort.turns)
        for name, seconds in zip(("graphed()", "bare replay", "bare replay, Python's loop"), graphs_s, strict=True):
            found.append(Row(f"batch {count:2}, {name}", seconds * 1e6, eager_s * 1e6))
    return found + _mlp_rows(effort)


def python_loop(graph: Graph) -> Callable[[], None]:
    """A replay of a graph on the CPU by Python's loop, even where there is a native tape."""
    assert isinstance(graph, CPUGraph)
    assert graph.program is not None
    return partial(loop, graph.program.calls, graph.program.steps)


def tiny_step(slots: int, sizes: tuple[int, ...]) -> tuple[Decoder, Graphed[[Tensor, Tensor, Tensor], Tensor]]:
    """The tiny decoder, and a twin of it behind ``graphed``, on the CPU."""
    eager = Decoder(PRESETS["tiny"], slots)
    twin = eager.twin()
    step = graphed(
        twin,
        dynamic={"token_ids": 0, "slots": 0, "positions": 0},
        pad={"slots": Pad.value(twin.scratch_slot)},
        sizes=sizes,
        options=CUDAGraphOptions(padding_writes="allow"),
        backend="cpu",
    )
    return eager, step


def _mlp_rows(effort: Effort) -> list[Row]:
    """Three layers, which leave a graph little to save."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).eval()
    step = graphed(model, dynamic={"input": 0}, sizes=_BATCHES, backend="cpu")
    step.prewarm(torch.randn(2, 64))
    found = []
    for count in _BATCHES:
        for _ in range(2):
            step(batch := torch.randn(count, 64))
        graph = {entry.size: entry for entry in step.entries}[count].graph
        sides = [lambda x=batch: step(x), graph.replay, python_loop(graph), lambda x=batch: model(x)]
        *graphs_s, eager_s = interleaved(sides, effort.turns)
        for name, seconds in zip(("graphed()", "bare replay", "bare replay, Python's loop"), graphs_s, strict=True):
            found.append(Row(f"MLP, batch {count:2}, {name}", seconds * 1e6, eager_s * 1e6))
    return found


def _batch(count: int) -> dict[str, Tensor]:
    row = torch.arange(count)
    return {"token_ids": row, "slots": row, "positions": row % 32}
