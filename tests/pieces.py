"""What the tests of breaks share: callables served in pieces, and how they are compared with eager."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphdispatch import CUDAGraphMode, Graphed, eager_break, graphed
from graphdispatch.engines import BatchDescriptor

from .helpers import with_options

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
ONE = BatchDescriptor(1)


def pieces(fn: Callable[..., Any], sizes: tuple[int, ...] = (4,), **options: Any) -> Graphed[..., Any]:
    """``fn`` of one tensor ``x`` whose rows are dimension 0, served in pieces and captured at once."""
    served = graphed(fn, dynamic={"x": 0}, sizes=sizes, mode="PIECEWISE", **with_options(options, capture_after=1))
    served.prewarm(x=torch.linspace(-1, 1, 12).view(4, 3), compare="all")
    return served


def graph_of(served: Graphed[..., Any]) -> Any:
    """The graph of the only entry."""
    (entry,) = served.entries
    assert entry.mode is PIECEWISE
    return entry.graph


def agrees(served: Graphed[..., Any], times: int = 4, rows: int = 4) -> None:
    """Replays give eager's answer, bit for bit without padding; every call must be a hit."""
    for _ in range(times):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(served(x=x), served.unwrap()(x=x), rtol=0, atol=0 if rows == 4 else 1e-6)
        assert served.last_decision is not None
        assert served.last_decision.reason.is_graph, served.last_decision


@eager_break
def host_scale(x: Tensor) -> Tensor:
    """Reads a value back, which no graph can; one of the first row, since padding rows shall not count."""
    return x * (1.0 if float(x[0, 0]) > 0 else 3.0)
