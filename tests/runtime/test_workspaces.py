"""Memory that a graph reads and nobody guards: held alive, and its growth or move after the capture is noticed."""

import gc
from types import MappingProxyType

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphdispatch import graphed

from ..helpers import AT_ONCE, check_rows


class _Library:
    """Keeps a workspace where no guard looks, as kernels' libraries do, and grows it in place on request."""

    __module__ = "graphdispatch.spy"  # no guard looks into the library's own objects

    def __init__(self) -> None:
        self.spaces = MappingProxyType({"float32": {"main": torch.arange(8.0)}})

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.spaces["float32"]["main"][: x.shape[1]]


def test_growth_after_the_capture_makes_the_graph_stale() -> None:
    """The storage grows where it stands; the graph that read the old one is released and captured anew."""
    library = _Library()
    step = graphed(library, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    check_rows(step, *[4] * 4, width=8)
    assert (step.stats.captures, step.stats.hits) == (1, 2)
    space = library.spaces["float32"]["main"]
    space.untyped_storage().resize_(1 << 20)
    space.copy_(torch.arange(8.0) * 10)
    assert not check_rows(step, 4, 4, 4, width=8)[0].is_graph
    assert (step.stats.captures, step.stats.hits) == (2, 3)
    assert step.stats.eviction_reasons == {"stale": 1}


def test_it_is_held_while_a_graph_reads_it() -> None:
    """A library that drops its workspace does not take it away from the graph; a released graph lets go of it."""
    library = _Library()
    space = StorageWeakRef(library.spaces["float32"]["main"].untyped_storage())
    step = graphed(library, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    x = torch.randn(4, 8)
    step(x)
    assert step.entries[0].workspaces is not None
    library.spaces["float32"].clear()
    gc.collect()
    assert torch.equal(step.entries[0].replay({"x": x}), x + torch.arange(8.0))
    assert not space.expired()
    step.clear()
    assert space.expired()


def test_guarded_memory_is_not_compared_twice() -> None:
    """Parameters and inputs are the business of others."""
    model = torch.nn.Linear(3, 3).eval()
    step = graphed(model, dynamic={"input": 0}, sizes=(4,), options=AT_ONCE)
    step(torch.randn(4, 3))
    assert step.entries[0].workspaces is None
