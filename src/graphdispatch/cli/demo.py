"""``graphdispatch demo``: a trace drives a decoder, eagerly and by graphs; the result as tables and JSON."""

import statistics
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ..modes import CUDAGraphMode
from .options import JsonFile
from .outputs import require_writable, write_json

if TYPE_CHECKING:
    from ..demo.result import DemoResult, StepTimes

__all__ = ["Device", "Mode", "Preset", "demo", "print_result"]

_DEFAULT_STEPS = 2000
_MAX_SIZE = 512


class Device(StrEnum):
    """Where to run. ``auto`` takes the GPU if there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Preset(StrEnum):
    """The decoder's size. ``1b`` has the dimensions of a 1B Llama and needs a GPU."""

    TINY = "tiny"
    SMALL = "small"
    ONE_B = "1b"


class Mode(StrEnum):
    """How the graphed side serves steps, by the names of ``CUDAGraphMode``."""

    FULL = "FULL"
    PIECEWISE = "PIECEWISE"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    NONE = "NONE"


def demo(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Steps as CSV, JSON lines or Parquet, also .gz. Default: a small generated trace.", metavar="FILE"
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.AUTO,
    preset: Annotated[Preset, typer.Option(help="The decoder's size.")] = Preset.TINY,
    mode: Annotated[
        Mode, typer.Option(help="How graphs serve the steps. In pieces, attention is a break.", case_sensitive=False)
    ] = Mode.FULL,
    max_size: Annotated[
        int, typer.Option(help="Largest size to capture, in rows. The trace's largest step is the limit.", min=1)
    ] = _MAX_SIZE,
    steps: Annotated[int, typer.Option(help="Run at most this many steps of the trace.", min=1)] = _DEFAULT_STEPS,
    json_file: JsonFile = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the tokens and the generated trace.", min=0)] = 0,
) -> None:
    """Run a decoder under a batch trace, eagerly and through graphs side by side, and compare.

    Exits with 1 if any output differs beyond the tolerance.
    """
    from ..demo.result import DemoSettings  # here, since they load torch, and no help or completion needs it
    from ..demo.run import SideBySide
    from ..demo.trace import generate_trace, read_trace

    batches = generate_trace(steps, seed=seed) if trace is None else read_trace(trace, steps)
    require_writable(json=json_file)
    console = Console()
    settings = DemoSettings(preset.value, device.value, seed, CUDAGraphMode[mode.value], max_size)
    both = SideBySide(batches, settings)
    try:
        both.prewarm(progress=True)
        with Progress(console=console) as bar:
            for _ in bar.track(both.run(), total=len(batches), description="steps"):
                pass
        result = both.result()
    finally:
        both.close()
    print_result(result, console)
    write_json(json_file, result.to_dict())
    if result.differing:
        raise typer.Exit(1)


def print_result(result: "DemoResult", console: Console) -> None:
    """Print the figures, the step times, the modes, the breaks, the reasons for eager steps and the verdict."""
    tables = [_figures(result), _step_times(result), _modes(result)]
    if result.breaks:
        tables.append(_breaks(result))
    console.print(Group(*tables, _reasons(result), _verdict(result)))


def _figures(result: "DemoResult") -> Table:
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


def _step_times(result: "DemoResult") -> Table:
    table = Table("step time", title="each step ran on both sides, in turn")
    for name in ("eager", "graphed", "eager / graphed"):
        table.add_column(name, justify="right")
    for label, served in (("all steps", False), ("steps served by a graph", True)):
        table.add_row(f"{label}, median", *_cells(result.times(statistics.median, served=served)))
        table.add_row(f"{label}, mean", *_cells(result.times(statistics.fmean, served=served)))
    return table


def _modes(result: "DemoResult") -> Table:
    table = Table("served by", title=f"the graphed side's steps in mode {result.settings.mode.name}")
    for name in ("steps", "graphs per step", "breaks per step", "median eager", "median graphed", "eager / graphed"):
        table.add_column(name, justify="right")
    for mode, count in sorted(result.steps_by_mode.items(), reverse=True):
        pieces = result.pieces.get(mode)
        graphs, breaks = map(str, pieces) if pieces is not None else ("-", "-")
        times = _cells(result.times(statistics.median, mode=mode))
        table.add_row(mode.name if mode.has_graphs() else "eager", str(count), graphs, breaks, *times)
    return table


def _breaks(result: "DemoResult") -> Table:
    table = Table("break", "called at", title="what ran eagerly between graphs, checks of captures included")
    for name in ("runs", "mean", "of the time in pieces"):
        table.add_column(name, justify="right")
    for part in result.breaks:
        mean_ms = part.time_ms / part.runs if part.runs else 0.0
        table.add_row(part.name, part.place, str(part.runs), f"{mean_ms:.3f} ms", f"{100 * part.share:.1f} %")
    return table


def _cells(times: "StepTimes") -> tuple[str, str, str]:
    if not times.graphed_ms:
        return "-", "-", "-"
    return f"{times.eager_ms:.3f} ms", f"{times.graphed_ms:.3f} ms", f"{times.ratio:.2f}"


def _reasons(result: "DemoResult") -> Table | Text:
    if not result.eager_reasons:
        return Text("No step ran eagerly on the graphed side.")
    table = Table("why steps ran eagerly", title="the graphed side's eager steps")
    table.add_column("steps", justify="right")
    for reason, count in result.eager_reasons.most_common():
        table.add_row(f"{reason.value}: {reason.text}", str(count))
    return table


def _verdict(result: "DemoResult") -> Text:
    if result.differing:
        return Text(f"WRONG: {result.differing} of {len(result.records)} steps differ from eager.", style="bold red")
    return Text(f"Right: all {len(result.records)} steps agree with eager.", style="green")
