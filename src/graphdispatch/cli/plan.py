"""``graphdispatch plan``: the sizes to capture for recorded traffic, judged beside the engines' capture sizes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import ConfigError
from ..plan import CostModel, Plan, Workload, plan_sizes
from ..sizes import NAMED_SIZES
from ..units import percent, storage
from .inputs import generated_workload, runtime_mode
from .options import MaxSize, ModeOption, Trace, parse_bytes, parse_seconds
from .outputs import make_table, print_text, require_writable, writing

__all__ = ["plan"]

_LARGEST = 512  # vLLM's default limit
_STEP = 16  # the largest step of vLLM's capture sizes, which end below the largest size

_Count = Annotated[int | None, typer.Option(help="At most this many graphs.", min=1, show_default=False)]
_Bytes = Annotated[
    float | None,
    typer.Option(help="Limit for the bytes of all graphs and their pool: 2GiB.", parser=parse_bytes, metavar="SIZE"),
]
_Seconds = Annotated[
    float | None, typer.Option(help="Limit for the time of all captures: 30s.", parser=parse_seconds, metavar="TIME")
]
_Multiple = Annotated[int, typer.Option(help="All sizes are multiples of this.", min=1)]
_Compared = Annotated[
    str, typer.Option(help=f"Capture sizes to compare with: {', '.join(NAMED_SIZES)}.", metavar="NAMES")
]
_Cost = Annotated[Path | None, typer.Option(help="A cost model that CostModel.save wrote.", metavar="FILE")]
_Output = Annotated[Path | None, typer.Option(help="Write the plan to this file.", metavar="FILE", show_default=False)]


def plan(
    trace: Trace = None,
    max_graphs: _Count = None,
    memory: _Bytes = None,
    capture_time: _Seconds = None,
    max_size: MaxSize = None,
    multiple_of: _Multiple = 1,
    mode: ModeOption = None,
    cost: _Cost = None,
    compare: _Compared = "vllm,pow2",
    output: _Output = None,
) -> None:
    """Choose the sizes to capture for recorded traffic, within all limits at once.

    Without a limit it plans as many graphs as vLLM captures. The table judges a plan of the first half of the steps on
    the other half.
    """
    require_writable(output=output)
    for name in compare.split(","):
        if name not in NAMED_SIZES:
            raise ConfigError(f"--compare must name capture sizes, {', '.join(NAMED_SIZES)}; got {name[:40]!r}")
    workload = Workload.from_trace(trace) if trace is not None else generated_workload()
    costs, chosen_mode = CostModel.load(cost) if cost is not None else CostModel.default(), runtime_mode(mode)
    top = max_size if max_size is not None else min(_LARGEST, -(-workload.largest // _STEP) * _STEP)

    def planned(traffic: Workload) -> Plan:
        return plan_sizes(
            traffic, costs, max_graphs=max_graphs, memory=memory, capture_time=capture_time, max_size=top,
            multiple_of=multiple_of, mode=chosen_mode,
        )  # fmt: skip

    seen, judged = workload.split() if workload.is_ordered else (workload, workload)
    plans = {"plan": planned(seen)}
    plans |= {name: Plan.from_sizes(name, top, mode=chosen_mode) for name in compare.split(",")}
    console = Console()
    print_text(console, repr(workload))
    title = "Planned on the first half of the steps, judged on the other" if workload.is_ordered else "Judged in sample"
    table = make_table(title, "", "graphs", "by graphs", "padding", "step, ms", "memory", "captures, s")
    for name, made in plans.items():
        found = made.evaluate(judged, costs)
        table.add_row(
            name, str(found.graphs), percent(found.hit_rate), percent(found.padding, 2), f"{found.step_ms:.3f}",
            storage(found.memory), f"{found.capture_ms / 1e3:.1f}",
        )  # fmt: skip
    console.print(table, highlight=False)
    chosen = planned(workload)
    print_text(console, f"Planned on all steps: {chosen}")
    print_text(console, chosen.evaluate(workload, costs))
    if output is not None:
        with writing("output", output):
            chosen.save(output)
