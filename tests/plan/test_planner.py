"""``plan_capture_sizes``: the proved optimum, and what it promises beside."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode
from graphdispatch.engines import named_sizes
from graphdispatch.errors import ConfigError
from graphdispatch.plan import CostModel, Plan, Workload, optimum, plan_capture_sizes
from graphdispatch.plan.prior import Prior

from .brute_force import least_ms, random_case

LINEAR = CostModel.of(lambda n: 20 + 0.03 * n, lambda n: 8 + 0.03 * n, lambda n: 8.5 + 0.03 * n)
ZIPF = Workload.from_histogram({n: 1000.0 / n for n in range(1, 301)})


@pytest.mark.parametrize("seed", range(8))
def test_the_plan_is_the_best_of_all(seed: int) -> None:
    """With any budgets and rules it takes as long as the best set found by trying all, and proves it; where it raises,
    there is no such set but the empty one."""
    rng = random.Random(seed)
    planned = 0
    for _ in range(50):
        case = random_case(rng)
        expected = least_ms(case)
        try:
            plan = plan_capture_sizes(case.workload, case.cost, mode=case.mode, prior=0, **case.options)
        except ConfigError:
            plan = None
        if plan is None:
            eager = Plan(case.mode, ()).evaluate(case.workload, case.cost).step_ms
            assert expected is None or expected == pytest.approx(eager), case
            continue
        planned += 1
        assert plan.proof is not None
        assert plan.proof.expected_ms == pytest.approx(expected, rel=1e-8), case
        assert plan.proof.bound_ms == pytest.approx(expected, rel=1e-6), case
        assert plan.evaluate(case.workload, case.cost).step_ms == pytest.approx(expected, rel=1e-6), case
    assert planned > 25


def _layered(weights: np.ndarray, eager: np.ndarray, graph: np.ndarray, count: int) -> float:
    """The textbook's O(K N^2) table over all sizes from 1, for the mean step time."""
    size = len(weights)
    sums = [np.concatenate([[0.0], np.cumsum(weights * np.minimum(eager, graph[j]))]) for j in range(size)]
    cost = np.array([[sums[j][j + 1] - sums[j][i] if i <= j else np.inf for j in range(size)] for i in range(size + 1)])
    rest = np.concatenate([np.cumsum((weights * eager)[::-1])[::-1], [0.0]])
    least, best = np.concatenate([[0.0], np.full(size, np.inf)]), float(rest[0])
    for _ in range(count):
        least = np.concatenate([[np.inf], (least[:, None] + cost).min(axis=0)])
        best = min(best, float((least + rest).min()))
    return best


@pytest.mark.parametrize("count", [1, 2, 7, 30, 119])
def test_many_sizes_are_as_good_as_the_textbook_s_table(count: int) -> None:
    """Over 120 sizes with random weights and any number of graphs."""
    weights = np.random.default_rng(count).random(120) ** 4
    workload = Workload.from_histogram({n + 1: float(weight) for n, weight in enumerate(weights)})
    plan = plan_capture_sizes(workload, LINEAR, max_graphs=count, prior=0)
    sizes = np.arange(1, 121)
    costs = LINEAR.graphs(CUDAGraphMode.FULL).step_ms
    expected = _layered(weights, LINEAR.eager_ms.at(sizes), costs.at(sizes), count) / weights.sum()
    assert plan.proof is not None
    assert plan.proof.expected_ms == pytest.approx(expected, rel=1e-10)
    assert len(plan.graphs) <= count


def test_equal_weights_leave_many_optima_and_every_number_is_met() -> None:
    """Where every number costs on a straight line of numbers, paths are spliced to the number that was asked for."""
    flat = CostModel.of(50.0, {1: 8.0, 64: 71.0})
    workload = Workload.from_histogram(dict.fromkeys(range(1, 65), 1.0))
    sizes = np.arange(1, 65)
    for count in range(1, 64):
        plan = plan_capture_sizes(workload, flat, max_graphs=count, prior=0)
        expected = _layered(
            np.ones(64), flat.eager_ms.at(sizes), flat.graphs(CUDAGraphMode.FULL).step_ms.at(sizes), count
        )
        assert plan.proof is not None
        assert plan.proof.expected_ms == pytest.approx(expected / 64, rel=1e-10)


