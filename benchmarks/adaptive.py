"""What the adaptive policy costs on a simulated device, against fixed policies and an oracle.

    python benchmarks/adaptive.py [--steps N] [--delay N] [TRACE.csv[.gz] ...]

The device's costs are functions of size and progress, known to the oracle alone; recorded times carry noise, totals do
not. Records reach the policy DELAY steps late and out of order, as polled device timers do. Without a trace a generated
one is used. "late" leaves out the first tenth of the steps.
"""

import argparse
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from graphdispatch.demo.trace import Step, generate_trace, read_trace
from graphdispatch.descriptors import DispatchKey
from graphdispatch.dispatch.adaptive import AdaptiveDispatchPolicy
from graphdispatch.dispatch.policies import DefaultDispatchPolicy, DispatchPolicy
from graphdispatch.modes import DispatchMode
from graphdispatch.sizes import ladder

SIZES = ladder("vllm", 512)
EAGER, GRAPH = DispatchMode.EAGER, DispatchMode.CUDAGRAPH


class Device(NamedTuple):
    """A step in milliseconds by tokens and progress (0 to 1), eager and by graph, and the spread of its measurement."""

    eager: Callable[[int, float], float]
    graph: Callable[[int, float], float]
    noise: float = 0.05

    def costs(self, tokens: int, progress: float) -> dict[DispatchMode, float]:
        """The cost of each mode that can serve the batch."""
        costs = {EAGER: self.eager(tokens, progress)}
        if tokens <= SIZES[-1]:
            costs[GRAPH] = self.graph(SIZES[bisect_left(SIZES, tokens)], progress)
        return costs


DEVICES = {
    "graphs win": Device(lambda n, _: 6 + 0.02 * n, lambda n, _: 2 + 0.02 * n),
    "graphs win twentyfold": Device(lambda n, _: 20 + 0.02 * n, lambda n, _: 1 + 0.02 * n),
    "graphs win by a little": Device(lambda n, _: 4 + 0.02 * n, lambda n, _: 3.8 + 0.02 * n),
    "graphs lose": Device(lambda n, _: 2 + 0.02 * n, lambda n, _: 3 + 0.03 * n),
    "cross-over in size": Device(lambda n, _: 4 + 0.02 * n, lambda n, _: 1.5 + 0.06 * n),
    "cliff in size": Device(lambda n, _: 3 + 0.02 * n, lambda n, _: 1 + 0.02 * n + 6 * (n > 48)),
    "graphs become slow": Device(lambda n, _: 4 + 0.02 * n, lambda n, t: (2 + 0.02 * n) * (3 if t > 0.4 else 1)),
    "graphs become fast": Device(lambda n, _: 4 + 0.02 * n, lambda n, t: (2 + 0.02 * n) * (1 if t > 0.4 else 3)),
    "eager becomes fast": Device(lambda n, t: (6 + 0.02 * n) * (0.3 if t > 0.4 else 1), lambda n, _: 3 + 0.02 * n),
    "noise, graphs win": Device(lambda n, _: 5 + 0.02 * n, lambda n, _: 4 + 0.02 * n, 0.5),
    "noise, graphs lose": Device(lambda n, _: 4 + 0.02 * n, lambda n, _: 5 + 0.02 * n, 0.5),
    "noise, cross-over": Device(lambda n, _: 4 + 0.02 * n, lambda n, _: 1.5 + 0.06 * n, 0.5),
}


class Fixed(DispatchPolicy):
    """Takes ``mode`` wherever it can be had."""

    def __init__(self, mode: DispatchMode) -> None:
        self.mode = mode

    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether ``mode`` is a graph and there is one."""
        return graph_available and self.mode is GRAPH

    def select_mode(self, key: DispatchKey, available_modes: object) -> DispatchMode:
        """``mode`` if it is available, or eager."""
        return self.mode if self.mode in tuple(available_modes) else EAGER  # type: ignore[arg-type]


def simulate(keys: list[DispatchKey], device: Device, delay: int) -> tuple[Counter[str], Counter[str]]:
    """Total milliseconds by policy, over all steps and over the late ones."""
    rng = random.Random(0)
    adaptive = AdaptiveDispatchPolicy(sizes=SIZES)
    policies = {
        "adaptive": adaptive,
        "always": Fixed(GRAPH),
        "never": Fixed(EAGER),
        "default": DefaultDispatchPolicy(),
    }
    total, late = Counter[str](), Counter[str]()
    waiting: list[tuple[DispatchKey, DispatchMode, float]] = []
    for step, key in enumerate(keys):
        costs = device.costs(key.num_tokens, step / len(keys))
        spent = {"oracle": min(costs.values())}
        for name, policy in policies.items():
            mode = policy.select_mode(key, tuple(costs))
            spent[name] = costs[mode]
            if policy is adaptive:
                noise = rng.lognormvariate(-(device.noise**2) / 2, device.noise)
                waiting.append((key, mode, costs[mode] * noise))
        if len(waiting) > delay:
            adaptive.record(*waiting.pop(rng.randrange(len(waiting))))
        total.update(spent)
        if step >= len(keys) / 10:
            late.update(spent)
    return total, late


def time_decision(keys: list[DispatchKey], policy: DispatchPolicy) -> float:
    """Microseconds of one ``select_mode``, the fastest of five rounds."""
    modes = (GRAPH, EAGER)
    best = float("inf")
    for _ in range(5):
        start = perf_counter()
        for key in keys:
            policy.select_mode(key, modes)
        best = min(best, perf_counter() - start)
    return 1e6 * best / len(keys)


def key_of(step: Step) -> DispatchKey:
    """The dispatch key of a trace's step."""
    return DispatchKey(step.num_tokens, step.num_reqs, step.max_seq_len, step.num_prefill_reqs > 0)


def main() -> None:
    """Print a table for each trace, and what a decision costs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--delay", type=int, default=8)
    options = parser.parse_args()
    traces = {path.name: read_trace(path, options.steps) for path in options.traces}
    keys: list[DispatchKey] = []
    for name, steps in (traces or {"generated": generate_trace(options.steps, 64, 1)}).items():
        keys = [key_of(step) for step in steps]
        print(f"{name}: {len(keys)} steps; totals as multiples of the oracle's")
        print(f"  {'device':24}{'oracle':>12}{'always':>9}{'never':>9}{'default':>9}{'adaptive':>9}{'late':>9}")
        for title, device in DEVICES.items():
            total, late = simulate(keys, device, options.delay)
            ratios = [total[way] / total["oracle"] for way in ("always", "never", "default", "adaptive")]
            ratios.append(late["adaptive"] / late["oracle"])
            print(f"  {title:24}{total['oracle'] / 1000:10.2f} s" + "".join(f"{ratio:9.4f}" for ratio in ratios))
    learnt = AdaptiveDispatchPolicy(sizes=SIZES)
    for key in keys[:2000]:
        learnt.record(key, learnt.select_mode(key, (GRAPH, EAGER)), 1.0)
    fixed = time_decision(keys, DefaultDispatchPolicy())
    print(f"one decision: adaptive {time_decision(keys, learnt):.2f} us, default {fixed:.2f} us")


if __name__ == "__main__":
    main()
