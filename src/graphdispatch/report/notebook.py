"""What notebooks show of results: the parts of their reports that need no charts, in the colours of the notebook."""

from functools import singledispatch
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..api.stats import DispatchStats
from ..plan.grid import GridEvaluation, GridPlan
from ..plan.plan import Evaluation, Plan, explained
from ..stats import CUDAGraphStats
from ..units import count, milliseconds, percent, size_range, storage
from .callables import memory_section, reasons_section, stats_content
from .page import Content, Section, Table, Tile, inline
from .plans import headline, tiles

if TYPE_CHECKING:
    from ..memory.accounting import MemoryReport
    from ..serve.prewarm import PrewarmReport

__all__ = ["html_of"]


def html_of(shown: Any) -> str:
    """The HTML of a result, whole and escaped. Raises ``NotImplementedError`` for what has none."""
    return inline(_content(shown))


@singledispatch
def _content(shown: Any) -> Content:
    from ..memory.accounting import MemoryReport  # here, since they load torch
    from ..serve.prewarm import PrewarmReport

    if isinstance(shown, MemoryReport):
        return _of_memory(shown)
    if isinstance(shown, PrewarmReport):
        return _of_prewarm(shown)
    raise NotImplementedError(f"a {type(shown).__name__} has no tables")


_content.register(CUDAGraphStats, stats_content)


def _of_memory(memory: "MemoryReport") -> Content:
    rows = [
        (str(one.size), one.mode, storage(one.own), storage(one.driver), storage(one.outputs)) for one in memory.entries
    ]
    graphs = Section("The graphs", "", [Table(("graph", "mode", "own", "driver", "writes"), rows)])
    sections = [memory_section(memory, has_chart=False), graphs]
    return Content("graphdispatch: memory", f"{count(len(rows))} graphs hold {storage(memory.total)}", [], [], sections)


def _of_prewarm(report: "PrewarmReport") -> Content:
    captured = [(mode.name, " ".join(map(str, sizes))) for mode, sizes in report.captured.items()]
    left_out = [(str(size), mode.name, why) for (mode, size), why in report.left_out.items()]
    sections = [Section("Captured", "", [Table(("mode", "sizes"), captured)])]
    if left_out:
        sections.append(Section("Left out", "", [Table(("size", "mode", "why"), left_out)]))
    made = count(sum(map(len, report.captured.values())))
    facts = [f"{storage(report.memory_bytes)} held"]
    headline = f"{made} graphs captured in {milliseconds(1e3 * report.seconds)}"
    return Content("graphdispatch: prewarm", headline, facts, [], sections)


@_content.register
def _of_decisions(stats: DispatchStats) -> Content:
    by_graph = stats.graph + stats.piecewise
    served = f"Graphs serve {percent(stats.graph_ratio)} of {count(stats.total)} calls"
    figures = [
        Tile("By graphs", count(by_graph), f"{count(stats.piecewise)} of them PIECEWISE"),
        Tile("Eager", count(stats.eager), f"{count(stats.fallbacks)} where a graph was wanted"),
        Tile("Deciding", f"{stats.avg_dispatch_time_us:.1f} \N{MICRO SIGN}s", "a call"),
    ]
    sections = [reasons_section(stats.reasons, stats.total)]
    return Content("graphdispatch: decisions", served, [], figures, sections)


@_content.register
def _of_plan(plan: Plan) -> Content:
    rows = [
        (
            str(graph.size),
            graph.mode.name,
            size_range(graph.min_batch, graph.size) if graph.min_batch <= graph.size else "\N{EN DASH}",
        )
        for graph in plan.graphs
    ]
    facts = [f"mode {plan.mode.name}", *(explained(plan.proof) if plan.proof is not None else ())]
    made = f"{count(len(rows))} graphs up to {count(max(plan.sizes, default=0))}"
    graphs = Section("The graphs", "All other batches run eagerly.", [Table(("graph", "mode", "serves"), rows)])
    return Content("graphdispatch: capture plan", made, facts, [], [graphs])


@_content.register
def _of_grid(plan: GridPlan) -> Content:
    shelves = groupby(sorted(plan.points, key=lambda point: point[::-1]), key=lambda point: point[1])
    rows = [(str(length), " ".join(str(batch) for batch, _ in points)) for length, points in shelves]
    facts = [f"costs: {plan.cost.source}"]
    if plan.expected_ms:
        facts.append(f"expected {milliseconds(plan.expected_ms)} a call, at most {percent(plan.gap)} above the least")
    graphs = Section("The graphs", "By sequence length.", [Table(("length", "batch sizes"), rows)])
    return Content("graphdispatch: capture plan", f"{count(len(plan.points))} graphs", facts, [], [graphs])


@_content.register
def _of_evaluation(result: Evaluation) -> Content:
    return Content("graphdispatch: a plan on its traffic", headline(result), [], tiles(result), [])


@_content.register
def _of_grid_evaluation(result: GridEvaluation) -> Content:
    figures = [
        Tile("Expected call", milliseconds(result.step_ms), f"{milliseconds(result.eager_ms)} eagerly"),
        Tile("Calls served", percent(result.hit_rate), f"{percent(1 - result.hit_rate)} run eagerly"),
        Tile("Padding", percent(result.padding), "of all tokens that graphs compute"),
        Tile("Memory", storage(result.memory), "of all graphs and their pool"),
        Tile("Captures", milliseconds(result.capture_ms), f"{count(result.graphs)} graphs, once at the start"),
    ]
    return Content("graphdispatch: a plan on its traffic", f"{count(result.graphs)} graphs", [], figures, [])
