"""The dispatcher of a plan: exactly its graphs, and eager where the plan says that eager is faster."""

import reprlib

from ..decide.keys import CudagraphKeyDispatcher
from ..decide.table import CostModel
from ..errors import ConfigError
from ..modes import CUDAGraphMode
from .plan import Plan

__all__ = ["planned_dispatcher"]


def planned_dispatcher(plan: Plan, *, max_num_reqs: int = 1) -> CudagraphKeyDispatcher:
    """A dispatcher whose keys are the graphs of ``plan``, for a scheduler of ``max_num_reqs`` requests.

    Uniform decode has one token for each request. A batch below a graph's ``min_batch`` runs eagerly, unless a graph of
    another mode is planned for it. Raises ``ConfigError`` for a plan without graphs.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"plan must be a Plan, got {reprlib.repr(plan)}; Plan.from_sizes() makes one of sizes, load() of a file"
        )
    if not plan.graphs:
        raise ConfigError("plan must have graphs, got none; every step runs eagerly")
    dispatcher = CudagraphKeyDispatcher(
        capture_sizes=plan.sizes, max_num_reqs=max(max_num_reqs, plan.sizes[-1]), cost=_preference(plan)
    )
    dispatcher.initialize_cudagraph_keys(plan.mode)
    for mode, keys in dispatcher.cudagraph_keys.items():
        planned = set(plan.sizes_of(mode))
        for key in keys:
            if key.num_tokens not in planned:
                dispatcher.remove_cudagraph_key(mode, key)
    return dispatcher


def _preference(plan: Plan) -> CostModel | None:
    """A cost by which batches below ``min_batch`` run eagerly; None if there are none."""
    min_batch = {(graph.mode, graph.size): graph.min_batch for graph in plan.graphs}
    above = {graph.mode: 0 for graph in plan.graphs}
    has_gaps = False
    for graph in plan.graphs:
        has_gaps |= graph.min_batch > above[graph.mode] + 1
        above[graph.mode] = graph.size

    def cost(mode: CUDAGraphMode, padded: int, real: int) -> float:
        if mode is CUDAGraphMode.NONE:
            return 1.0
        return 0.0 if real >= min_batch[mode, padded] else 2.0

    return cost if has_gaps else None
