"""How many steps find no graph ready: with prediction, without, and with an oracle that knows the future.

A trace has the columns ``num_tokens`` and ``t_ms`` (when the step starts). Steps last 8 ms and 0.03 ms for each token,
and a capture 60 ms, all of it simulated. All three ways capture a size at its second sighting; two of them capture in
pauses besides, which the oracle fills with the sizes that really come next. Steps above the largest size, which no
graph serves, are left out.
"""

import csv
import gzip
import random
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from graphdispatch.demo.trace import generate_trace
from graphdispatch.engines import DispatchKey, Prewarmer, SizePredictor, named_sizes

from .timing import Effort, Row

__all__ = ["TITLE", "rows"]

TITLE = "steps that find no graph ready, compared with capturing at the second sighting alone (simulated)"
CAPTURE_MS = 60.0
POLL_MS = 10.0
EARLY = 2000


class Step(NamedTuple):
    """When a step starts and ends, in milliseconds, and its size."""

    start: float
    end: float
    tokens: int


class Outcome(NamedTuple):
    """What one way of capturing came to, in percent of the steps that a graph could serve."""

    missed: float
    missed_early: float
    delayed: float
    """The share of all steps that wait for a capture which was begun in the pause before."""


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

    def capture(self, size: int, step: int, score: Callable[[int], float]) -> None:
        """Make a graph of ``size``, and room for it by dropping the one with the lowest score."""
        while len(self.last_use) >= self.capacity:
            del self.last_use[min(self.last_use, key=score)]
        self.last_use[size] = step


def simulate(steps: list[Step], sizes: tuple[int, ...], capacity: int, way: str) -> Outcome:
    """Run the steps with one way of capturing: ``none``, ``predicted`` or ``oracle``."""
    clock = Clock()
    predictor = SizePredictor(sizes)
    prewarmer = Prewarmer(predictor, capture_ms=CAPTURE_MS, clock=clock)
    padded = [sizes[i] if (i := bisect_left(sizes, step.tokens)) < len(sizes) else None for step in steps]
    future, graphs, seen = Future(padded), Graphs(capacity), Counter[int]()
    counts = Counter[str]()

    for now, (step, size) in enumerate(zip(steps, padded, strict=True)):

        def score(other: int, now: int = now) -> float:
            return -future.next_use(other, now) if way == "oracle" else graphs.last_use[other]

        prewarmer_key = DispatchKey(step.tokens, 1)
        clock.ms = max(clock.ms, step.start)
        prewarmer.step_started(prewarmer_key)
        if size is not None:
            seen[size] += 1
            early = now < EARLY
            is_missing = size not in graphs.last_use
            counts.update(all=1, early=early, missed=is_missing, missed_early=early and is_missing)
            if not is_missing:
                graphs.last_use[size] = now
            elif seen[size] > 1:
                graphs.capture(size, now, score)
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
                graphs.capture(may[0], now, score)
                clock.ms += CAPTURE_MS
                prewarmer.record_capture(CAPTURE_MS)
                counts["delayed"] += clock.ms > following
            else:
                wait *= 2
    return Outcome(
        100 * counts["missed"] / counts["all"],
        100 * counts["missed_early"] / max(1, counts["early"]),
        100 * counts["delayed"] / len(steps),
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
    for shape in generate_trace(10_000, 64, seed):
        end = at + 8 + 0.03 * shape.num_tokens
        steps.append(Step(at, end, shape.num_tokens))
        at = end + (rng.uniform(100, 1000) if rng.random() < 0.01 else 0.0)
    return steps


def rows(effort: Effort) -> list[Row]:
    """The shares by trace, number of graphs and way; the steps at the start, where most is to be won, apart."""
    traces = {path.name.removesuffix(".gz").removesuffix(".csv"): read(path) for path in effort.traces}
    sizes, found = named_sizes("vllm", 512), []
    for name, steps in (traces or {"generated": generated(0)}).items():
        for capacity in (64, 16, 8):
            without, *others = (simulate(steps, sizes, capacity, way) for way in ("none", "predicted", "oracle"))
            for way, outcome in zip(("predicted", "oracle"), others, strict=True):
                case = f"{name}, {capacity:2} graphs, {way}"
                found.append(Row(case, outcome.missed, without.missed, "percent"))
                found.append(Row(f"{case}, first {EARLY} steps", outcome.missed_early, without.missed_early, "percent"))
                found.append(Row(f"{case}, steps delayed by captures", outcome.delayed, unit="percent"))
    return found
