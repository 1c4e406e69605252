"""Time and memory of planning, against the textbook's table of all sizes by all numbers of graphs.

Both find a set with the same expected step time. The table is left out above 512 sizes, where it takes long.
"""

import tracemalloc
from collections.abc import Callable
from time import perf_counter

import numpy as np

from graphdispatch import CUDAGraphMode
from graphdispatch.plan import CostModel, Workload, plan_capture_sizes

from .timing import Effort, Row

__all__ = ["TITLE", "rows"]

TITLE = "planning, compared with the textbook's table of all sizes by all numbers of graphs"
TABLE_TO = 512
COST = CostModel.of(lambda n: 20 + 0.03 * n, lambda n: 8 + 0.03 * n)


def table(workload: Workload, count: int) -> float:
    """The least expected step time with ``count`` graphs, in O(K N^2) time and O(N^2) memory."""
    sizes, weights = workload.sizes, workload.counts
    eager = COST.eager_ms.at(sizes)
    graph = COST.graphs(CUDAGraphMode.FULL).step_ms.at(sizes)
    running = np.zeros((len(sizes) + 1, len(sizes)))
    np.cumsum(weights[:, None] * np.minimum(eager[:, None], graph), axis=0, out=running[1:])
    cost = np.diagonal(running[1:]) - running[:-1]
    cost[np.tril_indices(len(sizes), -1)] = np.inf
    rest = np.concatenate([np.cumsum((weights * eager)[::-1])[::-1], [0.0]])
    least = np.concatenate([[0.0], np.full(len(sizes), np.inf)])
    best = float(rest[0])
    for _ in range(count):
        least = np.concatenate([[np.inf], (least[:-1, None] + cost).min(axis=0)])
        best = min(best, float((least + rest).min()))
    return best / workload.total


def planned(workload: Workload, count: int) -> float:
    """The same by the planner."""
    proof = plan_capture_sizes(workload, COST, max_graphs=count, prior=0).proof
    assert proof is not None
    return proof.expected_ms


def measured(function: Callable[[Workload, int], float], workload: Workload, count: int) -> tuple[float, float, float]:
    """What ``function`` finds, its time in seconds, and the most memory that it held, in MiB (in a second run)."""
    start = perf_counter()
    found = function(workload, count)
    seconds = perf_counter() - start
    tracemalloc.start()
    function(workload, count)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found, seconds, peak / 2**20


def rows(effort: Effort) -> list[Row]:
    """A line for the time of each range and number of graphs, and one for the memory."""
    random = np.random.default_rng(0)
    times, memory = [], []
    for largest in (128, 512, 2048, 8192):
        workload = Workload.from_histogram({n: float(random.random() / n) for n in range(1, largest + 1)})
        for count in (count for count in (8, 64, 512) if count < largest):
            found, seconds, peak = measured(planned, workload, count)
            table_seconds = table_peak = None
            if largest <= TABLE_TO:
                expected, table_seconds, table_peak = measured(table, workload, count)
                assert abs(found - expected) <= 1e-9 * expected
            times.append(
                Row(f"{largest} sizes, {count} graphs, ms", 1e3 * seconds, _scaled(table_seconds), unit="ms or MiB")
            )
            memory.append(Row(f"{largest} sizes, {count} graphs, MiB", peak, table_peak, unit="ms or MiB"))
    return times + memory


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
