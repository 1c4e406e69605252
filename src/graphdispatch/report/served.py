"""How a plan serves batches of each size: which graph, and how much padding."""

from collections.abc import Mapping

import numpy as np

from ..modes import CUDAGraphMode
from ..plan.cost import CostModel
from ..plan.plan import Plan, weights_by_mode
from ..plan.traffic import Floats, Ints
from ..plan.workload import Workload

__all__ = ["graph_of", "graph_shares", "least_step_ms", "padding_of", "shares_of"]


def graph_of(plan: Plan, kind: CUDAGraphMode, sizes: Ints) -> Ints:
    """For each of ``sizes``, the size of the graph that serves such a batch; 0 if it runs eagerly."""
    graphs = [graph for graph in plan.graphs if graph.mode is kind]
    ends, first = (
        np.array([*(graph[at] for graph in graphs), beyond], np.int64)
        for at, beyond in ((1, 0), (2, np.iinfo(np.int64).max))
    )
    index = np.searchsorted(ends[:-1], sizes)
    return np.where(sizes >= first[index], ends[index], 0)


def padding_of(plan: Plan, kind: CUDAGraphMode, top: int) -> Floats:
    """The padding of batches of 1 to ``top`` tokens, as a share of their tokens; NaN if they run eagerly."""
    sizes = np.arange(1, top + 1)
    graphs = graph_of(plan, kind, sizes)
    return np.where(graphs > 0, graphs / sizes - 1.0, np.nan)


def shares_of(plan: Plan, workload: Workload) -> dict[str, float]:
    """How the steps of ``workload`` run under ``plan``, as shares of all steps, which sum to 1."""
    found: dict[str, float] = {}
    for kind, weights in weights_by_mode(plan.mode, workload).items():
        graphs = graph_of(plan, kind, workload.sizes)
        largest = max(plan.sizes_of(kind), default=0)
        ways = {
            "graph of this size": graphs == workload.sizes,
            "graph, padded": graphs > workload.sizes,
            "eager: faster than padding": (graphs == 0) & (workload.sizes <= largest),
            "eager: above the largest graph": (workload.sizes > largest) & bool(largest),
            "eager: no graphs for this kind": np.full(len(graphs), not largest),
        }
        for name, way in ways.items():
            found[name] = found.get(name, 0.0) + float(weights @ way) / workload.total
    return found


def graph_shares(plan: Plan, workload: Workload) -> Mapping[tuple[CUDAGraphMode, int], tuple[float, float]]:
    """For each graph's mode and size: its share of the steps, and the padding as a share of those steps' tokens."""
    found = {}
    for kind, weights in weights_by_mode(plan.mode, workload).items():
        graphs = graph_of(plan, kind, workload.sizes)
        for size in plan.sizes_of(kind):
            steps = weights * (graphs == size)
            tokens = float(steps @ workload.sizes)
            padded = float(steps @ (size - workload.sizes))
            found[kind, size] = float(steps.sum()) / workload.total, padded / tokens if tokens else 0.0
    return found


def least_step_ms(mode: CUDAGraphMode, workload: Workload, cost: CostModel, top: int) -> float:
    """The mean step time with a graph for every size up to ``top``; a step takes its graph or eager, as is faster."""
    time = 0.0
    for kind, weights in weights_by_mode(mode, workload).items():
        step_ms = cost.eager_ms.at(workload.sizes)
        if kind.has_graphs():
            faster = np.minimum(step_ms, cost.graphs(kind).step_ms.at(workload.sizes))
            step_ms = np.where(workload.sizes <= top, faster, step_ms)
        time += float(weights @ step_ms)
    return time / workload.total
