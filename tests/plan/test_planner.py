"""``plan_sizes``: the best sizes for the traffic, within all limits, also for traffic that moves."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode
from graphdispatch.errors import ConfigError
from graphdispatch.plan import CostModel, Plan, Workload, plan_sizes

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
COST = CostModel(
    eager_ms={1: 20, 64: 22}, full_ms={1: 8, 64: 16}, piecewise_ms={1: 9, 64: 17}, pool_bytes={1: 1e6, 64: 64e6}
)
MIB = 2**20

counts = st.dictionaries(st.integers(1, 60), st.floats(0.1, 10), min_size=1, max_size=12)


def best_of_all(workload: Workload, cost: CostModel, mode: CUDAGraphMode, top: int, most: int, memory: float) -> float:
    """The least mean step time of any set of sizes within the limits, by trying every one."""
    kinds = sorted({mode.decode_mode(), mode.mixed_mode()} - {CUDAGraphMode.NONE})
    candidates = list(itertools.product(kinds, range(1, top + 1)))
    least = Plan(mode=mode, graphs={}).evaluate(workload, cost).step_ms
    for count in range(1, most + 1):
        for chosen in itertools.combinations(candidates, count):
            sizes = {kind: tuple(size for each, size in chosen if each is kind) for kind in kinds}
            graphs = {kind: each for kind, each in sizes.items() if each}
            found = Plan(mode=mode, graphs=graphs).evaluate(workload, cost)
            if found.memory <= memory:
                least = min(least, found.step_ms)
    return least


@pytest.mark.parametrize("mode", list(CUDAGraphMode)[1:])
def test_the_plan_is_the_best_of_all(mode: CUDAGraphMode) -> None:
    """In every mode, of one set of graphs or two, no set of as many sizes is faster."""
    rng = random.Random(int(mode))
    for _ in range(12):
        sizes = rng.sample(range(1, 7), 4)
        weights = {size: rng.random() for size in sizes}
        workload = Workload.from_histogram(weights, {size: rng.choice([0, 0.5, 1]) * weights[size] for size in sizes})
        most = rng.randint(1, 3)
        cost = CostModel(
            eager_ms={1: rng.uniform(1, 9), 6: 9}, full_ms={1: 1, 6: rng.uniform(1, 6)},
            piecewise_ms={1: 2, 6: rng.uniform(2, 7)}, graph_bytes=1, pool_bytes=0,
        )  # fmt: skip
        if mode is CUDAGraphMode.FULL_DECODE_ONLY and not (workload.is_decode.any()):
            continue
        plan = plan_sizes(workload, cost, max_graphs=most, max_size=6, smoothing=0, mode=mode)
        expected = best_of_all(workload, cost, mode, 6, most, np.inf)
        assert plan.evaluate(workload, cost).step_ms == pytest.approx(expected, rel=1e-9), (workload, plan)


@pytest.mark.parametrize("graphs", [2, 3, 4, 5])
def test_a_limit_of_memory_is_used_as_well_as_can_be(graphs: int) -> None:
    """Where graphs cost alike but for the pool of the largest one, the plan is the best set within the memory."""
    workload = Workload.from_histogram({1: 5.0, 2: 1.0, 4: 3.0, 5: 1.0, 7: 0.5})
    cost = COST.model_copy(update={"graph_bytes": {1: 10.0}, "pool_bytes": {1: 3.0, 7: 21.0}})
    memory = 10.0 * graphs + 9
    plan = plan_sizes(workload, cost, memory=memory, smoothing=0)
    assert plan.evaluate(workload, cost).step_ms == pytest.approx(best_of_all(workload, cost, FULL, 7, 5, memory))


@given(counts, st.integers(1, 12), st.floats(30, 400), st.floats(0.05, 1), st.sampled_from([1, 2, 8]), st.booleans())
def test_all_limits_hold_together(
    weights: dict[Any, float], most: int, mebibytes: float, seconds: float, grid: int, smooths: bool
) -> None:
    """The number, bytes, time, largest size and multiples, whatever the traffic; eager is never better."""
    workload = Workload.from_histogram(weights)
    cost = COST.model_copy(update={"capture_ms": {1: 20.0, 64: 60.0}, "graph_bytes": {1: 8.0 * MIB, 64: 20.0 * MIB}})
    plan = plan_sizes(
        workload, cost, max_graphs=most, memory=mebibytes * MIB, capture_time=seconds, max_size=48, multiple_of=grid,
        smoothing=0.7 if smooths else 0.0,
    )  # fmt: skip
    found = plan.evaluate(workload, cost)
    assert len(plan.sizes) <= most
    assert found.memory <= mebibytes * MIB * 1.0001
    assert found.capture_ms <= 1e3 * seconds * 1.0001
    assert all(size <= 48 and size % grid == 0 for size in plan.sizes)
    assert found.step_ms <= found.eager_ms * (1 + 1e-9)


def test_smoothing_keeps_small_and_largest_sizes() -> None:
    """What was never seen has a graph as well, if the limits leave most graphs for what was."""
    steps = Workload.from_steps([20, 21, 22] * 9)
    assert set(plan_sizes(steps, max_graphs=16, max_size=64).sizes) >= {1, 2, 4, 8, 64}
    assert set(plan_sizes(steps, max_graphs=16, max_size=64, smoothing=0).sizes) == {20, 21, 22}


def test_many_sizes_are_thinned() -> None:
    """Of 20,000 sizes, what is frequent and an even grid are candidates; every step still has its graph."""
    rng = np.random.default_rng(0)
    workload = Workload.from_steps(np.clip(rng.lognormal(7, 1, 5000), 1, 20_000).astype(int).tolist())
    cost = CostModel(eager_ms={1: 20, 20_000: 900}, full_ms={1: 8, 20_000: 800})
    found = plan_sizes(workload, cost, max_graphs=40).evaluate(workload, cost)
    assert (found.graphs, found.hit_rate) == (40, 1.0)
    assert found.padding < 0.06


def calls(kind: str) -> list[tuple[int, ...]]:
    """Some batch sizes and lengths."""
    rng = np.random.default_rng(1)
    if kind == "uniform":
        return [(int(rng.integers(1, 9)), int(rng.integers(16, 65))) for _ in range(400)]
    return [
        (int(np.clip(rng.lognormal(1.5, 0.8), 1, 32)), int(np.clip(rng.lognormal(4, 0.8), 8, 512))) for _ in range(400)
    ]


@pytest.mark.parametrize("kind", ["uniform", "lognormal"])
@pytest.mark.parametrize("most", [6, 12])
def test_combinations_beat_every_product_of_sizes(kind: str, most: int) -> None:
    """In two dimensions no product of quantiles of batch sizes and lengths, of as many graphs, is faster."""
    workload = Workload.from_steps(calls(kind))
    cost = CostModel(eager_ms={1: 1.0, 16_384: 40.0}, full_ms={1: 0.3, 16_384: 38.0})
    planned = plan_sizes(workload, cost, max_graphs=most).evaluate(workload, cost)
    for rows in (1, 2, 3, 4, 6):
        axes = [
            sorted({int(size) for size in np.quantile(column, np.linspace(0, 1, count + 1)[1:], method="higher")})
            for column, count in zip(workload.shapes.T, (rows, most // rows), strict=True)
        ]
        product = Plan.from_sizes(itertools.product(*axes)).evaluate(workload, cost)
        assert planned.step_ms <= product.step_ms * (1 + 1e-9)
    assert planned.graphs <= most


def test_combinations_are_the_best_of_all_on_a_small_case() -> None:
    """Against every set of three of nine candidates."""
    rng = random.Random(0)
    cost = CostModel(eager_ms={1: 5, 9: 9}, full_ms={1: 1, 9: 6})
    for _ in range(10):
        points = list(itertools.product((1, 2, 3), (1, 2, 3)))
        workload = Workload.from_histogram({point: rng.random() ** 3 for point in points})
        plan = plan_sizes(workload, cost, max_graphs=3)
        sets = map(Plan.from_sizes, itertools.combinations(points, 3))
        least = min(each.evaluate(workload, cost).step_ms for each in sets)
        assert plan.evaluate(workload, cost).step_ms <= least * 1.01  # swaps may end beside the best


WRONG: list[tuple[Any, ...]] = [
    ({"max_graphs": 0}, "max_graphs must be an integer >= 1, got 0"),
    ({"memory": -1}, "memory must be a finite number above 0"),
    ({"memory": "2GiB"}, "memory must be a finite number above 0, got '2GiB'"),
    ({"multiple_of": 2**30}, "max_size must be at most 1048576 in one dimension"),
    ({"memory": 1000}, "leave room for a graph, which takes 27"),
    ({"capture_time": 1e-3}, "leave room for a graph, .* 0.06 s"),
    ({"max_size": 4, "multiple_of": 8}, "max_size must be an integer >= 8, got 4"),
    ({"smoothing": 1.0}, "smoothing must be a share"),
    ({"mode": "NONE"}, "mode must have graphs"),
    ({"mode": "sideways"}, "mode must be one of"),
    ({"cost": 3}, "cost must be a CostModel or None"),
    ({"cost": CostModel(eager_ms=1), "mode": "FULL"}, "cost must know graphs of mode FULL; give full_ms"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_a_bad_argument_is_named(options: dict[str, Any], message: str) -> None:
    """With what was expected, and what came."""
    with pytest.raises(ConfigError, match=message):
        plan_sizes(Workload.from_steps([1, 2, 3]), **options)


def test_what_is_no_workload_is_refused() -> None:
    """With the way to make one; so are two sets of graphs in two dimensions."""
    with pytest.raises(ConfigError, match=r"workload must be a Workload, as Workload\.from_steps"):
        plan_sizes([1, 2, 3])  # type: ignore[arg-type]
    both = Workload.from_steps([(1, 2), (3, 4)], [True, False])
    with pytest.raises(ConfigError, match="one mode for several dimensions, got FULL_AND_PIECEWISE"):
        plan_sizes(both, mode="FULL_AND_PIECEWISE")
