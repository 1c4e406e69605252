"""Forecasts on sequences whose continuation is known, and plans on a clock that the test sets."""

from collections.abc import Callable
from typing import Any

import pytest

from graphdispatch.engines import DispatchKey, Prewarmer, SizePredictor
from graphdispatch.errors import ConfigError
from graphdispatch.plan.pauses import Pauses

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


class Clock:
    """Seconds that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait_ms(self, ms: float) -> None:
        self.now += ms / 1000


def observed(*tokens: int) -> SizePredictor:
    """A predictor that has seen steps of these sizes."""
    predictor = SizePredictor(SIZES)
    for count in tokens:
        predictor.observe(DispatchKey(count, 1))
    return predictor


def burst(prewarmer: Prewarmer, clock: Clock, *tokens: int) -> None:
    """Steps of 5 ms, 1 ms apart; the last one has ended."""
    for count in tokens:
        clock.wait_ms(1)
        prewarmer.step_started(DispatchKey(count, 1))
        clock.wait_ms(5)
        prewarmer.step_ended()


@pytest.fixture
def clock() -> Clock:
    """A clock that stands still."""
    return Clock()


@pytest.fixture
def make(clock: Clock) -> Callable[..., Prewarmer]:
    """Makes prewarmers that share the clock."""
    return lambda **options: Prewarmer(SizePredictor(SIZES), clock=clock, **options)


def test_nothing_is_forecast_before_the_first_step() -> None:
    """Without observations there is no forecast."""
    assert observed().forecast(3) == []


def test_a_repeated_size_is_forecast_to_repeat() -> None:
    """After many equal steps the same size is nearly certain."""
    size, chance = observed(*[7] * 200).forecast(1)[0]
    assert size == 8
    assert chance > 0.98


def test_what_followed_a_size_is_forecast_to_follow_it() -> None:
    """In a cycle of three sizes the next one is forecast, not the most frequent."""
    predictor = observed(*[8, 64, 1] * 50, 8)
    size, chance = predictor.forecast(1)[0]
    assert size == 64
    assert chance > 0.8


def test_growth_points_at_sizes_never_seen() -> None:
    """A batch that grew by one size at a time is forecast to grow on, beyond all sizes seen."""
    assert observed(1, 2, 4, 8, 16, 24).forecast(1)[0][0] == 32


def test_old_habits_fade() -> None:
    """A thousand old observations weigh less than a hundred recent ones in a memory of fifty."""
    predictor = SizePredictor(SIZES, memory=50)
    for tokens in [8] * 1000 + [8, 64] * 100:
        predictor.observe(DispatchKey(tokens, 1))
    predictor.observe(DispatchKey(8, 1))
    assert predictor.forecast(1)[0][0] == 64


def test_probabilities_of_the_next_step_are_a_distribution() -> None:
    """All sizes and the batches above the largest add up to one, in falling order."""
    chances = [chance for _, chance in observed(3, 9, 70, 3, 12, 64).forecast(len(SIZES))]
    assert chances == sorted(chances, reverse=True)
    assert 0.5 < sum(chances) <= 1.0


def test_a_longer_horizon_reaches_more() -> None:
    """No size becomes less likely over more steps, and one two moves away becomes likelier."""
    predictor = observed(*[1, 2, 4, 8] * 20, 1)
    near, far = dict(predictor.forecast(11, 1)), dict(predictor.forecast(11, 8))
    assert all(far[size] >= near[size] - 1e-12 for size in SIZES)
    assert far[4] > 0.8 > near[4]


def test_batches_above_the_largest_size_are_never_forecast() -> None:
    """A predictor that saw only such batches names only sizes that a graph can have, and none as likely."""
    forecast = observed(*[100] * 50).forecast(20)
    assert {size for size, _ in forecast} == set(SIZES)
    assert forecast[0][1] < 0.05


def test_counts_stay_finite() -> None:
    """However long it observes, the forecast stays a forecast."""
    predictor = SizePredictor(SIZES, memory=10)
    for step in range(8000):
        predictor.observe(DispatchKey((1, 64)[step % 2], 1))
    assert predictor.forecast(1)[0][0] == 1


def test_a_pause_is_used_for_the_likeliest_missing_size(clock: Clock, make: Callable[..., Prewarmer]) -> None:
    """Once the pause is as long as a capture, sizes without graphs are planned, likeliest first."""
    prewarmer = make(capture_ms=50.0)
    burst(prewarmer, clock, *[8, 16, 8, 8] * 10)
    clock.wait_ms(60)
    assert prewarmer.plan(())[:2] == [8, 16]
    assert 8 not in prewarmer.plan((8,))


def test_nothing_is_planned_in_a_burst(clock: Clock, make: Callable[..., Prewarmer]) -> None:
    """Between the steps of a burst, and in a pause shorter than a capture, the plan is empty."""
    prewarmer = make(capture_ms=50.0)
    for _ in range(20):
        burst(prewarmer, clock, 8, 16)
        assert prewarmer.plan(()) == []
    clock.wait_ms(49)
    assert prewarmer.plan(()) == []


def test_nothing_is_planned_while_a_step_runs(clock: Clock, make: Callable[..., Prewarmer]) -> None:
    """A step that runs for a second is not a pause."""
    prewarmer = make(capture_ms=50.0)
    burst(prewarmer, clock, 8, 16)
    prewarmer.step_started(DispatchKey(64, 1))
    clock.wait_ms(1000)
    assert prewarmer.plan(()) == []


def test_steps_that_are_usually_far_apart_are_no_pause(clock: Clock, make: Callable[..., Prewarmer]) -> None:
    """Where steps come every 30 ms, 60 ms without one are not yet a pause, and 300 ms are."""
    prewarmer = make(capture_ms=1.0)
    for _ in range(200):
        clock.wait_ms(29)
        burst(prewarmer, clock, 8)
    clock.wait_ms(60)
    assert prewarmer.plan(()) == []
    clock.wait_ms(240)
    assert prewarmer.plan(()) != []


def test_captures_stay_within_the_budget(clock: Clock, make: Callable[..., Prewarmer]) -> None:
    """The allowance pays for two captures; more are planned as time passes, at the share given."""
    prewarmer = make(capture_ms=50.0, allowance_ms=100.0, budget=0.1, least=0.0)
    burst(prewarmer, clock, 8, 16, 24)
    clock.wait_ms(51)
    assert len(prewarmer.plan(())) == 2
    prewarmer.record_capture(50.0)
    prewarmer.record_capture(50.0)
    assert prewarmer.plan(()) == []
    clock.wait_ms(1000)
    assert len(prewarmer.plan(())) == 2


def test_the_cost_of_captures_is_learnt(clock: Clock, make: Callable[..., Prewarmer]) -> None:
    """Captures that take 400 ms ask for a longer pause than was assumed."""
    prewarmer = make(capture_ms=50.0, allowance_ms=1e6)
    burst(prewarmer, clock, 8, 16)
    for _ in range(20):
        prewarmer.record_capture(400.0)
    clock.wait_ms(200)
    assert prewarmer.plan(()) == []
    clock.wait_ms(200)
    assert prewarmer.plan(()) != []


def test_a_full_cache_is_left_alone_unless_the_gain_is_clear(clock: Clock, make: Callable[..., Prewarmer]) -> None:
    """With room for two graphs, a likely size is planned beside one that never comes, and none beside two likely."""
    prewarmer = make(capture_ms=50.0)
    burst(prewarmer, clock, *[8, 16] * 100)
    clock.wait_ms(60)
    assert prewarmer.plan((8, 64), capacity=2) == [16]
    assert prewarmer.plan((8, 16), capacity=2) == []


def test_a_capture_that_raises_has_cost_its_time(clock: Clock) -> None:
    """The time counts in the budget, and the error passes through."""

    class Broken:
        def capture_size(self, size: int) -> bool:
            clock.wait_ms(400)
            raise ValueError("broken")

    pauses = Pauses(clock=clock)
    with pytest.raises(ValueError, match="broken"):
        pauses.capture(Broken().capture_size, 8)
    assert pauses.spent_ms == pytest.approx(400.0)
    assert "captures took 400 ms, the next is expected to take 175 ms" in repr(pauses)


def test_an_end_without_a_start_is_refused(make: Callable[..., Prewarmer]) -> None:
    """Ends that outnumber starts would hide a running step."""
    with pytest.raises(ConfigError, match=r"step_ended\(\) must follow step_started\(\)"):
        make().step_ended()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"budget": -0.1}, "budget must be a share"),
        ({"least": 2.0}, "least must be a share"),
        ({"capture_ms": float("nan")}, "capture_ms must be a finite"),
        ({"allowance_ms": -1.0}, "allowance_ms must be a finite"),
        ({"horizon": 0}, "horizon must be an integer >= 1"),
    ],
)
def test_bad_options_are_refused(make: Callable[..., Prewarmer], options: dict[str, Any], match: str) -> None:
    """Every bad option is a ``ConfigError`` that names it."""
    with pytest.raises(ConfigError, match=match):
        make(**options)


@pytest.mark.parametrize(
    ("sizes", "memory", "match"),
    [((4, 2), 10, "sizes must be strictly"), (range(1, 2000), 10, "use fewer"), ((4,), 0, "memory must be")],
)
def test_bad_predictors_are_refused(sizes: Any, memory: int, match: str) -> None:
    """Sizes out of order, too many of them, and no memory are ``ConfigError``s."""
    with pytest.raises(ConfigError, match=match):
        SizePredictor(sizes, memory)
