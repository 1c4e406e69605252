"""``graphdispatch demo``: the arguments, the progress bar and the exit code."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from ..errors import ConfigError
from ..modes import CUDAGraphMode
from .report import print_result
from .result import DemoSettings
from .run import SideBySide
from .trace import generate_trace, read_trace

__all__ = ["Device", "Mode", "Preset", "demo"]

_DEFAULT_STEPS = 2000


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
        Path | None, typer.Option(help="Batch trace, .csv or .csv.gz. Default: a small generated one.", metavar="FILE")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.AUTO,
    preset: Annotated[Preset, typer.Option(help="The decoder's size.")] = Preset.TINY,
    mode: Annotated[
        Mode, typer.Option(help="How graphs serve the steps. In pieces, attention is a break.", case_sensitive=False)
    ] = Mode.FULL,
    max_size: Annotated[
        int, typer.Option(help="Largest size to capture, in rows. The trace's largest step is the limit.", min=1)
    ] = DemoSettings.max_size,
    steps: Annotated[int, typer.Option(help="Run at most this many steps of the trace.", min=1)] = _DEFAULT_STEPS,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file, as JSON.", metavar="FILE")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the tokens and the generated trace.", min=0)] = 0,
) -> None:
    """Run a decoder under a batch trace, eagerly and through graphs side by side, and compare.

    Exits with 1 if any output differs beyond the tolerance.
    """
    batches = generate_trace(steps, seed=seed) if trace is None else read_trace(trace, steps)
    _require_writable(json_file)
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
    if json_file is not None:
        json_file.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    if result.differing:
        raise typer.Exit(1)


def _require_writable(path: Path | None) -> None:
    # Checked before the run, so that a long run is not lost.
    if path is None:
        return
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error
