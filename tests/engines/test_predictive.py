"""Prediction at the front doors that engines use: sizes forecast from the keys so far have their graphs in time."""

from typing import Any

import pytest
import torch

import graphdispatch as gd

from ..helpers import Clock

FULL = gd.CUDAGraphMode.FULL
SIZES = (1, 2, 4, 8)


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice the input."""
    return x * 2


def forecasts(clock: Clock) -> gd.Prewarmer:
    """A prewarmer that has seen batches grow: 1, 2, 4, 1, 2, 4, ..., 1."""
    prewarmer = gd.Prewarmer(gd.SizePredictor(SIZES), clock=clock, horizon=1, least=0.3)
    for rows in (1, 2, 4) * 20 + (1,):
        prewarmer.step_started(gd.DispatchKey(rows, rows))
        prewarmer.step_ended()
        clock.now += 0.001
    return prewarmer


@pytest.mark.parametrize("make", [gd.CudagraphDispatcher, gd.StreamDispatcher])
def test_a_dispatcher_has_the_graph_before_the_batch(make: Any) -> None:
    """After 1 comes 2: it is captured in the pause. Its first batch is compared, and all further ones are replays."""
    clock, dispatcher = Clock(), make(double)
    prewarmer = forecasts(clock)
    dispatcher.prewarm([], lambda key: torch.zeros(key.num_tokens, 3))
    assert prewarmer.capture_one(dispatcher) is None  # no pause yet
    clock.now += 10.0
    assert prewarmer.capture_one(dispatcher) == 2
    assert dispatcher.captured_sizes == [2]
    for _ in range(4):
        x = torch.randn(2, 3)
        assert torch.equal(dispatcher.dispatch(gd.DispatchKey(2, 2), x), x * 2)
    assert dispatcher.stats.graph >= 2
    assert set(dispatcher.stats.reasons) == {gd.Reason.VERIFIED_NOW}
    if make is gd.StreamDispatcher:
        dispatcher.close()


def test_a_dispatcher_prewarms_keys_of_any_kind() -> None:
    """Each with the arguments that its key asks for; one whose runner no graph can hold is left out."""

    def step(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        return x * x.sum().item() if len(x) == 4 else x * scale

    keys = [gd.DispatchKey(8, 2, 64, True), gd.DispatchKey(4, 4), gd.DispatchKey(2, 2)]
    dispatcher = gd.CudagraphDispatcher(step)
    made = dispatcher.prewarm(keys, lambda key: ((torch.zeros(key.num_tokens, 3),), {"scale": 3.0}))
    assert made == [keys[0], keys[2]]
    assert dispatcher.captured_sizes == [2]
    assert dispatcher.prewarm(keys[2:], lambda key: pytest.fail("it has a graph")) == keys[2:]
    x = torch.randn(8, 3)
    for _ in range(2):
        assert torch.equal(dispatcher.dispatch(keys[0], x, scale=3.0), x * 3)
    assert dispatcher.stats.graph == 1
    with pytest.raises(gd.ConfigError, match="key must be a DispatchKey"):
        dispatcher.prewarm([4], lambda key: torch.zeros(4, 3))
    with pytest.raises(gd.ConfigError, match=r"call prewarm\(\[\], dummy_fn\) first"):
        gd.CudagraphDispatcher(step).capture_size(4)


def test_a_dispatcher_s_failed_capture_says_why() -> None:
    """``capture`` is asked for by name, so that it raises where ``prewarm`` leaves the key out."""
    dispatcher = gd.CudagraphDispatcher(lambda x: x * x.sum().item())
    with pytest.raises(gd.CaptureError, match="no graph for DispatchKey"):
        dispatcher.capture(gd.DispatchKey(4, 4), (torch.ones(4, 3),))
    assert dispatcher.num_graphs == 0


def test_a_manager_has_the_graph_before_the_batch() -> None:
    """It captures what is forecast for every kind of batch that it has seen; the first batch of a size is a hit."""
    clock = Clock()
    manager = gd.CUDAGraphManager(gd.CUDAGraphConfig(capture_sizes=SIZES, max_batch_size=8))
    prewarmer = forecasts(clock)
    manager.keep_examples()
    manager.execute_or_capture(8, 1, double, {"x": torch.randn(8, 3)})
    manager.execute_or_capture(8, 7, double, {"x": torch.randn(8, 3)})
    clock.now += 10.0
    assert manager.captured_sizes == ()
    assert prewarmer.capture_one(manager) == 2
    assert manager.captured_sizes == (2,)
    for seq_len in (1, 7):
        x = torch.randn(2, 3)
        assert torch.equal(manager.execute_or_capture(2, seq_len, double, {"x": x}), x * 2)
        assert manager.has(2, seq_len)
    assert manager.stats.hits == 2
    with pytest.raises(gd.ConfigError, match=r"size must be one of \(1, 2, 4, 8\), got 3"):
        manager.capture_size(3)
    manager.mode = gd.CUDAGraphMode.NONE
    assert not manager.capture_size(4)


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
