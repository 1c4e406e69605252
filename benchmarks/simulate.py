"""How fast the simulator is, in steps a second, and what it says of fixed and learning policies.

Without a trace, requests of two kinds (chat and long documents) are made by the scheduler model. The device is stated
by numbers, not measured: eager 12 ms, PIECEWISE 9 ms, FULL 8 ms, and 0.03 ms for each token.
"""

import gc
from time import perf_counter
from typing import Any

import numpy as np

from graphdispatch import CUDAGraphMode
from graphdispatch.engines import AdaptiveDispatchPolicy, CudagraphKeyDispatcher, DefaultDispatchPolicy, named_sizes
from graphdispatch.memory.admission import Admission
from graphdispatch.memory.cache import GraphCache
from graphdispatch.plan import CostModel, Workload
from graphdispatch.plan.scheduler import SchedulerModel
from graphdispatch.plan.traffic import Requests
from graphdispatch.simulation.simulator import simulate

from .timing import Effort, Row

__all__ = ["TITLE", "rows"]

TITLE = "the simulator's own time for a step"
STEPS = 50_000
COST = CostModel.of(lambda n: 12 + 0.03 * n, lambda n: 8 + 0.03 * n, lambda n: 9 + 0.03 * n)


def generated(requests: int, seed: int = 0) -> Workload:
    """Steps of Poisson arrivals, nine in ten of them chat."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(120.0, requests))
    is_chat = rng.random(requests) < 0.9
    prompt = np.where(is_chat, rng.geometric(1 / 300, requests), rng.integers(2000, 20000, requests))
    output = rng.geometric(1 / 250, requests)
    return Workload.from_steps(*SchedulerModel().run(Requests(arrival, prompt, output)))


def rows(effort: Effort) -> list[Row]:
    """A line for each way of serving: the simulator's own time for a step."""
    made = []
    for path in effort.traces or (None,):
        workload = Workload.from_trace(path) if path else generated(STEPS // 10)
        settings: dict[str, dict[str, Any]] = {
            "every graph first": {},
            "admitted, room for 16": {"cache": GraphCache(16), "admission": Admission()},
            "default policy": {"policy": DefaultDispatchPolicy()},
            "adaptive policy": {"policy": AdaptiveDispatchPolicy(sizes=named_sizes("vllm", 512))},
        }
        for name, options in settings.items():
            keys = CudagraphKeyDispatcher(max_num_reqs=256)
            keys.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE)
            gc.collect()
            gc.disable()  # one collection takes as long as thousands of steps, and is not theirs
            start = perf_counter()
            result = simulate(workload, COST, keys, **options)
            spent = perf_counter() - start
            gc.enable()
            where = path.name.split(".")[0] if path else "generated"
            made.append(Row(f"{where}, {name}", 1e6 * spent / result.stats.calls))
    return made
