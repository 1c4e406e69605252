"""Plans for traffic that varies in batch size and sequence length."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch.errors import ConfigError
from graphdispatch.plan.grid import GridPlan, plan_capture_grid

from ..helpers import AT_ONCE

COST = gd.plan.CostModel.of({1: 5.0, 64: 6.0}, {1: 1.0, 64: 4.0}, capture_ms={1: 10.0, 64: 30.0}, graph_bytes=1000.0)
GAINING = gd.plan.CostModel.of({1: 50.0, 99999: 500.0}, {1: 1.0, 99999: 400.0})  # eager is slower than any padding


def traffic(seed: int, batches: int = 3, lengths: int = 3) -> dict[tuple[int, int], float]:
    """How often calls of a few shapes come."""
    chance = random.Random(seed)
    pairs = list(product(sorted(chance.sample(range(1, 9), batches)), sorted(chance.sample(range(1, 9), lengths))))
    return {pair: chance.choice([0.0, 1.0, 5.0, 20.0]) + (pair == pairs[0]) for pair in pairs}


def shelves(seen: Mapping[tuple[int, int], float], most: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every plan of shelves of at most so many graphs."""
    batches, lengths = sorted({b for b, _ in seen}), sorted({n for _, n in seen})
    choices = [c for size in range(len(batches) + 1) for c in combinations(batches, size)]
    for chosen in product(choices, repeat=len(lengths)):
        points = tuple((b, n) for n, some in zip(lengths, chosen, strict=True) for b in some)
        if 0 < len(points) <= most:
            yield points


def fastest(sets: Iterator[Sequence[tuple[int, int]]], seen: Any) -> float:
    """The least time of a call."""
    return min(GridPlan(tuple(points), COST).evaluate(seen).step_ms for points in sets)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most", [1, 2, 4])
def test_no_set_of_combinations_is_faster_than_the_bound(seed: int, most: int) -> None:
    """The plan is the fastest of all sets of so many graphs, but for what the gap says; brute force has them all."""
    seen = traffic(seed)
    plan = plan_capture_grid(seen, COST, max_graphs=most)
    best = fastest(shelves(seen, most), seen)  # each set of combinations is one of shelves
    assert plan.evaluate(seen).step_ms == pytest.approx(plan.expected_ms)
    assert plan.bound_ms <= best * (1 + 1e-9)
    assert best <= plan.expected_ms * (1 + 1e-9)
    assert plan.expected_ms * (1 - plan.gap) <= best * (1 + 1e-9)
    assert len(plan.points) <= most


@pytest.mark.parametrize("seed", range(4))
def test_no_product_of_sizes_is_faster(seed: int) -> None:
    """A grid made by hand, of as many graphs, is never faster: it is one of the plans of shelves."""
    chance = random.Random(seed)
    seen = [(chance.randint(1, 8), chance.randint(16, 64)) for _ in range(400)]
    for batches, lengths in (([8], [64]), ([4, 8], [32, 64]), ([1, 2, 4, 8], [16, 32, 48, 64])):
        made = GridPlan.of(batches, lengths, GAINING)
        plan = plan_capture_grid(seen, GAINING, max_graphs=len(made.points))
        assert plan.expected_ms <= made.evaluate(seen).step_ms


def test_budgets_hold_together() -> None:
    """Memory and capture time limit the plan as the number of graphs does, and one that cannot be met is named."""
    chance = random.Random(0)
    seen = [(chance.randint(1, 8), chance.randint(1, 8)) for _ in range(300)]
    whole = plan_capture_grid(seen, COST, max_graphs=12).evaluate(seen)
    for budget in ({"memory": 5000.0}, {"capture_time": 0.08}, {"memory": 6000.0, "capture_time": 0.1}):
        found = plan_capture_grid(seen, COST, max_graphs=12, **budget).evaluate(seen)
        assert found.memory <= budget.get("memory", 1e9)
        assert found.capture_ms <= 1e3 * budget.get("capture_time", 1e9)
        assert found.step_ms >= whole.step_ms
        assert found.graphs > 1
    with pytest.raises(ConfigError, match="must pay for one graph"):
        plan_capture_grid(seen, COST, memory=10.0)


def test_many_sizes_are_planned() -> None:
    """With hundreds of batch sizes and lengths some of them are candidates, and the bound holds for all."""
    chance = random.Random(1)
    seen = [(chance.randint(1, 200), chance.randint(1, 400)) for _ in range(2000)]
    plan = plan_capture_grid(seen, GAINING, max_graphs=16)
    assert len(plan.points) <= 16
    assert 0.0 < plan.bound_ms <= plan.expected_ms
    assert str(plan.evaluate(seen)).startswith("16 graphs serve 89.")


@pytest.mark.parametrize(
    ("seen", "how", "message"),
    [
        ([], {}, "at least one call"),
        ([(0, 3)], {}, "pairs of batch size and length from 1 on, got \\(0, 3\\)"),
        ([3], {}, "pairs of batch size and length"),
        ({(1, 2): -1.0}, {}, "how often such calls come, got -1.0"),
        ([(1, 2)], {"max_graphs": 0}, "max_graphs must be an integer from 1 to 64, got 0"),
        ([(1, 2)], {"memory": -1}, "memory must be a number above 0"),
        ([(1, 2)], {"cost": 3}, "cost must be a CostModel or None, got 3"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(seen: Any, how: dict[str, Any], message: str) -> None:
    """Each is a ``ConfigError`` that says what to give."""
    with pytest.raises(ConfigError, match=message):
        plan_capture_grid(seen, **how)


def test_graphed_takes_the_plan() -> None:
    """Its combinations are the sizes, and each call takes the smallest that has room for it."""
    plan = plan_capture_grid({(2, 5): 3.0, (4, 5): 1.0, (4, 9): 1.0}, COST, max_graphs=2)
    step = gd.graphed(torch.nn.Tanh(), dynamic={"input": {0: "batch", 1: "seq"}}, sizes=plan, options=AT_ONCE)
    assert step.sizes == plan.points
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 4)
            torch.testing.assert_close(step(x), x.tanh())
    assert step.entries[0].key in plan.points
    step.use_sizes(plan_capture_grid({(3, 3): 1.0}, COST, max_graphs=1))
    assert step.sizes == ((3, 3),)
