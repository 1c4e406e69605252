"""The demo's result as tables for a terminal."""

import statistics

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .result import DemoResult, StepTimes

__all__ = ["print_result"]


def print_result(result: DemoResult, console: Console) -> None:
    """Print the figures, the step times, the modes, the breaks, the reasons for eager steps and the verdict."""
    tables = [_figures(result), _step_times(result), _modes(result)]
    if result.breaks:
        tables.append(_breaks(result))
    console.print(Group(*tables, _reasons(result), _verdict(result)))


def _figures(result: DemoResult) -> Table:
    decode = sum(record.uniform_decode for record in result.records)
    table = Table(show_header=False, title=f"{result.settings.preset} decoder, {result.dtype}, {result.device}")
    table.add_row("steps (decode / mixed)", f"{len(result.records)} ({decode} / {len(result.records) - decode})")
    table.add_row("hit rate", f"{100 * result.hit_rate:.2f} %")
    table.add_row("padding, as a share of the real rows served", f"{100 * result.padding:.2f} %")
    table.add_row("captures", str(result.captures))
    table.add_row("capture time", f"{result.capture_time_ms:.0f} ms")
    table.add_row("largest size", f"{result.largest} rows")
    table.add_row("steps up to that size without a replay", str(result.missed))
    table.add_row("largest output difference", f"{result.largest_difference:.2e} (tolerance {result.tolerance:.0e})")
    return table


def _step_times(result: DemoResult) -> Table:
    table = Table("step time", title="each step ran on both sides, in turn")
    for name in ("eager", "graphed", "eager / graphed"):
        table.add_column(name, justify="right")
    for label, served in (("all steps", False), ("steps served by a graph", True)):
        table.add_row(f"{label}, median", *_cells(result.times(statistics.median, served=served)))
        table.add_row(f"{label}, mean", *_cells(result.times(statistics.fmean, served=served)))
    return table


def _modes(result: DemoResult) -> Table:
    table = Table("served by", title=f"the graphed side's steps in mode {result.settings.mode.name}")
    for name in ("steps", "graphs per step", "breaks per step", "median eager", "median graphed", "eager / graphed"):
        table.add_column(name, justify="right")
    for mode, count in sorted(result.steps_by_mode.items(), reverse=True):
        pieces = result.pieces.get(mode)
        graphs, breaks = map(str, pieces) if pieces is not None else ("-", "-")
        times = _cells(result.times(statistics.median, mode=mode))
        table.add_row(mode.name if mode.has_graphs() else "eager", str(count), graphs, breaks, *times)
    return table


def _breaks(result: DemoResult) -> Table:
    table = Table("break", "called at", title="what ran eagerly between graphs, checks of captures included")
    for name in ("runs", "mean", "of the time in pieces"):
        table.add_column(name, justify="right")
    for part in result.breaks:
        mean_ms = part.time_ms / part.runs if part.runs else 0.0
        table.add_row(part.name, part.place, str(part.runs), f"{mean_ms:.3f} ms", f"{100 * part.share:.1f} %")
    return table


def _cells(times: StepTimes) -> tuple[str, str, str]:
    if not times.graphed_ms:
        return "-", "-", "-"
    return f"{times.eager_ms:.3f} ms", f"{times.graphed_ms:.3f} ms", f"{times.ratio:.2f}"


def _reasons(result: DemoResult) -> Table | Text:
    if not result.eager_reasons:
        return Text("No step ran eagerly on the graphed side.")
    table = Table("why steps ran eagerly", title="the graphed side's eager steps")
    table.add_column("steps", justify="right")
    for reason, count in result.eager_reasons.most_common():
        table.add_row(f"{reason.value}: {reason.text}", str(count))
    return table


def _verdict(result: DemoResult) -> Text:
    if result.differing:
        return Text(f"WRONG: {result.differing} of {len(result.records)} steps differ from eager.", style="bold red")
    return Text(f"Right: all {len(result.records)} steps agree with eager.", style="green")
