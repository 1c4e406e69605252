"""How many steps find their graph ready: with prediction, without, and with an oracle that knows the future.

    python benchmarks/prediction.py [--capacity N ...] [TRACE.csv[.gz] ...]

A trace has the columns ``num_tokens`` and ``t_ms`` (when the step starts); without a trace some are generated. Steps
last 8 ms and 0.03 ms for each token, and a capture CAPTURE_MS, all of it simulated. All three ways capture a size at
its second sighting; two of them capture in pauses besides, which the oracle fills with the sizes that really come
next. Steps above the largest size, which no graph serves, are left out of the shares.
"""

import argparse
import csv
import gzip
import random
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from graphdispatch.demo.trace import generate_trace
from graphdispatch.descriptors import DispatchKey
from graphdispatch.dispatch.prediction import Prewarmer, SizePredictor
from graphdispatch.sizes import ladder

CAPTURE_MS = 60.0
POLL_MS = 10.0
EARLY = 2000


class Step(NamedTuple):
    """When a step starts and ends, in milliseconds, and its size."""

    start: float
    end: float
    tokens: int


class Outcome(NamedTuple):
    """What one way of capturing came to, over the steps that a graph could serve."""

    served: int
    ready: int
    early: int
    early_ready: int
    captures: int
    in_pauses: int
    stalled_ms: float


class Clock:
    """A clock that the simulation sets, in seconds."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        """The time in seconds."""
        return self.ms / 1000


class Future:
    """Which size is needed when: what only the oracle knows."""

    def __init__(self, sizes: list[int | None]) -> None:
        self._uses: dict[int, list[int]] = defaultdict(list)
        for step, size in enumerate(sizes):
            if size is not None:
                self._uses[size].append(step)

    def next_use(self, size: int, step: int) -> float:
        """The first step after ``step`` that needs ``size``; infinity if none does."""
        uses = self._uses[size]
        place = bisect_right(uses, step)
        return uses[place] if place < len(uses) else float("inf")

    def plan(self, step: int, ready: Collection[int], capacity: int) -> list[int]:
        """The sizes without a graph that are needed soonest, if sooner than a graph that would have to go."""
        coming = sorted((use, size) for size in self._uses if (use := self.next_use(size, step)) < float("inf"))
        return [size for _, size in coming[:capacity] if size not in ready]


class Graphs:
    """The graphs that exist, at most ``capacity`` of them; ``worst`` names the one to evict."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.last_use: dict[int, int] = {}
        self.captures = 0

    def capture(self, size: int, step: int, worth: Callable[[int], float]) -> None:
        """Make a graph of ``size``, and room for it by dropping the least worth."""
        while len(self.last_use) >= self.capacity:
            del self.last_use[min(self.last_use, key=worth)]
        self.last_use[size] = step
        self.captures += 1


def simulate(steps: list[Step], sizes: tuple[int, ...], capacity: int, way: str) -> Outcome:
    """Run the steps with one way of capturing: ``none``, ``predicted`` or ``oracle``."""
    clock = Clock()
    predictor = SizePredictor(sizes)
    prewarmer = Prewarmer(predictor, capture_ms=CAPTURE_MS, clock=clock)
    padded = [sizes[i] if (i := bisect_left(sizes, step.tokens)) < len(sizes) else None for step in steps]
    future, graphs, seen = Future(padded), Graphs(capacity), Counter[int]()
    counts, in_pauses, stalled = Counter[str](), 0, 0.0

    for now, (step, size) in enumerate(zip(steps, padded, strict=True)):

        def worth(other: int, now: int = now) -> float:
            return -future.next_use(other, now) if way == "oracle" else graphs.last_use[other]

        prewarmer_key = DispatchKey(step.tokens, 1)
        clock.ms = max(clock.ms, step.start)
        prewarmer.step_started(prewarmer_key)
        if size is not None:
            seen[size] += 1
            early = now < EARLY
            counts["served"] += 1
            counts["early"] += early
            if size in graphs.last_use:
                graphs.last_use[size] = now
                counts["ready"] += 1
                counts["early_ready"] += early
            elif seen[size] > 1:
                graphs.capture(size, now, worth)
        clock.ms = max(clock.ms, step.end)
        prewarmer.step_ended()
        following = steps[now + 1].start if now + 1 < len(steps) else clock.ms
        wait = POLL_MS
        while way != "none" and clock.ms + wait < following:
            clock.ms += wait
            # The oracle, too, works only where the planner would have had the time.
            may = prewarmer.plan((), None) if way == "oracle" else prewarmer.plan(graphs.last_use, capacity)
            if way == "oracle" and may:
                may = future.plan(now, graphs.last_use, capacity)
            if may:
                graphs.capture(may[0], now, worth)
                in_pauses += 1
                clock.ms += CAPTURE_MS
                prewarmer.record_capture(CAPTURE_MS)
                stalled += max(0.0, clock.ms - following)
            else:
                wait *= 2
    return Outcome(
        counts["served"], counts["ready"], counts["early"], counts["early_ready"], graphs.captures, in_pauses, stalled
    )


def read(path: Path) -> list[Step]:
    """The steps of a trace file."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = [(float(row["t_ms"]), int(row["num_tokens"])) for row in csv.DictReader(file)]
    return [Step(start, start + 8 + 0.03 * tokens, tokens) for start, tokens in rows]


def generated(seed: int) -> list[Step]:
    """A generated trace with pauses of random length between its bursts."""
    rng = random.Random(seed)
    steps, at = [], 0.0
    for shape in generate_trace(20_000, 64, seed):
        end = at + 8 + 0.03 * shape.num_tokens
        steps.append(Step(at, end, shape.num_tokens))
        at = end + (rng.uniform(100, 1000) if rng.random() < 0.01 else 0.0)
    return steps


def main() -> None:
    """Print a line for each trace, capacity and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--capacity", type=int, nargs="+", default=[64, 16, 8])
    parser.add_argument("--max-size", type=int, default=512)
    options = parser.parse_args()
    sizes = ladder("vllm", options.max_size)
    named = {path.name.removesuffix(".gz").removesuffix(".csv"): read(path) for path in options.traces}
    for name, steps in (named or {f"generated {seed}": generated(seed) for seed in (0, 1)}).items():
        idle = sum(max(0.0, b.start - a.end) for a, b in pairwise(steps)) / steps[-1].end
        print(f"{name}: {len(steps)} steps, {100 * idle:.1f} % idle, {len(sizes)} sizes up to {sizes[-1]}")
        for capacity in options.capacity:
            for way in ("none", "predicted", "oracle"):
                found = simulate(steps, sizes, capacity, way)
                print(
                    f"  {capacity:3} graphs, {way:9}: ready {100 * found.ready / found.served:7.3f} % "
                    f"(first {EARLY} steps {100 * found.early_ready / max(1, found.early):7.3f} %), not ready "
                    f"{found.served - found.ready:6}, captures in steps {found.captures - found.in_pauses:6}, "
                    f"in pauses {found.in_pauses:5}, steps delayed by {found.stalled_ms / 1000:.2f} s in all"
                )


if __name__ == "__main__":
    main()
