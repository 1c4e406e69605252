"""What a ``CUDAGraphWrapper`` call adds to the bare replay of the same entry."""

from collections.abc import Callable
from typing import Literal

import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper

from .timing import Effort, Row, row

__all__ = ["TITLE", "rows"]

TITLE = "CUDAGraphWrapper call over bare replay (aim: at most 2 us more)"
_ROWS = 8
_HOLDERS: dict[str, Literal["copy", "static"]] = {"static": "static", "default": "copy"}


def rows(effort: Effort) -> list[Row]:
    """Static inputs and outputs, as engines use them, and the default: inputs copied in, outputs copied out."""
    found = []
    for name, inputs in _HOLDERS.items():
        options = CUDAGraphOptions(inputs=inputs, outputs="static" if inputs == "static" else "clone")
        call, replay = _settled(options)
        found.append(row(f"{name} inputs and outputs", call, replay, effort.turns))
    return found


def _settled(options: CUDAGraphOptions) -> tuple[Callable[[], object], Callable[[], object]]:
    descriptor = BatchDescriptor(_ROWS)
    wrapper = CUDAGraphWrapper(lambda x: x * 2 + 1, options=options)
    x = torch.zeros(_ROWS, 64)

    def call() -> object:
        return wrapper(x, batch_descriptor=descriptor, cudagraph_runtime_mode=CUDAGraphMode.FULL)

    for _ in range(3):
        x.add_(1)
        call()
    entry = wrapper.get_entry(descriptor)
    assert entry is not None
    assert wrapper.get_stats().hits == 1
    return call, entry.graph.replay
