"""Re-planning while serving: fading traffic, measured costs, and sizes that pay for their captures."""

import itertools
import random
from typing import NamedTuple

import numpy as np
import pytest

from graphdispatch.errors import ConfigError
from graphdispatch.plan import CostModel, Workload, plan_capture_sizes
from graphdispatch.plan.online import LiveTraffic, measured_cost, replan
from graphdispatch.plan.prior import Prior

SLOPED = CostModel.of(lambda n: 1000.0, lambda n: 8 + 0.1 * n, capture_ms=50.0)
FLAT = CostModel.of(100.0, 8.0, capture_ms=50.0)


class GraphFigures(NamedTuple):
    """A captured graph, as far as its costs go."""

    size: int
    capture_time_ms: float
    nbytes: int
    avg_replay_time_ms: float = 0.0


def test_older_steps_weigh_half_for_every_half_life() -> None:
    """Cumulative counters become weights; what was counted before counts once."""
    traffic = LiveTraffic(100)
    assert traffic.update({4: 60, 8: 40}) == 100
    assert traffic.update({4: 60, 8: 140}) == 100
    assert traffic.weights == pytest.approx({4: 30.0, 8: 120.0})
    assert traffic.update({4: 60, 8: 140}) == 0
    assert traffic.weights == pytest.approx({4: 30.0, 8: 120.0})


def test_counters_that_were_set_back_are_new() -> None:
    """``stats.reset()`` loses nothing of what was learnt."""
    traffic = LiveTraffic(100, {16: 4.0})
    traffic.update({4: 100})
    assert traffic.update({4: 10}) == 10
    assert traffic.weights == pytest.approx({16: 2.0 * 2**-0.1, 4: 100 * 2**-0.1 + 10})


def test_sizes_that_no_longer_come_are_forgotten() -> None:
    """Memory does not grow with sizes of long ago."""
    traffic = LiveTraffic(10, {3: 1.0})
    traffic.update({5: 400})
    assert list(traffic.weights) == [5]


@pytest.mark.parametrize("half_life", [0, -1, float("inf"), float("nan"), True])
def test_a_half_life_that_cannot_be_is_refused(half_life: float) -> None:
    """It must be a finite number of steps."""
    with pytest.raises(ConfigError, match="half_life_steps must be a finite number above 0"):
        LiveTraffic(half_life)


def test_measured_costs_replace_stated_ones() -> None:
    """All graphs of a size are captured for it; replays decide once two sizes were measured."""
    figures = [GraphFigures(4, 20.0, 100, 2.0), GraphFigures(4, 30.0, 200, 4.0), GraphFigures(8, 70.0, 300)]
    cost = measured_cost(SLOPED, figures)
    assert cost.full is not None
    assert cost.full.capture_ms.at([4, 8]).tolist() == [50.0, 70.0]
    assert cost.full.graph_bytes.at([4, 8]).tolist() == [300.0, 300.0]
    assert cost.full.step_ms.at(8) == SLOPED.full.step_ms.at(8)  # type: ignore[union-attr]
    cost = measured_cost(SLOPED, [*figures, GraphFigures(8, 1.0, 1, 5.0)])
    assert cost.full is not None
    assert cost.full.step_ms.at([4, 8]).tolist() == [3.0, 5.0]
    assert measured_cost(SLOPED, []) is SLOPED


def test_costs_of_piecewise_graphs_alone_do() -> None:
    """The mode that the costs are of decides."""
    piecewise = CostModel.of(1000.0, piecewise_ms=lambda n: 8 + 0.1 * n)
    assert measured_cost(piecewise, [GraphFigures(4, 20.0, 100)]).piecewise.capture_ms.values == (20.0,)  # type: ignore[union-attr]
    assert replan({5: 100.0}, (8,), {8}, piecewise, max_graphs=2, horizon_steps=1e6).sizes == (5, 8)


