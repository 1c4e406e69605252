"""Time and memory of planning, against the textbook's table of all sizes by all numbers of graphs.

    python -m benchmarks.planning [--largest N ...] [--graphs K ...] [--table-to N]

Both find a set with the same expected step time. The table is left out above ``--table-to`` sizes, where it takes long.
"""

import argparse
import tracemalloc
from collections.abc import Callable
from time import perf_counter

import numpy as np

from graphdispatch.modes import CUDAGraphMode
from graphdispatch.plan.cost import CostModel
from graphdispatch.plan.planner import plan_capture_sizes
from graphdispatch.plan.workload import Workload

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


def main() -> None:
    """Print a line for each range and number of graphs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--graphs", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--table-to", type=int, default=512)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    print(f"{'sizes':>6}{'graphs':>8}{'plan, s':>10}{'MiB':>8}{'table, s':>10}{'MiB':>8}")
    for largest in options.largest:
        workload = Workload.from_histogram({n: float(random.random() / n) for n in range(1, largest + 1)})
        for count in [count for count in options.graphs if count < largest]:
            found, seconds, peak = measured(planned, workload, count)
            line = f"{largest:6}{count:8}{seconds:10.3f}{peak:8.1f}"
            if largest <= options.table_to:
                expected, table_seconds, table_peak = measured(table, workload, count)
                assert abs(found - expected) <= 1e-9 * expected
                line += f"{table_seconds:10.3f}{table_peak:8.1f}"
            print(line)


if __name__ == "__main__":
    main()
