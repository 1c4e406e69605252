"""The report on a plan: its value on a workload, compared with the engines' capture sizes, and its faults."""

from collections.abc import Iterable, Sequence

from ..modes import CUDAGraphMode
from ..plan.compare import Comparison
from ..plan.cost import CostModel
from ..plan.lint import LintFinding
from ..plan.plan import Evaluation, Plan
from ..plan.planner import plan_capture_sizes
from ..plan.workload import Workload
from ..units import count, milliseconds, percent, size_range, storage
from . import charts
from .page import Chart, Content, Note, Report, Section, Table, Tile, make_report
from .served import graph_shares, least_step_ms, padding_of, shares_of

__all__ = ["headline", "plan_report", "tiles"]

_COLORS = {CUDAGraphMode.FULL: "--graph", CUDAGraphMode.PIECEWISE: "--other"}
_COLORS_OF_WAYS = ("--graph", "--graph-soft", "--eager-soft", "--eager", "--reference")


def plan_report(
    plan: Plan,
    workload: Workload,
    cost: CostModel | None = None,
    comparison: Sequence[Comparison] = (),
    lint: Sequence[LintFinding] = (),
    *,
    split: float = 0.5,
) -> Report:
    """The value of ``plan`` on ``workload`` with ``cost`` (default: ``CostModel.default()``), as a page to look at.

    ``comparison`` is what ``compare`` makes: baselines, which are the capture sizes of engines, and plans beside them.
    Plans are made from the first ``split`` of the ordered steps, and all are judged on the rest. The chart of step time
    by number of graphs is judged on the same steps. ``lint`` holds the findings about the plan. Raises ``ConfigError``
    if plotly is not installed.
    """
    cost = cost or CostModel.default()
    result = plan.evaluate(workload, cost)
    baselines = {row.name: row.plan for row in comparison if not row.planned}
    top = max(
        [*plan.sizes, *(size for baseline in baselines.values() for size in baseline.sizes)], default=workload.largest
    )
    sections = [
        _traffic(plan, workload, baselines, top),
        _shares(plan, workload, baselines),
        *([_padding(plan, result, baselines, top)] if plan.graphs else []),
        *([_frontier(plan, workload, cost, comparison, split)] if result.hit_rate else []),
        *([_comparison(workload, comparison)] if comparison else []),
        _lint(lint),
        *([_graphs(plan, workload, cost)] if plan.graphs else []),
    ]
    facts = _facts(plan, workload, cost)
    return make_report(Content("graphdispatch: capture plan", headline(result), facts, tiles(result), sections))


def headline(result: Evaluation) -> str:
    """What a plan comes to, in a sentence."""
    if not result.graphs:
        return f"Without graphs a step takes {milliseconds(result.eager_ms)}"
    return (
        f"{count(result.graphs)} graph{'s' * (result.graphs > 1)}: {milliseconds(result.step_ms)} a step instead of "
        f"{milliseconds(result.eager_ms)} eagerly, {result.eager_ms / result.step_ms:.2f} times as fast"
    )


def _facts(plan: Plan, workload: Workload, cost: CostModel) -> Iterable[str]:
    yield f"{count(workload.total)} steps of 1 to {count(workload.largest)} tokens"
    yield f"{percent(float(workload.decode.sum()) / workload.total)} uniform decode"
    yield f"mode {plan.mode.name}"
    if cost.source == "default":
        yield "costs: not measured; defaults for an 8B model on one large GPU, correct within a factor of two"
    else:
        yield f"costs: {cost.source}"
    if plan.proof is not None:
        gap = plan.proof.gap
        yield (
            "proved: no set within the budgets is expected to be faster"
            if gap < 1e-9
            else (f"proved: at most {percent(gap, 3)} above the fastest set within the budgets")
        )


def tiles(result: Evaluation) -> list[Tile]:
    """The figures of an evaluation."""
    return [
        Tile("Expected step", milliseconds(result.step_ms), f"{milliseconds(result.eager_ms)} eagerly"),
        Tile("Steps served", percent(result.hit_rate), f"{percent(result.eager_share)} run eagerly"),
        Tile("Padding", percent(result.padding, 2), "of the tokens of served steps"),
        Tile("Worst padding", percent(result.worst_padding, 0), f"a batch of {count(result.worst_size)}"),
        Tile("Memory", storage(result.memory), f"{storage(result.pool_bytes)} of it the shared pool"),
        Tile("Captures", milliseconds(result.capture_ms), f"{count(result.graphs)} graphs, once at the start"),
    ]


