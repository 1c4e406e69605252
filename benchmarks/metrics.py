"""What a Prometheus collector costs a hit: nothing, since it reads the counters when it is scraped."""

import torch
from prometheus_client import CollectorRegistry, generate_latest
from torch import nn

from graphdispatch import CUDAGraphOptions, Graphed, graphed
from graphdispatch.metrics import PrometheusCollector

from .timing import Effort, Row, row

__all__ = ["TITLE", "rows"]

TITLE = "a hit of a callable whose counters Prometheus scrapes over one without"
_SIZE = 8


def rows(effort: Effort) -> list[Row]:
    """Two equal callables, the first of which has been scraped."""
    x = torch.randn(_SIZE, 16)
    watched, alone = _served(x), _served(x)
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(watched, name="model"))
    assert b"graphdispatch_hits_total" in generate_latest(registry)
    return [row("three layers, a full batch", lambda: watched(x), lambda: alone(x), effort.turns)]


def _served(x: torch.Tensor) -> Graphed[..., torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()
    served: Graphed[..., torch.Tensor] = graphed(
        model, dynamic={"input": 0}, sizes=[_SIZE], options=CUDAGraphOptions(capture_after=1)
    )
    for _ in range(4):
        served(torch.randn_like(x))
    return served