@given(data=st.data())
def test_more_budget_is_never_worse(data: st.DataObject) -> None:
    """Of graphs, memory and time, one more of each at a time."""
    counts = data.draw(st.dictionaries(st.integers(1, 60), st.floats(0.1, 10), min_size=1, max_size=20))
    cost = CostModel.of({1: 20, 64: 21}, {1: 8, 64: 12}, capture_ms=2.0, graph_bytes=2.0, pool_bytes={1: 1, 64: 9})
    budgets = {
        "max_graphs": data.draw(st.integers(1, 8)),
        "memory": 12 + data.draw(st.floats(0, 9)),
        "capture_time": 0.01,
    }
    less = plan_capture_sizes(Workload.from_histogram(counts), cost, prior=0, **budgets)
    for name, more in (("max_graphs", 1), ("memory", 3.0), ("capture_time", 0.004)):
        greater: dict[str, Any] = budgets | {name: budgets[name] + more}
        plan = plan_capture_sizes(Workload.from_histogram(counts), cost, prior=0, **greater)
        assert plan.proof is not None
        assert less.proof is not None
        assert plan.proof.expected_ms <= less.proof.expected_ms * (1 + 1e-9)


@given(
    must=st.sets(st.integers(1, 40), max_size=3),
    grid=st.sampled_from([1, 2, 4]),
    padding=st.none() | st.floats(3, 8),
    mode=st.sampled_from(list(CUDAGraphMode)[1:]),
    graphs=st.integers(12, 30),
)
def test_rules_are_kept(must: set[int], grid: int, padding: float | None, mode: CUDAGraphMode, graphs: int) -> None:
    """Sizes are on the grid, include what they must in each mode, and pad no batch more than allowed."""
    workload = Workload.from_histogram(dict.fromkeys(range(1, 161), 2.0), dict.fromkeys(range(1, 90), 1.0))
    included = {grid * size for size in must}
    plan = plan_capture_sizes(
        workload, LINEAR, max_graphs=graphs, must_include=included, multiple_of=grid, max_padding=padding, mode=mode
    )
    assert len(plan.graphs) <= graphs
    for kind in {mode.decode_mode(), mode.mixed_mode()} - {CUDAGraphMode.NONE}:
        sizes = plan.sizes_of(kind)
        assert included <= set(sizes)
        assert all(size % grid == 0 for size in sizes)
        if padding is not None:
            assert all(
                after <= (1 + padding) * (before + 1) + 1e-9 for before, after in itertools.pairwise((0, *sizes))
            )


def test_budgets_are_kept_together() -> None:
    """Where graphs cost different time and bytes, all of the limits hold for the plan, and the bound is close."""
    cost = CostModel.of(
        lambda n: 20 + 0.03 * n,
        lambda n: 8 + 0.03 * n,
        capture_ms=lambda n: 50 + 0.1 * n,
        graph_bytes=lambda n: 20.0 + 0.05 * n,
        pool_bytes=float,
    )
    plan = plan_capture_sizes(ZIPF, cost, max_graphs=20, memory=700, capture_time=1.2)
    result = plan.evaluate(ZIPF, cost)
    assert plan.proof is not None
    assert 0 <= plan.proof.gap < 2e-3
    assert result.graphs <= 20
    assert result.memory <= 700
    assert result.capture_ms <= 1200
    assert max(result.memory / 700, result.capture_ms / 1200, result.graphs / 20) > 0.9


