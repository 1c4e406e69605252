"""``graphdispatch simulate``: production's dispatcher, policies and cache under recorded traffic, without a device."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import graphdispatch as gd

from ..decide.adaptive import AdaptiveDispatchPolicy
from ..errors import ConfigError
from ..plan.dispatcher import planned_dispatcher
from .inputs import largest_size, read_cost, read_plan, read_workload
from .options import (
    CostFile,
    JsonFile,
    MaxSize,
    ModeOption,
    Requests,
    Sequences,
    SizesOption,
    Tokens,
    Traces,
    parse_bytes,
)
from .outputs import print_text, require_writable, write_json

__all__ = ["Policy", "simulate"]

_SECOND_SIGHTING = 2


class Policy(StrEnum):
    """``default`` takes a graph wherever there is one; ``adaptive`` learns from the simulated times."""

    DEFAULT = "default"
    ADAPTIVE = "adaptive"


def simulate(
    traces: Traces = None,
    requests: Requests = False,
    plan: Annotated[
        Path | None, typer.Option(help="A plan, as the command plan wrote it.", metavar="FILE", show_default=False)
    ] = None,
    sizes: SizesOption = None,
    max_size: MaxSize = None,
    mode: ModeOption = None,
    policy: Annotated[Policy, typer.Option(help="What chooses between the graphs and eager.")] = Policy.DEFAULT,
    on_demand: Annotated[
        bool,
        typer.Option(
            "--on-demand",
            help="Capture a size when it comes for the second time, instead of all sizes before the first step.",
        ),
    ] = False,
    eviction: Annotated[
        str | None,
        typer.Option(
            help="With --on-demand: the eviction policy, frecency (default), gdsf, lfu or lru.", metavar="NAME"
        ),
    ] = None,
    max_graphs: Annotated[int | None, typer.Option(help="Room for this many graphs. Default: for all.", min=1)] = None,
    memory: Annotated[
        float | None, typer.Option(help="Room for graphs in bytes: 2GiB.", parser=parse_bytes, metavar="SIZE")
    ] = None,
    cost: CostFile = None,
    max_num_seqs: Sequences = None,
    max_num_batched_tokens: Tokens = None,
    json_file: JsonFile = None,
) -> None:
    """Serve recorded traffic on a simulated device: hits, padding, times, captures, bytes, and why steps ran eagerly.

    Without --plan and --sizes the graphs have vLLM's capture sizes.
    """
    from ..memory.admission import Admission  # here, since they load torch, and no help or completion needs it
    from ..memory.cache import GraphCache

    require_writable(json=json_file)
    if eviction is not None and not on_demand:
        raise ConfigError("--eviction goes with --on-demand; graphs that are captured ahead are never evicted")
    workload, costs = read_workload(traces, requests, max_num_seqs, max_num_batched_tokens), read_cost(cost)
    if plan is None:
        sizes, max_size = sizes or "vllm", largest_size(max_size, workload)
    served = read_plan(plan, sizes, mode, max_size)
    most_bytes = round(memory) if memory is not None else None
    result = gd.simulate(
        workload,
        costs,
        planned_dispatcher(served, max_num_reqs=workload.largest),
        policy=AdaptiveDispatchPolicy(sizes=served.sizes) if policy is Policy.ADAPTIVE else None,
        cache=GraphCache(max_graphs or len(served.graphs), most_bytes, eviction=eviction or "frecency"),
        admission=Admission(_SECOND_SIGHTING) if on_demand else None,
    )
    console = Console()
    for line in (repr(workload), repr(costs), repr(served), result):
        print_text(console, line)
    write_json(json_file, {"plan": {"mode": served.mode.name, "sizes": served.sizes}, **result.to_dict()})
