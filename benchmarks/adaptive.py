"""What the adaptive policy costs on a simulated device, against an oracle that knows the device.

The device's costs are functions of size and progress, known to the oracle alone; recorded times carry noise, totals do
not. Records reach the policy some steps late and out of order, as polled device timers do.
"""

import csv
import gzip
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from graphdispatch.demo import generate_trace
from graphdispatch.engines import (
    AdaptiveDispatchPolicy,
    DefaultDispatchPolicy,
    DispatchKey,
    DispatchMode,
    DispatchPolicy,
    named_sizes,
)

from .timing import Effort, Row, row

__all__ = ["TITLE", "rows"]

TITLE = "mean step on simulated devices, compared with an oracle"
_STEPS = 3000
_DELAY = 8
SIZES = named_sizes("vllm", 512)
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


def simulate(keys: list[DispatchKey], device: Device, delay: int) -> Counter[str]:
    """Total milliseconds by policy."""
    rng = random.Random(0)
    adaptive = AdaptiveDispatchPolicy()
    policies: dict[str, DispatchPolicy] = {"adaptive": adaptive, "default": DefaultDispatchPolicy()}
    total = Counter[str]()
    waiting: list[tuple[DispatchKey, DispatchMode, float]] = []
    for step, key in enumerate(keys):
        costs = device.costs(key.num_tokens, step / len(keys))
        total["oracle"] += min(costs.values())
        for name, policy in policies.items():
            mode = policy.select_mode(key, tuple(costs))
            total[name] += costs[mode]
            if policy is adaptive:
                noise = rng.lognormvariate(-(device.noise**2) / 2, device.noise)
                waiting.append((key, mode, costs[mode] * noise))
        if len(waiting) > delay:
            adaptive.record(*waiting.pop(rng.randrange(len(waiting))))
    return total


def read(path: Path) -> list[DispatchKey]:
    """The dispatch keys of a trace's first steps."""
    columns = ("num_tokens", "num_reqs", "max_seq_len", "num_prefill_reqs")
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        steps = [[int(row[column]) for column in columns] for row in islice(csv.DictReader(file), _STEPS)]
    return [DispatchKey(tokens, reqs, longest, prompts > 0) for tokens, reqs, longest, prompts in steps]


def generated() -> list[DispatchKey]:
    """The dispatch keys of a generated trace."""
    steps = generate_trace(_STEPS, 64, 1, window=360)
    return [DispatchKey(s.num_tokens, s.num_reqs, max(s.positions) + 1, s.num_tokens > s.num_reqs) for s in steps]


def rows(effort: Effort) -> list[Row]:
    """The mean step of each device, over the traces or a generated one, and what one choice of a mode costs."""
    traces = {f"{path.name}, ": read(path) for path in effort.traces}
    found, keys = list[Row](), list[DispatchKey]()
    for trace, keys in (traces or {"": generated()}).items():
        for title, device in DEVICES.items():
            total = simulate(keys, device, _DELAY)
            for way in ("adaptive", "default"):
                case = f"{trace}{title}, {way} policy"
                found.append(Row(case, 1000 * total[way] / len(keys), 1000 * total["oracle"] / len(keys)))
    learnt, fixed = AdaptiveDispatchPolicy(), DefaultDispatchPolicy()
    for key in keys:
        learnt.record(key, learnt.select_mode(key, (GRAPH, EAGER)), 1.0)
    choices = [lambda policy=policy: policy.select_mode(keys[0], (GRAPH, EAGER)) for policy in (learnt, fixed)]
    return [*found, row("one choice, adaptive over default policy", *choices, effort.turns)]
