"""Prediction at the front doors that engines use: sizes forecast from the keys so far have their graphs in time."""

from collections.abc import Iterator

import pytest
import torch

import graphdispatch as gd

FULL = gd.CUDAGraphMode.FULL
SIZES = (1, 2, 4, 8)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Clock:
    """Seconds by hand."""

    now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice the input."""
    return x * 2


class Target:
    """A dispatcher whose graphs a registry captures."""

    def __init__(self) -> None:
        self.registry = gd.CUDAGraphRegistry()
        self.dispatcher = gd.CudagraphDispatcher(double)

    @property
    def captured_sizes(self) -> list[int]:
        """The sizes that are registered."""
        return [size for size in SIZES if self.dispatcher.has_graph(gd.DispatchKey(size, size))]

    def capture_size(self, size: int) -> bool:
        """Capture and register one."""
        entry = self.registry.capture(size, 1, double, {"x": (size, 3)})
        self.dispatcher.register_graph(gd.DispatchKey(size, size), entry)
        return True


def forecasts(clock: Clock) -> gd.Prewarmer:
    """A prewarmer that has seen batches grow: 1, 2, 4, 1, 2, 4, ..., 1."""
    prewarmer = gd.Prewarmer(gd.SizePredictor(SIZES), clock=clock, horizon=1, least=0.3)
    for rows in (1, 2, 4) * 20 + (1,):
        prewarmer.step_started(gd.DispatchKey(rows, rows))
        prewarmer.step_ended()
        clock.now += 0.001
    return prewarmer


def test_a_dispatcher_has_the_graph_before_the_batch() -> None:
    """After 1 comes 2: it is captured in the pause. Its first batch is compared, and all further ones are replays."""
    clock, target = Clock(), Target()
    prewarmer = forecasts(clock)
    assert prewarmer.capture_one(target) is None  # no pause yet
    clock.now += 10.0
    assert prewarmer.capture_one(target) == 2
    for _ in range(2):
        x = torch.randn(2, 3)
        assert torch.equal(target.dispatcher.dispatch(gd.DispatchKey(2, 2), x), x * 2)
    assert target.dispatcher.stats.graph == 1
    assert target.dispatcher.stats.reasons == {gd.Reason.VERIFIED_NOW: 1}


def test_an_adaptive_wrapper_captures_what_is_forecast() -> None:
    """Once ``prewarm`` has told it how to make arguments; compared ahead, so that the first batch is a hit."""
    clock, wrapper = Clock(), gd.AdaptiveCUDAGraphWrapper(double)
    prewarmer = forecasts(clock)
    wrapper.prewarm([8, gd.BatchDescriptor(2, 2)], lambda descriptor: torch.zeros(descriptor.num_tokens, 3))
    clock.now += 10.0
    assert wrapper.captured_sizes == [8]
    assert prewarmer.capture_one(wrapper) == 2
    assert wrapper.captured_sizes == [2, 8]
    for _ in range(2):
        x = torch.randn(2, 3)
        served = wrapper(x, batch_descriptor=gd.BatchDescriptor(2), cudagraph_runtime_mode=FULL)
        assert torch.equal(served, x * 2)
    assert (wrapper.get_stats().captures, wrapper.get_stats().hits) == (3, 2)


def test_a_size_that_cannot_be_captured_is_said_to_have_no_graph() -> None:
    """So that the next likely one is tried."""
    wrapper = gd.AdaptiveCUDAGraphWrapper(lambda x: x * float(x.sum()))
    assert wrapper.prewarm([4], lambda descriptor: torch.ones(descriptor.num_tokens, 3)) == []
    assert not wrapper.capture_size(2)
