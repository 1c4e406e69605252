"""Forecasts on sequences whose continuation is known, and captures in pauses on a clock that the test sets."""

from typing import Any

import pytest

from graphdispatch.engines import DispatchKey, Prewarmer, SizePredictor
from graphdispatch.errors import ConfigError

from ..helpers import Clock

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


class Target:
    """What captures sizes, in 50 ms each; not those above ``largest``."""

    def __init__(self, clock: Clock, largest: int = 64) -> None:
        self.captured_sizes: list[int] = []
        self.clock, self.largest = clock, largest

    def capture_size(self, size: int) -> bool:
        """Whether there is a graph then."""
        self.clock.now += 0.05
        if size <= self.largest:
            self.captured_sizes.append(size)
        return size <= self.largest


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
    assert prewarmer.capture_one(target) is None
    prewarmer.step_started(DispatchKey(64, 1))
    clock.now += 1.0
    assert prewarmer.capture_one(target) is None
    assert Prewarmer(SizePredictor(SIZES), clock=clock).capture_one(target) is None  # before the first step


def test_a_pause_is_used_for_the_likeliest_sizes() -> None:
    """In turn, without those that have graphs, and only as long as one is likely enough."""
    clock = Clock()
    prewarmer, target = after(clock, *[8, 16, 8, 8] * 10, least=0.1), Target(clock)
    clock.now += 1.0
    assert [prewarmer.capture_one(target) for _ in range(3)] == [8, 16, None]
    assert target.captured_sizes == [8, 16]


def test_captures_stay_within_the_budget() -> None:
    """The allowance pays for two captures, and time for more, at the share given."""
    clock = Clock()
    prewarmer, target = after(clock, 8, 16, 24, 32, allowance_ms=120.0, budget=0.1, least=0.0), Target(clock)
    clock.now += 0.2
    assert sum(prewarmer.capture_one(target) is not None for _ in range(9)) == 2
    assert prewarmer.spent_ms == pytest.approx(100)
    clock.now += 10.0
    assert sum(prewarmer.capture_one(target) is not None for _ in range(9)) == 9


def test_a_size_that_cannot_be_captured_is_passed_over() -> None:
    """It costs its time, of which a quarter is learnt, and the next likely one is captured."""
    clock = Clock()
    prewarmer, target = after(clock, *[16, 8, 16, 16] * 10), Target(clock, largest=8)
    clock.now += 1.0
    assert prewarmer.capture_one(target) == 8
    assert prewarmer.spent_ms == pytest.approx(100)
    assert prewarmer.capture_ms == pytest.approx(50 + 50 * 0.75**2)


@pytest.mark.parametrize("options", [{"budget": -0.1}, {"least": float("nan")}, {"allowance_ms": -1.0}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    """By name; so are bad predictors, and an end without a start, which would hide a running step."""
    with pytest.raises(ConfigError, match="budget, allowance_ms and least must be >= 0"):
        Prewarmer(SizePredictor(SIZES), **options)
    with pytest.raises(ConfigError, match="sizes must be strictly"):
        SizePredictor((4, 2))
    with pytest.raises(ConfigError, match="memory must be"):
        SizePredictor((4,), 0)
    with pytest.raises(ConfigError, match="horizon must be"):
        SizePredictor((4,)).forecast(0)
    with pytest.raises(ConfigError, match=r"step_ended\(\) must follow step_started\(\)"):
        Prewarmer(SizePredictor(SIZES)).step_ended()
