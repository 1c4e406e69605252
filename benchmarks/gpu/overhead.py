"""What a call costs when the work is next to nothing: bare replays, front doors and peers, by number of inputs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, graphed
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper

from .bench import Bench, Call, Row, interleaved
from .peers import compiled, cuda_peers, mark_step, raw_graph

__all__ = ["TITLE", "run"]

TITLE = "Overhead of a call (8 rows of 64 columns; host: until the call returns; device: from first to last kernel)"
_ROWS, _WIDTH, _SETS = 8, 64, 4


class Sum(nn.Module):
    """Adds its inputs up: one small kernel for each."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """``[rows, 64]`` each -> ``[rows, 64]``."""
        total = inputs[0] * 2
        for x in inputs[1:]:
            total = total + x
        return total


def run(bench: Bench) -> None:
    """1, 4 and 16 inputs."""
    for inputs in (1, 4) if bench.quick else (1, 4, 16):
        sets = [tuple(torch.randn(_ROWS, _WIDTH, device=bench.device) for _ in range(inputs)) for _ in range(_SETS)]
        case = f"{inputs} inputs"
        made = {side: bench.attempt(case, side, make) for side, make in _sides(bench, sets).items()}
        sides = {side: calls for side, calls in made.items() if calls is not None}
        for side, timing in interleaved(bench, sides).items():
            bench.emit(Row(case, side, timing.figures()))


def _sides(bench: Bench, sets: list[tuple[Tensor, ...]]) -> dict[str, Callable[[], list[Call]]]:
    """How to make the calls of each side; each call is made once, so that it works."""
    model = Sum()
    static = tuple(x.clone() for x in sets[0])
    graph, output = raw_graph(bench, model, static)
    sides: dict[str, Callable[[], list[Call]]] = {
        "eager": lambda: [partial(model, *args) for args in sets],
        "bare replay": lambda: [graph.replay],
        "bare replay, copies in and out": lambda: [partial(_by_hand, graph, static, output, args) for args in sets],
        "CUDAGraphWrapper, static": lambda: _wrapper(
            model, [static], CUDAGraphOptions(inputs="static", outputs="static")
        ),
        "CUDAGraphWrapper, copies": lambda: _wrapper(model, sets, CUDAGraphOptions()),
        "graphed()": lambda: _graphed(sets),
        "graphed(), a row of padding": lambda: _graphed([tuple(x[1:] for x in args) for args in sets]),
    }
    if bench.device.type == "cuda":
        for name, make in cuda_peers(model, static).items():
            sides[name] = lambda make=make: _called(make(), sets)
    if bench.compiles:
        sides["torch.compile reduce-overhead"] = lambda: _called(partial(_marked, compiled(model)), sets)
    return sides


def _called(fn: Callable[..., Any], sets: list[tuple[Tensor, ...]]) -> list[Call]:
    for args in (*sets, *sets):
        fn(*args)
    return [partial(fn, *args) for args in sets]


def _by_hand(graph: Any, static: tuple[Tensor, ...], output: Tensor, args: tuple[Tensor, ...]) -> Tensor:
    torch._foreach_copy_(static, args)
    graph.replay()
    return output.clone()


def _marked(step: Callable[..., Any], *args: Tensor) -> Any:
    mark_step()
    return step(*args)


def _wrapper(model: nn.Module, sets: list[tuple[Tensor, ...]], options: CUDAGraphOptions) -> list[Call]:
    wrapper = CUDAGraphWrapper(model, CUDAGraphMode.FULL, options)
    how = {"batch_descriptor": BatchDescriptor(_ROWS), "cudagraph_runtime_mode": CUDAGraphMode.FULL}
    for number in range(4):
        for x in sets[0]:  # a graph is checked on two batches that differ
            x.add_(number)
        wrapper(*sets[number % len(sets)], **how)
    assert wrapper.get_stats().hits, wrapper.get_stats()
    return [partial(wrapper, *args, **how) for args in sets]


def _graphed(sets: list[tuple[Tensor, ...]]) -> list[Call]:
    model = Sum()
    named = [{f"x{number}": x for number, x in enumerate(args)} for args in sets]
    step = graphed(lambda **inputs: model(*inputs.values()), dynamic=dict.fromkeys(named[0], 0), sizes=(_ROWS,))
    step.prewarm(**named[0])
    for inputs in named:
        step(**inputs)
    assert step.last_decision is not None
    assert step.last_decision.reason.is_graph, step.last_decision
    return [partial(step, **inputs) for inputs in named]
