"""What the footgun tests share: a callable that is called until a graph serves it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphdispatch.api.graphed import Graphed, graphed

Batch = Callable[[int], tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def one_tensor(rows: int) -> tuple[Any, ...]:
    """The usual batch: one tensor of ``rows`` rows and three columns."""
    return (torch.randn(rows, 3),)


def make(fn: Callable[..., Any], batch: Batch = one_tensor, **options: Any) -> Graphed[..., Any]:
    """``graphed`` with one size, four rows; called three times, so that a graph serves whatever can be served."""
    dynamic = options.pop("dynamic", {"x": 0})
    step = graphed(fn, dynamic=dynamic, sizes=(4,), capture_after=1, **options)
    for rows in (3, 4, 3):
        step(*batch(rows))
    return step


@pytest.fixture
def settled() -> Callable[..., Graphed[..., Any]]:
    """Make a step and call it three times; its last call must have been a replay."""

    def settle(fn: Callable[..., Any], batch: Batch = one_tensor, **options: Any) -> Graphed[..., Any]:
        step = make(fn, batch, **options)
        assert step.last_decision is not None
        assert step.last_decision.reason.is_graph, step.last_decision.explain()
        return step

    return settle


@pytest.fixture
def tried() -> Callable[..., Graphed[..., Any]]:
    """Make a step and call it three times, whatever comes of it."""
    return make
