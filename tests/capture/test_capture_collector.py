"""A batch of captures collects garbage once before it and once after it, and never in between."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphOptions, graphed
from graphdispatch.capture.collector import swept_collector
from graphdispatch.engines import AdaptiveCUDAGraphWrapper, BatchDescriptor

from ..spy import Spy

Probe = Callable[[], bool]


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
    is_left, is_kept, within = Spy(), Spy(), Spy()

    def step(x: torch.Tensor) -> torch.Tensor:
        is_left.append(before())
        within.append(garbage())
        is_kept.append(all(is_there() for is_there in within))
        return x * 2

    before = garbage()
    prewarm(step, CUDAGraphOptions(gc_disable=gc_disable))
    assert len(is_left) > 2
    assert is_left[0] is not gc_disable
    assert all(is_kept)
    assert any(is_there() for is_there in within) is not gc_disable
