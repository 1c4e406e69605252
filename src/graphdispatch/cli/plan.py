"""``graphdispatch plan``: the sizes to capture for recorded traffic, judged beside the engines' capture sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import ConfigError
from ..plan.compare import Comparison
from ..plan.cost import CostModel
from ..plan.lint import LintFinding
from ..plan.plan import Plan
from ..plan.planner import plan_capture_sizes
from ..plan.workload import Workload
from ..sizes import NAMED_SIZES
from .inputs import largest_size, read_cost, read_numbers, read_workload, runtime_mode
from .lint import lint_plan, print_findings
from .options import (
    CostFile,
    JsonFile,
    MaxSize,
    ModeOption,
    Requests,
    Sequences,
    Tokens,
    Traces,
    parse_bytes,
    parse_seconds,
    parse_share,
)
from .outputs import make_table, print_text, require_writable, write_json, writing

__all__ = ["plan"]

_SPLIT = 0.5
_COMPARED = "vllm,sglang,trtllm,pow2"

_Count = Annotated[int | None, typer.Option(help="At most this many graphs.", min=1, show_default=False)]
_Bytes = Annotated[
    float | None,
    typer.Option(help="Limit for the bytes of all graphs and their pool: 2GiB.", parser=parse_bytes, metavar="SIZE"),
]
_Seconds = Annotated[
    float | None, typer.Option(help="Limit for the time of all captures: 30s.", parser=parse_seconds, metavar="TIME")
]
_Must = Annotated[str | None, typer.Option(help="Sizes that must be captured: 1,2,4.", metavar="SIZES")]
_Multiple = Annotated[int, typer.Option(help="All sizes are multiples of this.", min=1)]
_Share = Annotated[
    float | None,
    typer.Option(help="Pad no batch by more than this share of its tokens: 25%.", parser=parse_share, metavar="SHARE"),
]
_Compared = Annotated[
    str, typer.Option(help=f"Capture sizes to compare with: {', '.join(NAMED_SIZES)}.", metavar="NAMES")
]
_Split = Annotated[
    float, typer.Option(help="For the comparison: plan on this share of the steps, judge on the rest.", min=0, max=1)
]
_Output = Annotated[Path | None, typer.Option(help="Write the plan to this file.", metavar="FILE", show_default=False)]


def plan(
    traces: Traces = None,
    requests: Requests = False,
    max_graphs: _Count = None,
    memory: _Bytes = None,
    capture_time: _Seconds = None,
    max_size: MaxSize = None,
    must_include: _Must = None,
    multiple_of: _Multiple = 1,
    max_padding: _Share = None,
    mode: ModeOption = None,
    cost: CostFile = None,
    compare: _Compared = _COMPARED,
    split: _Split = _SPLIT,
    max_num_seqs: Sequences = None,
    max_num_batched_tokens: Tokens = None,
    output: _Output = None,
    json_file: JsonFile = None,
) -> None:
    """Choose the sizes to capture for recorded traffic, within all budgets at once.

    Without a budget it plans as many graphs as vLLM captures.
    """
    require_writable(output=output, json=json_file)
    names = _names(compare)
    workload, costs = read_workload(traces, requests, max_num_seqs, max_num_batched_tokens), read_cost(cost)
    options: dict[str, Any] = {
        "max_graphs": max_graphs,
        "memory": memory,
        "capture_time": capture_time,
        "max_size": largest_size(max_size, workload),
        "must_include": read_numbers("--must-include", must_include) if must_include else (),
        "multiple_of": multiple_of,
        "max_padding": max_padding,
        "mode": runtime_mode(mode),
    }
    chosen = plan_capture_sizes(workload, costs, **options)
    rows = _compared(workload, costs, names, split, options)
    limits = {
        "max_num_reqs": max_num_seqs or _most_requests(workload),
        "max_num_tokens": max_num_batched_tokens or workload.largest,
    }
    findings = lint_plan(chosen, **limits)
    _print(workload, costs, split, rows, chosen, findings)
    if output is not None:
        with writing("output", output):
            chosen.save(output)
    write_json(json_file, _figures(workload, chosen, rows, findings))


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in NAMED_SIZES:
            raise ConfigError(f"--compare must name capture sizes, {', '.join(NAMED_SIZES)}; got {name[:40]!r}")
    return names


def _compared(
    workload: Workload, cost: CostModel, names: Sequence[str], split: float, options: Mapping[str, Any]
) -> list[Comparison]:
    """A plan and the engines' sizes on the steps after the split, which the plan has not seen, or on all."""
    seen, judged = workload.split(split) if workload.steps is not None else (workload, workload)
    planned = plan_capture_sizes(seen, cost, **options)
    named = {name: Plan.from_sizes(name, options["max_size"], mode=options["mode"]) for name in names}
    return [
        Comparison(name, made is planned, 1.0, made, made.evaluate(judged, cost))
        for name, made in {"plan": planned, **named}.items()
    ]


def _most_requests(workload: Workload) -> int:
    """The most requests of a step that were seen; a uniform decode step has one for each token if nobody counted."""
    if workload.steps is not None and workload.steps.num_reqs is not None:
        return int(workload.steps.num_reqs.max())
    return int(workload.sizes[workload.decode > 0].max(initial=1))


def _print(
    workload: Workload,
    cost: CostModel,
    split: float,
    rows: Sequence[Comparison],
    chosen: Plan,
    findings: Sequence[LintFinding],
) -> None:
    console = Console()
    print_text(console, repr(workload))
    print_text(console, repr(cost))
    how = "judged on the steps that it was planned for, since their order is not known"
    if workload.steps is not None:
        how = f"planned on the first {100 * split:g} % of the steps, judged on the others"
    table = make_table(how.capitalize(), "", "graphs", "served", "padding", "at worst", "step, ms", "MiB", "capture, s")
    for row in rows:
        result = row.result
        table.add_row(
            row.name,
            str(result.graphs),
            f"{100 * result.hit_rate:.1f} %",
            f"{100 * result.padding:.2f} %",
            f"{100 * result.worst_padding:.0f} %",
            f"{result.step_ms:.3f}",
            f"{result.memory / 2**20:.0f}",
            f"{result.capture_ms / 1e3:.1f}",
        )
    table.add_row("eager", "0", "0.0 %", "", "", f"{rows[0].result.eager_ms:.3f}", "0", "0.0")
    console.print(table, highlight=False)
    print_text(console, f"Planned on all steps: {chosen}")
    print_text(console, chosen.evaluate(workload, cost))
    print_findings(findings, console)


def _figures(
    workload: Workload, chosen: Plan, rows: Sequence[Comparison], findings: Sequence[LintFinding]
) -> dict[str, Any]:
    return {
        "steps": workload.total,
        "is_ordered": workload.steps is not None,
        "comparison": [row.to_dict() for row in rows],
        "mode": chosen.mode.name,
        "graphs": [{**graph._asdict(), "mode": graph.mode.name} for graph in chosen.graphs],
        "proof": asdict(chosen.proof) if chosen.proof is not None else None,
        "lint": list(map(asdict, findings)),
    }