def objective(sizes: tuple[int, ...], expected: np.ndarray, ready: set[int], horizon: float) -> float:
    """The expected time of a step, with captures written off."""
    nearest = [min(size for size in sizes if size >= rows) for rows in range(1, len(expected) + 1)]
    assert SLOPED.full is not None
    return float(expected @ SLOPED.full.step_ms.at(nearest)) + len(set(sizes) - ready) * 50.0 / horizon


@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_the_sizes_at_hand_is_found(seed: int) -> None:
    """No other choice among the sizes in use, those ready and a fresh plan's takes less, captures included."""
    rng = random.Random(seed)
    traffic = {rows: rng.random() for rows in rng.sample(range(1, 33), 8)}
    sizes = (*sorted(rng.sample(range(1, 32), 3)), 32)
    ready = {*rng.sample(sizes, 2), *rng.sample(range(1, 40), 2)}
    horizon, most = rng.choice([10.0, 300.0, 1e5]), rng.randint(1, 5)
    verdict = replan(traffic, sizes, ready, SLOPED, max_graphs=most, horizon_steps=horizon)
    chosen = verdict.sizes or sizes
    seen = Workload.from_histogram(traffic)
    fresh = plan_capture_sizes(seen, SLOPED, max_graphs=most, max_size=32).sizes
    expected = Prior.of(0.02).expected(seen.sizes, seen.counts, 32)
    at_hand = sorted({*sizes, *fresh, *(size for size in ready if size < 32)} - {32})
    least = min(
        objective((*others, 32), expected, ready, horizon)
        for count in range(min(most, len(at_hand) + 1))
        for others in itertools.combinations(at_hand, count)
    )
    assert objective(chosen, expected, ready, horizon) == pytest.approx(least)
    assert len(chosen) <= most
    assert set(verdict.captures) == (set(chosen) - ready if verdict.sizes else set())


def test_captures_are_made_only_where_they_pay() -> None:
    """The same traffic and sizes: worth a capture over many steps, not over few, and never where padding is free."""
    traffic, sizes = {5: 100.0}, (8, 16)
    paid = 50 / 0.3  # steps of three rows of padding less
    verdict = replan(traffic, sizes, sizes, SLOPED, max_graphs=3, horizon_steps=paid + 1, prior=0)
    assert (verdict.sizes, verdict.captures) == ((5, 16), (5,))
    assert verdict.saving_ms == pytest.approx(0.3)
    for cost, horizon in ((SLOPED, paid - 1), (FLAT, 1e6)):
        verdict = replan(traffic, (8, 16), (8, 16), cost, max_graphs=3, horizon_steps=horizon)
        assert 5 not in (verdict.sizes or ())


def test_the_largest_size_stays_whatever_comes() -> None:
    """As many steps are served as before; traffic above is not planned for."""
    verdict = replan({3: 100.0, 40: 1000.0}, (8, 32), {8, 32}, SLOPED, max_graphs=2, horizon_steps=1e6, prior=0)
    assert verdict.sizes == (3, 32)
    verdict = replan({40: 1000.0}, (8, 32), {8, 32}, SLOPED, max_graphs=2, horizon_steps=1e6)
    assert (verdict.sizes, verdict.reason) == (None, "no step of at most 32 rows was seen")


def test_the_most_used_size_is_captured_first() -> None:
    """And one that could not be captured is neither captured nor taken up."""
    traffic = {5: 10.0, 11: 100.0}
    first = replan(traffic, (16,), {16}, SLOPED, max_graphs=3, horizon_steps=1e6, prior=0)
    assert (first.sizes, first.captures) == ((5, 11, 16), (11, 5))
    again = replan(traffic, (16,), {16}, SLOPED, max_graphs=3, horizon_steps=1e6, without={11}, prior=0)
    assert again.sizes is not None
    assert 11 not in (*again.sizes, *again.captures)
    kept = replan(traffic, (11, 16), {16}, SLOPED, max_graphs=3, horizon_steps=1e6, without={11}, prior=0)
    assert (kept.sizes, kept.captures) == ((5, 11, 16), (5,))
