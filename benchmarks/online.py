"""Padding of sizes planned while serving, beside sizes planned once and the engines' capture sizes, on later traffic.

``AutoPlan`` itself runs, on a callable that only counts: every size may get a graph, a capture is stated to take 60 ms
and a step what ``CostModel.default()`` says. One pause comes after every 64 steps. Every set is judged on the second
half of the steps, with the same hits; sizes planned once have seen the first half, and so has ``AutoPlan``, which
begins with vLLM's sizes (or, where the case says so, with the sizes planned once). A trace whose name holds the most
requests of its engine, as ``chat_64.csv``, is served by graphs of up to twice as many tokens, as vLLM does; any other
by graphs of up to 512.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from graphdispatch import CUDAGraphStats, Reason
from graphdispatch.demo.trace import generate_trace
from graphdispatch.engines import named_sizes
from graphdispatch.plan import Workload, plan_capture_sizes
from graphdispatch.plan.autoplan import AutoPlan

from .timing import Effort, Row

__all__ = ["TITLE", "Counted", "Graph", "rows"]

TITLE = "padding as a share of real tokens, compared with vLLM's capture sizes (simulated)"
OTHERS = ("sglang", "trtllm", "pow2")
LARGEST = 512
CAPTURE_MS = 60.0
STEPS_BETWEEN_PAUSES = 64


class Graph(NamedTuple):
    """What is known of a captured graph."""

    size: int
    capture_time_ms: float = CAPTURE_MS
    nbytes: int = 26 * 2**20
    avg_replay_time_ms: float = 0.0


class Counted:
    """A callable that graphs serve, of which only the counters and sizes are real."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.entries = [Graph(size) for size in sizes]
        self.stats = CUDAGraphStats()

    def serve(self, steps: Iterable[int]) -> None:
        """Count steps of so many tokens."""
        for tokens in steps:
            at = bisect_left(self.sizes, tokens)
            if at < len(self.sizes):
                self.stats.record_hit(tokens, self.sizes[at])
            else:
                self.stats.record_eager(Reason.ABOVE_LARGEST_SIZE, tokens)

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """The sizes of all steps."""
        return self.sizes

    def keep_examples(self) -> None:
        """There is nothing to keep."""

    def capture_size(self, size: int) -> bool:
        """Count a capture."""
        self.entries.append(Graph(size))
        self.stats.record_capture(CAPTURE_MS)
        return True

    def use_sizes(self, sizes: tuple[int, ...]) -> None:
        """Decide by other sizes, and forget the graphs of all others."""
        self.sizes = sizes
        self.entries = [graph for graph in self.entries if graph.size in sizes]


class Outcome(NamedTuple):
    """What one set of sizes, or a changing one, came to on the second half of the steps."""

    graphs: int
    captures: int
    hit_rate: float
    padding: float


def judged(sizes: Sequence[int], first: Sequence[int], second: Sequence[int], max_graphs: int | None) -> Outcome:
    """Serve ``first`` uncounted and ``second`` counted; with ``max_graphs`` the sizes are re-planned on the way."""
    step = Counted(sizes)
    auto = AutoPlan(step, max_graphs=max_graphs) if max_graphs is not None else None
    for part in (first, second):
        hits, real, padded, calls = step.stats.hits, step.stats.real_rows, step.stats.padded_rows, step.stats.calls
        for at in range(0, len(part), STEPS_BETWEEN_PAUSES):
            step.serve(part[at : at + STEPS_BETWEEN_PAUSES])
            if auto is not None:
                auto.idle()
    stats = step.stats
    served = (stats.hits - hits) / (stats.calls - calls)
    padding = (stats.padded_rows - padded) / (stats.real_rows - real) - 1
    return Outcome(len(step.sizes), stats.captures, served, padding)


def compared(steps: list[int], largest: int) -> dict[str, Outcome]:
    """Each way of choosing sizes; vLLM's capture sizes first."""
    half = len(steps) // 2
    first, second = steps[:half], steps[half:]
    default = named_sizes("vllm", largest)
    seen = Workload.from_steps(first)
    outcomes = {name: judged(named_sizes(name, largest), (), second, None) for name in ("vllm", *OTHERS)}
    for graphs in (len(default), (len(default) + 1) // 2):
        planned = plan_capture_sizes(seen, max_graphs=graphs, max_size=largest, must_include=(largest,)).sizes
        outcomes[f"planned once, {graphs}"] = judged(planned, (), second, None)
        outcomes[f"re-planned, {graphs}"] = judged(default, first, second, graphs)
        outcomes[f"planned once, then re-planned, {graphs}"] = judged(planned, (), second, graphs)
    return outcomes


def rows(effort: Effort) -> list[Row]:
    """A row for each trace and way of choosing sizes."""
    traces = {path.name.removesuffix(".gz").removesuffix(".csv"): Workload.from_trace(path) for path in effort.traces}
    if not traces:
        traces["generated_64"] = Workload.from_steps([step.num_tokens for step in generate_trace(20_000, 64, 0)])
    found = []
    for trace, workload in traces.items():
        assert workload.steps is not None
        limit = re.search(r"_(\d+)(_|$)", trace)
        outcomes = compared(workload.steps.num_tokens.tolist(), min(2 * int(limit[1]), LARGEST) if limit else LARGEST)
        for way, (graphs, captures, hit_rate, padding) in outcomes.items():
            case = f"{trace}, {way}: {graphs} graphs, {captures} captures while serving, {100 * hit_rate:.2f} % hits"
            found.append(Row(case, 100 * padding, 100 * outcomes["vllm"].padding, "percent"))
    return found
