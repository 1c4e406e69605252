"""How fast the simulator is, in steps a second, and what it says of fixed and learning policies.

    python -m benchmarks.simulate [--steps N] [TRACE.csv[.gz]]

Without a trace, requests of two kinds (chat and long documents) are made by the scheduler model. The device is stated
by numbers, not measured: eager 12 ms, PIECEWISE 9 ms, FULL 8 ms, and 0.03 ms for each token.
"""

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from graphdispatch.cache.admission import Admission
from graphdispatch.cache.store import GraphCache
from graphdispatch.dispatch.adaptive import AdaptiveDispatchPolicy
from graphdispatch.dispatch.keys import CudagraphKeyDispatcher
from graphdispatch.dispatch.policies import DefaultDispatchPolicy
from graphdispatch.modes import CUDAGraphMode
from graphdispatch.plan.cost import CostModel
from graphdispatch.plan.scheduler import SchedulerModel
from graphdispatch.plan.traffic import Requests
from graphdispatch.plan.workload import Workload
from graphdispatch.simulator import simulate
from graphdispatch.sizes import ladder

COST = CostModel.of(lambda n: 12 + 0.03 * n, lambda n: 8 + 0.03 * n, lambda n: 9 + 0.03 * n)


def generated(requests: int, seed: int = 0) -> Workload:
    """Steps of Poisson arrivals, nine in ten of them chat."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(120.0, requests))
    is_chat = rng.random(requests) < 0.9
    prompt = np.where(is_chat, rng.geometric(1 / 300, requests), rng.integers(2000, 20000, requests))
    output = rng.geometric(1 / 250, requests)
    return Workload.from_steps(*SchedulerModel().run(Requests(arrival, prompt, output)))


def main() -> None:
    """Print steps a second and the result of each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args()
    workload = Workload.from_trace(args.trace) if args.trace else generated(max(10, args.steps // 10))
    assert workload.steps is not None
    count = len(workload.steps.num_tokens)
    while count < args.steps:
        workload, count = workload.merge(workload), 2 * count
    workload = workload.split(args.steps / count)[0] if args.steps < count else workload
    print(workload)
    settings: dict[str, dict[str, Any]] = {
        "every graph first": {},
        "admitted, room for 16": {"cache": GraphCache(16), "admission": Admission()},
        "default policy": {"policy": DefaultDispatchPolicy()},
        "adaptive policy": {"policy": AdaptiveDispatchPolicy(sizes=ladder("vllm", 512))},
    }
    for name, options in settings.items():
        keys = CudagraphKeyDispatcher(max_num_reqs=256)
        keys.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE)
        start = perf_counter()
        result = simulate(workload, COST, keys, **options)
        spent = perf_counter() - start
        print(f"\n{name}: {result.stats.calls / spent:,.0f} steps/s\n{result}")


if __name__ == "__main__":
    main()
