"""Forecasts on sequences whose continuation is known, captures in pauses, and front ends that use both."""

from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch.engines import DispatchKey, Prewarmer, SizePredictor

from ..helpers import Clock, double
from .test_dispatcher import serve

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


class Target:
    """What captures sizes, in 50 ms each; not those above ``largest``."""

    def __init__(self, clock: Clock, largest: int = 64) -> None:
        self.captured_sizes: list[int] = []
        self.clock, self.largest = clock, largest

    def capture(self, size: int) -> bool:
        """Whether there is a graph then."""
        self.clock.now += 0.05
        if size <= self.largest:
            self.captured_sizes.append(size)
        return size <= self.largest


def capture_one(prewarmer: Prewarmer, target: Target) -> int | None:
    """The size that was captured, or None."""
    return prewarmer.capture_one(target.captured_sizes, target.capture)


def observed(*tokens: int, memory: int = 2000) -> SizePredictor:
    """A predictor that has seen steps of these sizes."""
    predictor = SizePredictor(SIZES, memory)
    for count in tokens:
        predictor.observe(DispatchKey(count, 1))
    return predictor


def after(clock: Clock, *tokens: int, **options: Any) -> Prewarmer:
    """A prewarmer that has seen these steps, of 5 ms each and 1 ms apart; the last one has ended."""
    prewarmer = Prewarmer(SizePredictor(SIZES), clock=clock, **options)
    for count in tokens:
        clock.now += 0.001
        prewarmer.step_started(DispatchKey(count, 1))
        clock.now += 0.005
        prewarmer.step_ended()
    return prewarmer


@pytest.mark.parametrize(
    ("seen", "memory", "expected", "least"),
    [
        ([7] * 200, 2000, 8, 0.97),
        ([8, 64, 1] * 50 + [8], 2000, 64, 0.8),
        ([8, 8, 8, 16] * 20 + [40], 2000, 8, 0.0),
        ([8] * 1000 + [8, 64] * 100 + [8], 50, 64, 0.0),
    ],
    ids=["what repeats", "what followed", "the most frequent after a rare one", "new habits"],
)
def test_the_likeliest_size(seen: list[int], memory: int, expected: int, least: float) -> None:
    """It comes first, padded, with its chance; old observations fade in a short memory."""
    size, chance = observed(*seen, memory=memory).forecast()[0]
    assert size == expected
    assert chance > least


def test_forecasts_are_probabilities_that_grow_with_the_horizon() -> None:
    """Of one step they add up to one, with the batches above the largest size; none falls over more steps."""
    predictor = observed(*[1, 2, 4, 8, 70] * 20, 1)
    near, far = dict(predictor.forecast()), dict(predictor.forecast(8))
    assert 0.9 < sum(near.values()) <= 1.0
    assert list(near.values()) == sorted(near.values(), reverse=True)
    assert all(far[size] >= near[size] - 1e-12 for size in SIZES)
    assert far[4] > 0.8 > near[4]


def test_nothing_is_captured_in_a_burst_nor_while_a_step_runs() -> None:
    """A pause must have lasted as long as a capture, and a long step is no pause."""
    clock = Clock()
    prewarmer, target = after(clock, 8, 16, 8), Target(clock)
    clock.now += 0.09  # a capture is expected to take 100 ms
    assert capture_one(prewarmer, target) is None
    prewarmer.step_started(DispatchKey(64, 1))
    clock.now += 1.0
    assert capture_one(prewarmer, target) is None
    assert capture_one(Prewarmer(SizePredictor(SIZES), clock=clock), target) is None  # before the first step


def test_a_pause_is_used_for_the_likeliest_sizes() -> None:
    """In turn, without those that have graphs, and only as long as one is likely enough."""
    clock = Clock()
    prewarmer, target = after(clock, *[8, 16, 8, 8] * 10, least=0.1), Target(clock)
    clock.now += 1.0
    assert [capture_one(prewarmer, target) for _ in range(3)] == [8, 16, None]
    assert target.captured_sizes == [8, 16]


def test_captures_stay_within_the_budget() -> None:
    """The allowance pays for two captures, and time for more, at the share given."""
    clock = Clock()
    prewarmer, target = after(clock, 8, 16, 24, 32, allowance_ms=120.0, budget=0.1, least=0.0), Target(clock)
    clock.now += 0.2
    assert sum(capture_one(prewarmer, target) is not None for _ in range(9)) == 2
    assert prewarmer.spent_ms == pytest.approx(100)
    clock.now += 10.0
    assert sum(capture_one(prewarmer, target) is not None for _ in range(9)) == 9


def test_a_size_that_cannot_be_captured_is_passed_over() -> None:
    """It costs its time, of which a quarter is learnt, and the next likely one is captured."""
    clock = Clock()
    prewarmer, target = after(clock, *[16, 8, 16, 16] * 10), Target(clock, largest=8)
    clock.now += 1.0
    assert capture_one(prewarmer, target) == 8
    assert prewarmer.spent_ms == pytest.approx(100)
    assert prewarmer.capture_ms == pytest.approx(50 + 50 * 0.75**2)


# By the front ends that engines use: sizes forecast from the keys so far have their graphs in time.

FULL, FEW = gd.CUDAGraphMode.FULL, (1, 2, 4, 8)


def forecasts(clock: Clock) -> gd.Prewarmer:
    """A prewarmer that has seen batches grow: 1, 2, 4, 1, 2, 4, ..., 1."""
    prewarmer = gd.Prewarmer(gd.SizePredictor(FEW), clock=clock, horizon=1, least=0.3)
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
    capture = lambda n: dispatcher.prewarm([gd.DispatchKey(n, n)], lambda key: torch.zeros(key.num_tokens, 3))  # noqa: E731
    assert prewarmer.capture_one(dispatcher.captured_sizes, capture) is None  # no pause yet
    clock.now += 10.0
    assert prewarmer.capture_one(dispatcher.captured_sizes, capture) == 2
    assert dispatcher.captured_sizes == [2]
    serve(dispatcher, gd.DispatchKey(2, 2), 4)
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


def test_a_dispatcher_s_failed_capture_says_why() -> None:
    """``capture`` names its key, so that it raises where ``prewarm`` leaves the key out."""
    dispatcher = gd.CudagraphDispatcher(lambda x: x * x.sum().item())
    with pytest.raises(gd.CaptureError, match="no graph for DispatchKey"):
        dispatcher.capture(gd.DispatchKey(4, 4), (torch.ones(4, 3),))
    assert dispatcher.num_graphs == 0


def test_an_adaptive_wrapper_captures_what_is_forecast() -> None:
    """By ``prewarm``, which compares ahead, so that the first batch is a hit."""
    clock, wrapper = Clock(), gd.AdaptiveCUDAGraphWrapper(double)
    prewarmer = forecasts(clock)
    wrapper.prewarm([8, gd.BatchDescriptor(2, 2)], lambda descriptor: torch.zeros(descriptor.num_tokens, 3))
    clock.now += 10.0
    assert wrapper.captured_sizes == [8]
    capture = lambda n: wrapper.prewarm([n], lambda descriptor: torch.zeros(descriptor.num_tokens, 3))  # noqa: E731
    assert prewarmer.capture_one(wrapper.captured_sizes, capture) == 2
    assert wrapper.captured_sizes == [2, 8]
    for _ in range(2):
        x = torch.randn(2, 3)
        served = wrapper(x, batch_descriptor=gd.BatchDescriptor(2), cudagraph_runtime_mode=FULL)
        assert torch.equal(served, x * 2)
    assert (wrapper.get_stats().captures, wrapper.get_stats().hits) == (3, 2)
