"""``graphdispatch demo``: a decoder under a trace of batch shapes, eagerly and through graphs."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..showing import count, percent

if TYPE_CHECKING:
    from ..demo import DemoResult

_FIGURES = "steps", "padding", "eager", "graphs", "ratio"


def demo(
    preset: Annotated[str, typer.Option(help="The decoder's size: tiny, small, or 1b, which needs a GPU.")] = "tiny",
    device: Annotated[str, typer.Option(help="Where to run: auto, cpu or cuda.")] = "auto",
    steps: Annotated[int, typer.Option(help="The number of steps.", min=1)] = 1000,
    max_size: Annotated[int, typer.Option(help="The rows of the largest graph. Larger steps run eagerly.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Seeds the weights, the tokens and the trace.", min=0)] = 0,
) -> None:
    """Run a decoder on a trace of batch sizes, eagerly and by graphs side by side, and compare each step.

    It uses one CPU thread, so that the times of small steps vary less. Exits with 1 if any output differs.
    """
    import torch  # here and below, since help and completion need neither torch nor the decoder

    from ..demo import DemoResult, SideBySide, generate_trace

    console = Console(highlight=False)
    torch.set_num_threads(1)
    is_watched = Console(stderr=True).is_interactive
    both = SideBySide(preset, device, max_size=max_size, seed=seed, progress=is_watched)
    trace = generate_trace(steps, seed=seed, window=both.eager.config.window)
    records = track(both.run(trace), "running steps", steps, transient=True, disable=not console.is_interactive)
    result = DemoResult(tuple(records), both.tolerance)
    weight = both.eager.head.weight
    dtype = str(weight.dtype).removeprefix("torch.")
    console.print(f"{preset} decoder, {dtype} on {weight.device}; median step, eager beside graphs")
    console.print(_table(result))
    for reason, number in result.eager_reasons.most_common():
        console.print(f"{count(number)} steps ran eagerly: {reason.text}")
    console.print(f"hit rate {percent(result.hit_rate)}, largest difference {result.largest_difference:.0e}")
    if result.differing:
        console.print(f"WRONG: {count(result.differing)} of {count(steps)} steps differ from eager", style="bold red")
        raise typer.Exit(1)
    console.print(f"all {count(steps)} steps agree with eager", style="bold green")


def _table(result: "DemoResult") -> Table:
    """A line for the steps of each graph and for those that no graph served, of which there is nothing to compare; all
    together in the footer."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_footer=True)
    for name, total in zip(("rows", "graph", *_FIGURES), ("all", "", *_figures(result)), strict=True):
        table.add_column(name, total, justify="right")
    for size, group in result.by_graph().items():
        rows = [record.rows for record in group.records]
        first, last = min(rows), max(rows)
        span = str(last) if first == last else f"{first}\N{EN DASH}{last}"
        table.add_row(span, *((str(size), *_figures(group)) if size else ("none", count(len(rows)))))
    return table


def _figures(group: "DemoResult") -> tuple[str, ...]:
    eager, graphed = group.median_ms
    padding = percent(group.padding) if group.hit_rate else ""
    return count(len(group.records)), padding, _two_digits(eager), _two_digits(graphed), f"{eager / graphed:.1f}x"


def _two_digits(time_ms: float) -> str:
    """A median without the digits that differ from run to run."""
    return f"{time_ms:.{2 if time_ms < 1 else 1 if time_ms < 10 else 0}f} ms"