def _traffic(plan: Plan, workload: Workload, baselines: dict[str, Plan], top: int) -> Section:
    kinds = (("uniform decode", "--graph-soft", workload.decode), ("mixed", "--other-soft", workload.mixed))
    parts = [
        charts.Series(name, color, workload.sizes, weights / workload.total)
        for name, color, weights in kinds
        if weights.any()
    ]
    rows = [charts.Series(name, _COLORS[kind], plan.sizes_of(kind)) for kind, name in _kinds(plan).items()]
    rows += [charts.Series(name, "--reference", baseline.sizes) for name, baseline in baselines.items()]
    above = float(workload.counts[workload.sizes > top].sum()) / workload.total
    lead = "How often steps of each size come, and the sizes that the plan captures"
    lead += " and those of the baselines." if baselines else "."
    if above:
        lead += f" {percent(above)} of the steps are larger than {count(top)} and not drawn; they run eagerly."
    lines = [(row.name, str(len(row.x)), _shortened(row.x)) for row in rows]
    figure = charts.traffic(parts, rows, top, "tokens")
    return Section(
        "Traffic and captured sizes",
        lead,
        [
            Chart("Histogram of step sizes with the captured sizes", figure),
            Table(("graphs of", "number", "sizes, in tokens"), lines, summary="All sizes"),
        ],
    )


def _kinds(plan: Plan) -> dict[CUDAGraphMode, str]:
    """The runtime modes of a plan's graphs, FULL first, with their names in charts. A plan without graphs has FULL."""
    kinds = sorted({graph.mode for graph in plan.graphs} or {CUDAGraphMode.FULL}, reverse=True)
    return {kind: "plan" if len(kinds) == 1 else f"plan, {kind.name}" for kind in kinds}


def _shortened(sizes: Iterable[int]) -> str:
    words = list(map(str, sizes))
    return " ".join(words if len(words) <= 512 else [*words[:256], "...", *words[-256:]])


def _shares(plan: Plan, workload: Workload, baselines: dict[str, Plan]) -> Section:
    found = {name: shares_of(made, workload) for name, made in {"plan": plan, **baselines}.items()}
    used = [
        (way, color)
        for way, color in zip(found["plan"], _COLORS_OF_WAYS, strict=True)
        if any(shares[way] for shares in found.values())
    ]
    bars = [charts.Series(way, color, (), [shares[way] for shares in found.values()]) for way, color in used]
    table = Table(
        ("", *(way for way, _ in used)),
        [(name, *(percent(shares[way], 2) for way, _ in used)) for name, shares in found.items()],
        summary="As a table",
    )
    exact, padded, *_ = found["plan"].values()
    lead = (
        f"With the plan, {percent(exact)} of all steps find a graph of exactly their size, {percent(padded)} run "
        f"padded in a larger one, and {percent(1 - exact - padded)} run eagerly."
    )
    return Section(
        "How the steps run",
        lead,
        [Chart("Shares of steps by graph and eagerly", charts.shares(list(found), bars)), table],
    )


def _padding(plan: Plan, result: Evaluation, baselines: dict[str, Plan], top: int) -> Section:
    lines = []
    for name, baseline in list(baselines.items())[:1]:
        kind = max(graph.mode for graph in baseline.graphs)
        lines.append(charts.Series(name, "--reference", range(1, top + 1), padding_of(baseline, kind, top)))
    for kind, name in _kinds(plan).items():
        lines.append(charts.Series(name, _COLORS[kind], range(1, top + 1), padding_of(plan, kind, top)))
    lead = (
        f"The padding of each size, whether or not it is in the traffic: at most {percent(result.worst_padding, 0)} of "
        f"the batch's tokens, at {count(result.worst_size)}. Weighted by the traffic it is "
        f"{percent(result.padding, 2)}. A line breaks where batches run eagerly."
    )
    return Section("Padding by size", lead, [Chart("Padding by size of the batch", charts.padding(lines, "tokens"))])


