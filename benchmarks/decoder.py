"""The demo's tiny decoder on the CPU: a decode step through graphs over the same step run eagerly."""

import torch
from torch import Tensor

from graphdispatch import CUDAGraphOptions, Graphed, Pad, graphed
from graphdispatch.demo import PRESETS, Decoder

from .timing import Effort, Row, interleaved

__all__ = ["TITLE", "rows", "tiny_step"]

TITLE = "tiny decoder step, graphed over eager (aim: 1.3 times faster at batch 1)"
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
        sides = [lambda b=batch: step(**b), entries[count].graph.replay, lambda b=batch: eager(**b)]
        graph_s, bare_s, eager_s = interleaved(sides, effort.turns)
        found.append(Row(f"batch {count:2}, graphed()", graph_s * 1e6, eager_s * 1e6))
        found.append(Row(f"batch {count:2}, bare replay", bare_s * 1e6, eager_s * 1e6))
    return found


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


def _batch(count: int) -> dict[str, Tensor]:
    row = torch.arange(count)
    return {"token_ids": row, "slots": row, "positions": row % 32}
