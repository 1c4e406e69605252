"""The demo's tiny decoder on the CPU, a step of many small operators, and an MLP, of few: graphed over eager.

The replays of Python's loop stand beside those of the native tape.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Graphed, Pad, graphed
from graphdispatch.backends.base import Graph
from graphdispatch.backends.cpu.backend import CPUGraph, loop
from graphdispatch.demo import PRESETS, Decoder

from .timing import Effort, Row, compared, interleaved

__all__ = ["TITLE", "python_loop", "rows", "tiny_step"]

TITLE = "graphed over eager: a tiny decoder step (aim: 1.3 times faster at batch 1), and a small MLP"
_BATCHES = (1, 8, 64)


def rows(effort: Effort) -> list[Row]:
    """For each batch size, in inference mode and with gradients on: the graphed step, compared with eager in the same
    turns; in inference mode the bare replay as well."""
    found = []
    for mode in ("inference", "default"):
        with torch.inference_mode(mode == "inference"):
            found += [*_decoder_rows(mode, effort), *_mlp_rows(mode, effort)]
    return found


def _decoder_rows(mode: str, effort: Effort) -> list[Row]:
    largest = max(_BATCHES)
    eager, step = tiny_step(largest, _BATCHES)
    step.prewarm(**_batch(largest))
    entries = {entry.size: entry for entry in step.entries}
    found = []
    for count in _BATCHES:
        batch = _batch(count)
        for shift in range(2):
            step(**{**batch, "positions": batch["positions"] + shift})
        assert step.last_decision is not None
        assert step.last_decision.reason.is_graph
        calls = partial(step, **batch), partial(eager, **batch)
        found += _lines(f"{mode}, batch {count:2}", *calls, entries[count].graph, effort)
    return found


def _lines(
    case: str, served: Callable[[], object], eager: Callable[[], object], graph: Graph, effort: Effort
) -> list[Row]:
    sides = {"graphed()": served}
    if torch.is_inference_mode_enabled():
        sides |= {"bare replay": graph.replay, "bare replay, Python's loop": python_loop(graph)}
    *served_s, eager_s = interleaved([*sides.values(), eager], effort.turns)
    return [compared(f"{case}, {name}", seconds, eager_s) for name, seconds in zip(sides, served_s, strict=True)]


def python_loop(graph: Graph) -> Callable[[], None]:
    """A replay of a graph on the CPU by Python's loop, even where there is a native tape."""
    assert isinstance(graph, CPUGraph)
    assert graph.steps is not None
    return partial(loop, graph.steps)


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


def _mlp_rows(mode: str, effort: Effort) -> list[Row]:
    """Three layers, which leave a graph little to save."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).eval()
    step = graphed(model, dynamic={"input": 0}, sizes=_BATCHES, backend="cpu")
    step.prewarm(torch.randn(2, 64))
    found = []
    for count in _BATCHES:
        for _ in range(2):
            step(batch := torch.randn(count, 64))
        graph = {entry.size: entry for entry in step.entries}[count].graph
        found += _lines(f"MLP, {mode}, batch {count:2}", partial(step, batch), partial(model, batch), graph, effort)
    return found


def _batch(count: int) -> dict[str, Tensor]:
    row = torch.arange(count)
    return {"token_ids": row, "slots": row, "positions": row % 32}
