"""``graphdispatch plan``: the sizes to capture for recorded traffic, judged beside vLLM's."""

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from ..config import parse_mode
from ..errors import ConfigError
from ..plan import CostModel, Plan, Workload, plan_sizes
from ..sizes import named_sizes
from .models import MODEL_HELP, load_model
from .waiting import waiting

_TRACE_HELP = (
    "Steps as CSV, JSON lines or Parquet, or vLLM's log with --cudagraph-metrics; also .gz. Default: the demo's."
)
_ASSUMED = "assumed, of an 8B model on one large GPU, true to a factor of two; --measure MODEL takes yours"
_LARGEST = 512  # vLLM's default limit


def _parse_bytes(text: str) -> int:
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        raise typer.BadParameter(f"expected a size such as 2GiB or 500MB, got {text!r}") from None


def plan(
    trace: Annotated[Path | None, typer.Argument(help=_TRACE_HELP, metavar="TRACE", show_default=False)] = None,
    max_graphs: Annotated[int | None, typer.Option(help="The most graphs. Default: as many as vLLM's.", min=1)] = None,
    memory: Annotated[
        int | None, typer.Option(help="The most bytes of all graphs: 2GiB.", parser=_parse_bytes, metavar="SIZE")
    ] = None,
    capture_time: Annotated[float | None, typer.Option(help="The most seconds of all captures.", min=0)] = None,
    max_size: Annotated[int, typer.Option(help="The most tokens of a graph.", min=1)] = _LARGEST,
    mode: Annotated[str, typer.Option(help="FULL, PIECEWISE, FULL_AND_PIECEWISE or FULL_DECODE_ONLY.")] = "FULL",
    measure: Annotated[
        str | None,
        typer.Option(
            help=f"Measure on this machine what steps and graphs cost: {MODEL_HELP} Default: an 8B model's on one GPU.",
            metavar="MODEL",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the plan to this file.", metavar="FILE")] = None,
) -> None:
    """Choose the sizes to capture for recorded traffic, and judge them beside vLLM's.

    If the steps have an order, a plan for their first half is judged on the second half.
    """
    workload = Workload.from_trace(trace) if trace is not None else _generated()
    largest = min(max_size, workload.largest)
    costs = CostModel.default() if measure is None else _measured(measure, largest, mode)
    limits: dict[str, Any] = {"max_graphs": max_graphs, "memory": memory, "capture_time": capture_time}
    limits |= {"max_size": largest, "mode": mode}
    with waiting("choosing sizes"):
        chosen = plan_sizes(workload, costs, **limits)
    typer.echo(
        f"costs: {_ASSUMED if measure is None else f'those of {measure}, measured here'}\n{workload!r}\n{chosen}"
    )
    if workload.is_ordered and len(workload.weights) > 1:
        seen, judged = workload.split()
        with waiting("choosing sizes for the first half"):
            tried = plan_sizes(seen, costs, **limits)
        typer.echo(f"\na plan for the first half of the steps, judged on the second half\n{tried}")
    else:
        judged, tried = workload, chosen
        typer.echo("\nthis plan, judged on the same steps")
    typer.echo(tried.evaluate(judged, costs))
    named = Plan.from_sizes("vllm", largest, mode=mode)
    typer.echo(f"\nvLLM's sizes, judged on these steps\n{named}\n{named.evaluate(judged, costs)}")
    if output is not None:
        try:
            chosen.save(output)
        except OSError as error:
            raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from error


def _generated() -> Workload:
    from ..demo import generate_trace  # here, since it loads torch

    steps = generate_trace(2000)
    return Workload.from_steps([s.num_tokens for s in steps], [s.num_tokens == s.num_reqs for s in steps])


def _measured(model: str, largest: int, mode: str) -> CostModel:
    fn, example, options = load_model(model, "--measure")
    sizes = named_sizes("pow2", largest)
    with waiting("measuring eager steps and graphs"):
        costs = CostModel.measure(fn, example, sizes, **{**options, "mode": mode})
    eager, graph = costs.at("eager_ms", sizes), costs.step_ms(parse_mode(mode), sizes)
    for size, eager_ms, graph_ms in zip(sizes, eager, graph, strict=True):
        typer.echo(f"{size:>6} rows  eager {eager_ms:8.3f} ms  graph {graph_ms:8.3f} ms  {eager_ms / graph_ms:5.2f}x")
    return costs