def _frontier(
    plan: Plan, workload: Workload, cost: CostModel, comparison: Sequence[Comparison], split: float
) -> Section:
    is_split = workload.steps is not None and bool(comparison)
    seen, judged = workload.split(split) if is_split else (workload, workload)
    top = plan.proof.largest if plan.proof is not None else plan.sizes[-1]
    numbers = {len(plan.graphs), *(len(row.plan.graphs) for row in comparison)} - {0}
    half_octaves = {round(2 ** (step / 2)) for step in range(40)}
    counts = sorted(numbers | {number for number in half_octaves if number <= min(2 * max(numbers), top)})
    plans = [plan_capture_sizes(seen, cost, max_graphs=number, max_size=top, mode=plan.mode) for number in counts]
    points = {len(made.graphs): made.evaluate(judged, cost) for made in plans}
    baselines = [row for row in comparison if not row.planned and row.plan.graphs]
    chosen = plan.evaluate(judged, cost)
    baselines.sort(key=lambda row: len(row.plan.graphs))
    others = [
        charts.Series("baselines", "--reference", [len(row.plan.graphs) for row in baselines],
                      [row.result.step_ms for row in baselines], [row.name for row in baselines]),
        charts.Series("this plan", "--eager", [len(plan.graphs)], [chosen.step_ms], ["this plan"]),
    ]  # fmt: skip
    least = least_step_ms(plan.mode, judged, cost, top)
    worst = max([chosen.step_ms, *(row.result.step_ms for row in baselines)])
    curve = charts.Series("best plans", "--graph", list(points), [result.step_ms for result in points.values()])
    lead = (
        "The best plan for each number of graphs, with no other budget or condition"
        + (f", planned on the first {percent(split, 0)} of the steps and judged on the rest." if is_split else ".")
        + " Where the curve is flat, more graphs gain nothing. This plan was made from all steps."
    )
    table = Table(
        ("graphs", "mean step", "above a graph for every size", "memory", "captures"),
        [(str(number), milliseconds(one.step_ms), percent(one.step_ms / least - 1, 2), storage(one.memory),
          milliseconds(one.capture_ms)) for number, one in points.items()],
        summary="As a table",
    )  # fmt: skip
    figure = charts.frontier(curve, others, least, worst)
    return Section("What another graph gains", lead, [Chart("Step time by number of graphs", figure), table])


def _comparison(workload: Workload, comparison: Sequence[Comparison]) -> Section:
    rows = []
    for row in comparison:
        result = row.result
        name = row.name if not row.planned else "plan" if row.name == "plan" else f"plan, {row.share:.0%} of {row.name}"
        rows.append((
            name, count(result.graphs), milliseconds(result.step_ms), percent(result.hit_rate),
            percent(result.padding, 2), f"{percent(result.worst_padding, 0)} at {count(result.worst_size)}",
            storage(result.memory), milliseconds(result.capture_ms),
        ))  # fmt: skip
    lead = "Judged on the steps that the plans were made from, since the order of the steps is not known."
    if workload.steps is not None:
        lead = "Planned on the first part of the steps, and judged on the rest, which no plan has seen."
    planned = next((row for row in comparison if row.planned), None)
    baseline = next((row for row in comparison if not row.planned), None)
    if planned is not None and baseline is not None:
        lead += (
            f" With the plan's {count(planned.result.graphs)} graphs a step takes {_difference(planned, baseline)} "
            f"with the {count(baseline.result.graphs)} of {baseline.name}."
        )
    columns = ("", "graphs", "mean step", "served", "padding", "worst padding", "memory", "captures")
    marked = frozenset(index for index, row in enumerate(comparison) if row.planned)
    return Section("Compared with the engines' capture sizes", lead, [Table(columns, rows, marked)])


def _difference(planned: Comparison, baseline: Comparison) -> str:
    saved = 1 - planned.result.step_ms / baseline.result.step_ms
    if abs(saved) < 5e-5:
        return "as much time as"
    return f"{percent(abs(saved), 2)} {'less' if saved > 0 else 'more'} time than"


def _lint(findings: Sequence[LintFinding]) -> Section:
    if not findings:
        return Section(
            "Lint", "", [Note("Nothing found", "Every graph can be reached, and no batch falls off a cliff.")]
        )
    notes = [Note(finding.code.replace("_", " ").capitalize(), finding.message, True) for finding in findings]
    return Section("Lint", f"{len(findings)} finding{'s' * (len(findings) > 1)} about the plan.", notes)


def _graphs(plan: Plan, workload: Workload, cost: CostModel) -> Section:
    shares = graph_shares(plan, workload)
    rows = []
    for graph in plan.graphs:
        share, padded = shares[graph.mode, graph.size]
        costs = cost.graphs(graph.mode)
        step_ms, graph_bytes, eager_ms = (
            float(curve.at(graph.size)) for curve in (costs.step_ms, costs.graph_bytes, cost.eager_ms)
        )
        rows.append((
            str(graph.size), graph.mode.name,
            size_range(graph.min_batch, graph.size) if graph.min_batch <= graph.size else "\N{EN DASH}",
            percent(share, 2), percent(padded), percent(max(graph.size / graph.min_batch - 1, 0.0)),
            milliseconds(step_ms), milliseconds(eager_ms), storage(graph_bytes),
        ))  # fmt: skip
    columns = ("graph", "mode", "serves", "of all steps", "padding", "at most", "step", "eagerly", "memory of its own")
    return Section(
        "The graphs",
        "Each graph with the steps of this traffic that it serves, their padding, and the most that any step gets.",
        [Table(columns, rows, summary=f"{len(rows)} graphs")],
    )
