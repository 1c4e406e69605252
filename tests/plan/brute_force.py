"""The best graphs by trying every set, for small cases, and random cases to compare with."""

import itertools
import random
from typing import Any, NamedTuple

import numpy as np

from graphdispatch import CUDAGraphMode
from graphdispatch.plan import CostModel, Workload


class Case(NamedTuple):
    workload: Workload
    cost: CostModel
    mode: CUDAGraphMode
    options: dict[str, Any]


def random_case(rng: random.Random) -> Case:
    """A few sizes, any mode, costs that are the same for all graphs or not, and any of the budgets and rules."""
    largest = rng.choice([4, 6, 8])
    sizes = sorted(rng.sample(range(1, largest + 1), rng.randint(1, min(5, largest))))
    counts = {size: rng.choice([1.0, 2.0, 5.0, 0.1 + 10 * rng.random()]) for size in sizes}
    decode = {size: rng.choice([0.0, count, count / 2]) for size, count in counts.items()}

    def curve(least: float) -> dict[int, float]:
        return dict(zip((1, rng.randint(2, 8), 30), sorted(least + 3 * rng.random() for _ in range(3)), strict=True))

    varied = rng.random() < 0.5
    cost = CostModel.of(
        curve(rng.choice([0, 1, 3])),
        curve(0),
        curve(0),
        capture_ms=curve(0.5) if varied else 2.0,
        graph_bytes=curve(0.5) if varied else 3.0,
        pool_bytes=rng.choice([0.0, curve(0), {1: 1.0, 30: 30.0}]),
    )
    grid = rng.choice([1, 1, 1, 2, 3])
    top = rng.choice([None, None, rng.randint(grid, 10)])
    on_grid = [size for size in sizes if size % grid == 0 and size <= (top or size)]
    options: dict[str, Any] = {
        "max_graphs": rng.choice([None, 1, 2, 3, 4]),
        "memory": rng.choice([None, None, 0.5 + 25 * rng.random()]),
        "capture_time": rng.choice([None, None, 1e-3 + 9e-3 * rng.random()]),
        "multiple_of": grid,
        "max_size": top,
        "must_include": rng.choice([(), (), tuple(on_grid[:1])]),
        "max_padding": rng.choice([None, None, None, grid - 1, grid - 0.7, grid, 3]),
    }
    if all(options[name] is None for name in ("max_graphs", "memory", "capture_time")):
        options["max_graphs"] = 2
    return Case(Workload.from_histogram(counts, decode), cost, rng.choice(list(CUDAGraphMode)[1:]), options)


def least_ms(case: Case) -> float | None:
    """The least mean step time of any sets within the budgets, by trying all; None if none is within them."""
    workload, cost, mode, options = case
    rest, choices = 0.0, []
    kinds: dict[CUDAGraphMode, Any] = {}
    for kind, weights in ((mode.decode_mode(), workload.decode), (mode.mixed_mode(), workload.mixed)):
        kinds[kind] = kinds.get(kind, 0) + weights
    for kind, weights in kinds.items():
        if kind is CUDAGraphMode.NONE:
            rest += float(weights @ cost.eager_ms.at(workload.sizes))
        elif weights.any():
            choices.append(_sets(case, kind, weights))
    total = np.zeros((5, 1))
    for sets in choices:
        sums = total[:, :, None] + sets[:, None, :]
        sums[4] = np.maximum(total[4][:, None], sets[4])
        total = sums.reshape(5, -1)
    ms, count, capture_ms, graph_bytes, pool_bytes = total
    within = (
        (count <= (options["max_graphs"] or np.inf))
        & (capture_ms <= 1e3 * (options["capture_time"] or np.inf) * (1 + 1e-9))
        & (graph_bytes + pool_bytes <= (options["memory"] or np.inf) * (1 + 1e-9))
    )
    return float((ms[within].min() + rest) / workload.total) if within.any() else None


def _sets(case: Case, kind: CUDAGraphMode, weights: Any) -> Any:
    """Every set that the rules allow for one kind of batch: its time, number, capture time, bytes and pool."""
    workload, cost, mode, options = case
    grid, must, padding = options["multiple_of"], options["must_include"], options["max_padding"]
    seen = workload.sizes[weights > 0].tolist()
    reach = options["max_size"] or -(-workload.largest // grid) * grid
    if mode.separate_routine():
        reach = max(min(reach, -(-2 * seen[-1] // grid) * grid), *must, 1)
    candidates = list(range(grid, reach + 1, grid))
    if padding is None:  # a graph above what it has to serve is never better
        candidates = sorted({up for size in seen if (up := -(-size // grid) * grid) <= reach} | set(must))
    costs, eager, found = cost.graphs(kind), cost.eager_ms.at(workload.sizes), []
    curves = (costs.step_ms, costs.capture_ms, costs.graph_bytes, costs.pool_bytes)
    step, capture_ms, graph_bytes, pool_bytes = (dict(zip(candidates, c.at(candidates), strict=True)) for c in curves)
    for count in range(min(len(candidates), options["max_graphs"] or 99) + 1):
        for sizes in itertools.combinations(candidates, count):
            steps = itertools.pairwise((0, *sizes))
            if set(must) - set(sizes) or any(
                b > (1 + (padding or 0)) * (a + 1) + 1e-9 for a, b in steps if padding is not None
            ):
                continue
            graph = np.array([*(step[size] for size in sizes), np.inf])
            ms = weights @ np.minimum(eager, graph[np.searchsorted(sizes, workload.sizes)])
            sums = (sum(each[size] for size in sizes) for each in (capture_ms, graph_bytes))
            found.append((ms, count, *sums, max((pool_bytes[size] for size in sizes), default=0.0)))
    return np.array(found).reshape(-1, 5).T