@pytest.mark.parametrize("kept", [10_000, 240, 1])
@pytest.mark.parametrize("seed", range(6))
def test_the_bound_holds_where_not_every_set_can_be_tried(
    seed: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 80 graphs that take from 1 to 80 s to capture, the plan is at most 1 % above the best set, which a table of
    sizes by seconds finds, and the bound is not above that, however few partial paths the search keeps."""
    monkeypatch.setattr(optimum, "_MOST_KEPT", kept)
    weights, budget = np.random.default_rng(seed).random(80) ** 3, 30 + 40 * seed
    cost = CostModel.of({1: 20.0, 80: 24.0}, {1: 8.0, 80: 17.0}, capture_ms={1: 1000.0, 80: 80_000.0})
    proof = plan_capture_sizes(
        Workload.from_histogram({n + 1: float(weight) for n, weight in enumerate(weights)}),
        cost,
        capture_time=budget,
        prior=0,
    ).proof
    eager, graph = (curve.at(np.arange(1, 81)) for curve in (cost.eager_ms, cost.full.step_ms))  # type: ignore[union-attr]
    least = np.full((81, budget + 1), np.inf)  # by last graph and seconds spent
    least[0, 0] = 0.0
    for j in range(1, 81):
        if j > budget:
            break
        served = np.concatenate([[0.0], np.cumsum(weights[:j] * np.minimum(eager[:j], graph[j - 1]))])
        least[j, j:] = (least[:j, : budget + 1 - j] + (served[j] - served[:j])[:, None]).min(axis=0)
    rest = np.concatenate([np.cumsum((weights * eager)[::-1])[::-1], [0.0]])
    best = float((least + rest[:, None]).min()) / weights.sum()
    assert proof is not None
    assert proof.bound_ms <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= proof.expected_ms <= 1.01 * best


def test_eager_serves_where_graphs_lose() -> None:
    """Sizes at which a graph gains nothing get none, and small batches below a far larger graph stay eager."""
    cost = CostModel.of({1: 1.0, 10: 10.0, 40: 40.0}, {1: 5.0, 20: 24.0, 21: 50.0})
    plan = plan_capture_sizes(Workload.from_histogram({2: 5, 8: 5, 30: 5}), cost, max_graphs=8, prior=0)
    assert plan.graphs == ()
    cost = CostModel.of({1: 1.0, 10: 10.0}, 4.0)
    plan = plan_capture_sizes(Workload.from_histogram({2: 5, 3: 5, 9: 5}), cost, max_graphs=1, prior=0)
    assert [(graph.size, graph.min_batch) for graph in plan.graphs] == [(9, 9)]
    assert plan.evaluate(Workload.from_histogram({2: 1, 3: 1, 9: 1}), cost).hit_rate == pytest.approx(1 / 3)


def test_modes_share_the_budget() -> None:
    """Uniform decode gets FULL graphs where it comes, other batches PIECEWISE ones, most where most is to gain."""
    counts = dict.fromkeys(range(1, 9), 100.0) | dict.fromkeys(range(100, 120), 1.0)
    workload = Workload.from_histogram(counts, dict.fromkeys(range(1, 9), 100.0))
    plan = plan_capture_sizes(workload, LINEAR, max_graphs=6, mode=CUDAGraphMode.FULL_AND_PIECEWISE, prior=0)
    assert max(plan.sizes_of(CUDAGraphMode.FULL)) == 8
    assert plan.sizes_of(CUDAGraphMode.PIECEWISE) == (119,)
    assert len(plan.graphs) == 6


@pytest.mark.parametrize("seen", [(60, 5), (30, 3), (200, 10)])
def test_unseen_traffic_is_not_padded_much_more_than_by_vllms_sizes(seen: tuple[int, int]) -> None:
    """Whatever was seen, evenly spread traffic elsewhere is padded by at most a point more than by vLLM's sizes, two
    points if the least sizes are in it."""
    rng = np.random.default_rng(0)
    workload = Workload.from_steps(np.clip(rng.normal(*seen, 2000).astype(int), 1, 512))
    usual = Plan.from_sizes("vllm", 512)
    plan = plan_capture_sizes(workload, max_graphs=len(usual.graphs), max_size=512)
    assert plan.evaluate(workload).padding < 0.5 * usual.evaluate(workload).padding
    for start in range(1, 400, 7):
        other = Workload.from_histogram(dict.fromkeys(range(start, min(2 * start + 16, 513)), 1.0))
        assert plan.evaluate(other).padding <= usual.evaluate(other).padding + (0.01 if start >= 8 else 0.02)
    assert plan.sizes[-1] == 512


def test_a_smaller_budget_loosens_the_guard_and_says_so() -> None:
    """Down to none; the plan tells what is left of it."""
    regrets = []
    for graphs in (60, 40, 20, 5):
        proof = plan_capture_sizes(ZIPF, max_graphs=graphs, max_size=512).proof
        assert proof is not None
        regrets.append(proof.regret or np.inf)
    assert regrets == sorted(regrets)
    assert regrets[0] == 0.0075
    plan = plan_capture_sizes(ZIPF, max_graphs=5, prior=Prior(regret=None))
    assert "no guard" in str(plan)


def test_a_prior_covers_what_was_not_seen() -> None:
    """One size seen for ever: without a prior it alone gets a graph, with one the range is covered."""
    workload = Workload.from_histogram({37: 1000.0, 300: 1.0})
    assert plan_capture_sizes(workload, max_graphs=8, prior=0).sizes == (37, 300)
    covered = plan_capture_sizes(workload, max_graphs=8).sizes
    assert {37, 300} <= set(covered)
    assert len(covered) == 8


def test_without_budgets_there_are_as_many_graphs_as_in_the_usual_sizes() -> None:
    """So that a bare call plans something sensible."""
    assert len(plan_capture_sizes(ZIPF).graphs) == len(named_sizes("vllm", 300))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_graphs": 0}, "max_graphs must be an integer from 1"),
        ({"max_graphs": True}, "max_graphs must be an integer from 1"),
        ({"memory": 1000.0}, "memory=1000 is too small for one graph, which takes 2.7"),
        ({"memory": float("nan")}, "memory must be a finite number above 0"),
        ({"capture_time": 0.01}, "capture_time=0.01 is too small for one graph, which takes 0.06"),
        ({"must_include": (7,), "multiple_of": 4}, "must_include must hold multiples of multiple_of=4, got 7"),
        ({"must_include": (64,), "max_size": 32}, "must_include must not exceed max_size=32, got 64"),
        ({"must_include": (8, 16, 24), "max_graphs": 2}, r"must pay for must_include=\(8, 16, 24\)"),
        ({"multiple_of": 64, "max_size": 32}, "max_size must be at least multiple_of=64, got 32"),
        ({"multiple_of": 8, "max_padding": 0.5}, "max_padding must be at least 7 with multiple_of=8"),
        ({"max_padding": -1}, "max_padding must be a finite share from 0"),
        ({"prior": 1.5}, "share of the prior must be from 0 to below 1"),
        ({"prior": Prior(0.5, 0.4), "mode": "none"}, "mode must have graphs"),
        ({"max_size": 5, "prior": 0}, "mode and max_size must leave steps to serve"),
        ({"mode": "full_decode_only"}, "mode and max_size must leave steps to serve"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    """One typed error that says which argument, and why."""
    workload = Workload.from_histogram({10: 1, 30: 2}, {})
    with pytest.raises(ConfigError, match=message):
        plan_capture_sizes(workload, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workload": [1, 2, 3]}, r"workload must be a Workload, got \[1, 2, 3\]; Workload.from_steps\(\) makes one"),
        ({"cost": 3}, r"cost must be a CostModel or None, got 3; CostModel.of\(\) makes one"),
        ({"must_include": 8}, r"must_include must be sizes, as \(1, 8\), got 8"),
    ],
)
def test_arguments_of_another_type_are_named(arguments: dict[str, Any], message: str) -> None:
    """With what makes the right one."""
    with pytest.raises(ConfigError, match=message):
        plan_capture_sizes(**{"workload": ZIPF, **arguments})


def test_a_prior_of_everything_is_refused() -> None:
    """Something must be left for the workload."""
    with pytest.raises(ConfigError, match="share and drift of the prior must be below 1 together"):
        Prior(0.6, 0.6)


def test_a_cost_without_the_mode_is_refused() -> None:
    """A plan of PIECEWISE graphs needs to know what they cost."""
    with pytest.raises(ConfigError, match="cost must know graphs of mode PIECEWISE; give piecewise_ms"):
        plan_capture_sizes(ZIPF, CostModel.of(20, 8), mode=CUDAGraphMode.PIECEWISE)
