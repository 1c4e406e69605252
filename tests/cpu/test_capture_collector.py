"""A batch of captures collects garbage once before it and once after it, and never in between."""

import gc
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest
import torch

from graphdispatch.api.adaptive_wrapper import AdaptiveCUDAGraphWrapper
from graphdispatch.api.graphed import graphed
from graphdispatch.capture.collector import swept_collector
from graphdispatch.config import CUDAGraphOptions
from graphdispatch.descriptors import BatchDescriptor

Probe = Callable[[], bool]
T = TypeVar("T")


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def garbage() -> Probe:
    """Makes a cycle that nothing refers to; returns a function that tells whether it is still there."""
    cycle = weakref.ref(Cycle())
    return lambda: cycle() is not None


@pytest.fixture(autouse=True)
def _no_automatic_collection() -> Iterator[None]:
    """Python itself collects nothing meanwhile."""
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        gc.enable()


def test_garbage_is_collected_before_and_after_the_block() -> None:
    """What finalisers do, they do outside the block."""
    before = garbage()
    with swept_collector():
        assert not before()
        within = garbage()
        assert not gc.isenabled()
        assert within()
    assert not within()


def test_without_it_the_collector_is_left_alone() -> None:
    """``gc_disable=False`` collects nothing."""
    before = garbage()
    with swept_collector(enabled=False):
        assert before()
    assert before()


def _prewarm_graphed(fn: Callable[..., Any], options: CUDAGraphOptions) -> None:
    step = graphed(fn, dynamic={"x": 0}, sizes=(2, 4), options=options)
    step.prewarm(torch.randn(2, 3))


def _prewarm_wrapper(fn: Callable[..., Any], options: CUDAGraphOptions) -> None:
    wrapper = AdaptiveCUDAGraphWrapper(fn, options=options)
    wrapper.prewarm([BatchDescriptor(4), BatchDescriptor(2)], lambda descriptor: torch.randn(descriptor.num_tokens, 3))


@pytest.mark.parametrize("gc_disable", [True, False])
@pytest.mark.parametrize("prewarm", [_prewarm_graphed, _prewarm_wrapper])
def test_prewarming_collects_before_the_first_capture(
    prewarm: Callable[[Callable[..., Any], CUDAGraphOptions], None], gc_disable: bool
) -> None:
    """Garbage of before is gone when the callable first runs; none is collected until the last capture is done."""
    # Queues, since lists that the callable appends to are put back after a run that was not asked for.
    is_left, is_kept, within = SimpleQueue[bool](), SimpleQueue[bool](), SimpleQueue[Probe]()

    def step(x: torch.Tensor) -> torch.Tensor:
        is_left.put(before())
        within.put(garbage())
        probes = drained(within)
        is_kept.put(all(is_there() for is_there in probes))
        for probe in probes:
            within.put(probe)
        return x * 2

    before = garbage()
    prewarm(step, CUDAGraphOptions(gc_disable=gc_disable))
    seen = drained(is_left)
    assert len(seen) > 2
    assert seen[0] is not gc_disable
    assert all(drained(is_kept))
    assert any(is_there() for is_there in drained(within)) is not gc_disable


def drained(queue: "SimpleQueue[T]") -> list[T]:
    """All that is in a queue, which is empty then."""
    return [queue.get() for _ in range(queue.qsize())]
