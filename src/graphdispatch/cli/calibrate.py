"""``graphdispatch calibrate``: measures what a model's steps and graphs cost here, to plan with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import graphdispatch as gd

from ..modes import CUDAGraphMode
from ..plan.cost import Curve
from .inputs import read_numbers, runtime_mode
from .options import ModeOption
from .outputs import make_table, print_text, require_writable, writing
from .targets import TargetName, load_target, naming

__all__ = ["calibrate"]

_NOISY = 0.1


def calibrate(
    model: TargetName,
    sizes: Annotated[
        str | None,
        typer.Option(help="Rows to measure: 1,8,64. Default: powers of two up to the example's.", metavar="SIZES"),
    ] = None,
    mode: ModeOption = None,
    repeats: Annotated[int, typer.Option(help="How many times each step is measured.", min=5)] = 30,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the cost model to this file, for --cost.", metavar="FILE", show_default=False),
    ] = None,
) -> None:
    """Measure eager steps, replays, captures and memory of your model on this machine, as costs to plan with."""
    require_writable(output=output)
    rows = read_numbers("--sizes", sizes) if sizes is not None else None
    fn, example, options = load_target(model)
    console = Console()
    at_fault = naming(f"MODEL {model!r}: measuring it", "; call it with its example, and with other numbers of rows")
    with console.status("measuring"), at_fault:
        found = gd.calibrate(fn, example, sizes=rows, mode=runtime_mode(mode), repeats=repeats, **options)
    for each in found.held_bytes:
        console.print(_table(found, each), highlight=False)
        held = f"{found.held_bytes[each] / 2**20:.2f} MiB, {found.expected_bytes(each) / 2**20:.2f} by the cost model"
        print_text(console, f"All {each.name} graphs together hold {held}.")
        _warn_of_noise([found.cost.eager_ms, found.cost.graphs(each).step_ms], console)
    if found.cost.moved:
        moved = f"{100 * found.cost.moved:.1f} %"
        print_text(
            console, f"Costs to plan with never fall with the size: the fit moves points by up to {moved}.", "yellow"
        )
    if output is not None:
        with writing("output", output):
            found.cost.save(output)


def _table(found: "gd.Calibration", mode: CUDAGraphMode) -> Table:
    costs, eager = found.cost.graphs(mode), found.cost.eager_ms
    title = f"{mode.name} graphs on {found.device}: medians of {found.repeats} steps with their standard errors"
    columns = ("eager, ms", "graph, ms", "ratio", "capture, ms", "KiB", "pool KiB")
    table = make_table(title, "rows", *columns)
    for at, size in enumerate(eager.sizes):
        table.add_row(
            str(size),
            _with_error(eager, at),
            _with_error(costs.step_ms, at),
            f"{eager.values[at] / costs.step_ms.values[at]:.2f}",
            f"{costs.capture_ms.values[at]:.1f}",
            f"{costs.graph_bytes.values[at] / 2**10:.0f}",
            f"{costs.pool_bytes.values[at] / 2**10:.0f}",
        )
    return table


def _warn_of_noise(curves: Sequence[Curve], console: Console) -> None:
    error = max(_relative_error(curve, at) for curve in curves for at in range(len(curve.sizes)))
    if error > _NOISY:
        text = f"Step times are uncertain by up to {100 * error:.0f} %"
        print_text(console, f"{text}: measure on an idle machine, or with more --repeats.", "yellow")


def _with_error(curve: Curve, at: int) -> str:
    return f"{curve.values[at]:.3f} ± {100 * _relative_error(curve, at):.0f} %"


def _relative_error(curve: Curve, at: int) -> float:
    return float(curve.error_at(curve.sizes[at])) / curve.values[at]
