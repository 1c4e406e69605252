"""The dispatcher of a plan: it has exactly the plan's graphs, and runs eagerly what the plan wants eager."""

import reprlib

from ..decide.keys import CudagraphKeyDispatcher
from ..decide.table import CostModel
from ..errors import ConfigError
from ..modes import CUDAGraphMode
from .plan import Plan

__all__ = ["planned_dispatcher"]


def planned_dispatcher(plan: Plan, *, max_num_reqs: int = 1) -> CudagraphKeyDispatcher:
    """A dispatcher whose keys are the graphs of ``plan``, for a scheduler of ``max_num_reqs`` requests.

    Each request of uniform decode schedules one token. A batch below a graph's ``min_batch`` runs eagerly, unless the
    plan has a graph of another mode for it. Raises ``ConfigError`` for a plan without graphs.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"plan must be a Plan, got {reprlib.repr(plan)}; Plan.from_sizes() makes one of sizes, load() of a file"
        )
    if not plan.graphs:
        raise ConfigError("plan must have graphs, got none; every step runs eagerly")
    dispatcher = CudagraphKeyDispatcher(
        capture_sizes=plan.sizes, max_num_reqs=max(max_num_reqs, plan.sizes[-1]), cost=_cost_of(plan)
    )
    dispatcher.initialize_cudagraph_keys(plan.mode)
    for mode, keys in dispatcher.cudagraph_keys.items():
        planned = set(plan.sizes_of(mode))
        for key in keys:
            if key.num_tokens not in planned:
                dispatcher.remove_cudagraph_key(mode, key)
    return dispatcher


def _cost_of(plan: Plan) -> CostModel | None:
    """A cost model by which a batch below its graph's ``min_batch`` runs eagerly; None if no batch is."""
    min_batch = {(graph.mode, graph.size): graph.min_batch for graph in plan.graphs}
    size_before = {graph.mode: 0 for graph in plan.graphs}
    has_gaps = False
    for graph in plan.graphs:
        has_gaps |= graph.min_batch > size_before[graph.mode] + 1
        size_before[graph.mode] = graph.size

    def cost(mode: CUDAGraphMode, padded: int, real: int) -> float:
        if mode is CUDAGraphMode.NONE:
            return 1.0
        return 0.0 if real >= min_batch[mode, padded] else 2.0

    return cost if has_gaps else None
