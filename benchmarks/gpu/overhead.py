"""What a call costs when the work is next to nothing: bare replays, front doors and peers, by inputs and parameters."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, graphed
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper

from .bench import Bench, Call, Figures, Row, Timing, interleaved
from .peers import compiled, cuda_peers, raw_graph

__all__ = ["TITLE", "Case", "Sum", "run"]

TITLE = "Overhead of a call (a row of 64 columns; host: until the call returns; device: from first to last kernel)"
_WIDTH, _SETS = 64, 4
_DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.int64)
"""Of the inputs in turn, since a model takes indices beside numbers."""
_CASES = ((4, 300), (1, 20), (4, 2000), (16, 300))
"""Inputs and parameters."""
_BARE, _GRAPHED, _STATIC = "bare replay", "graphed()", "CUDAGraphWrapper, static"
_TENSORDICT, _COMPILED = "tensordict CudaGraphModule", "torch.compile reduce-overhead"
_COMPILE_SECONDS = 20


class Sum(nn.Module):
    """Adds its inputs up, one small kernel for each. All its parameters are of one storage, which the first reads."""

    flat: Tensor

    def __init__(self, parameters: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("flat", torch.randn(max(parameters, _WIDTH), device=device))
        self.layers = nn.ModuleList(nn.Linear(1, 1, device=device) for _ in range(parameters // 2))
        parts = self.flat.split(1)
        for layer, weight, bias in zip(self.layers, parts[::2], parts[1::2], strict=False):
            layer.weight = nn.Parameter(weight.view(1, 1), requires_grad=False)
            layer.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        """``[rows, 64]`` each -> ``[rows, 64]``."""
        total = inputs[0] * self.flat[:_WIDTH]
        for x in inputs[1:]:
            total = total + x
        return total


def _batch(inputs: int, rows: int, device: torch.device) -> tuple[Tensor, ...]:
    numbers = (torch.randint(-8, 8, (rows, _WIDTH), device=device) for _ in range(inputs))
    return tuple(number.to(_DTYPES[place % len(_DTYPES)]) for place, number in enumerate(numbers))


class Case:
    """A model and inputs for it, in batches of so many rows in turn, and how to make each side's calls.

    Each call is made once, so that it works.
    """

    def __init__(self, bench: Bench, inputs: int, parameters: int, rows: Sequence[int] = (1,)) -> None:
        self.name = f"{inputs} inputs, {parameters} parameters"
        self._bench, self._parameters = bench, parameters
        self._model = Sum(parameters, bench.device).eval()
        self._sets = [_batch(inputs, rows[number % len(rows)], bench.device) for number in range(_SETS)]
        self._static = tuple(x.clone() for x in self._sets[0])
        self.graph, self.output = raw_graph(bench, self._model, self._static)

    def sides(self) -> dict[str, list[Call]]:
        """All sides but the compiled one."""
        model, sets = self._model, self._sets
        makers: dict[str, Callable[[], list[Call]]] = {
            "eager": lambda: [partial(model, *args) for args in sets],
            _BARE: lambda: [self.graph.replay],
            "bare replay, copies in and out": self.by_hand,
            _STATIC: lambda: _wrapper(
                model, [tuple(x.clone() for x in sets[0])], CUDAGraphOptions(inputs="static", outputs="static")
            ),
            "CUDAGraphWrapper, copies": lambda: _wrapper(model, sets, CUDAGraphOptions()),
            _GRAPHED: lambda: self.graphed(1),
            "graphed(), a row of padding": lambda: self.graphed(2),
        }
        if self._bench.device.type == "cuda":
            for name, make in cuda_peers(model, tuple(x.clone() for x in sets[0])).items():
                makers[name] = lambda make=make: self._called(make())
        return self._made(makers)

    def compiled_sides(self) -> dict[str, list[Call]]:
        """The compiled side, and those that it is compared with."""
        return self._made(
            {
                _BARE: lambda: [self.graph.replay],
                _GRAPHED: lambda: self.graphed(1),
                _COMPILED: lambda: self._called(compiled(self._model)),
            }
        )

    def _made(self, makers: Mapping[str, Callable[[], list[Call]]]) -> dict[str, list[Call]]:
        made = {side: self._bench.attempt(self.name, side, make) for side, make in makers.items()}
        return {side: calls for side, calls in made.items() if calls is not None}

    def _called(self, fn: Callable[..., Any]) -> list[Call]:
        for args in (*self._sets, *self._sets):
            expected, got = self._model(*args), fn(*args)
            torch.testing.assert_close(got, expected)
        return [partial(fn, *args) for args in self._sets]

    def by_hand(self) -> list[Call]:
        """The bare graph between copies."""

        def call(*args: Tensor) -> Tensor:
            torch._foreach_copy_(self._static, args)
            self.graph.replay()
            return self.output.clone()

        return [partial(call, *args) for args in self._sets]

    def graphed(self, size: int) -> list[Call]:
        """By graphs of one size."""
        names = [f"inputs[{number}]" for number in range(len(self._static))]
        step = graphed(self._model, dynamic=dict.fromkeys(names, 0), sizes=(size,))
        step.prewarm(*(x.expand(size, -1).contiguous() for x in self._static))
        calls = self._called(step)
        assert step.last_decision is not None
        assert step.last_decision.reason.is_graph, step.last_decision
        (entry,) = step._graphs.entries()
        assert entry.guard is not None
        addresses = {tensor.data_ptr() for tensor in entry.guard.placed}
        assert len(addresses) >= self._parameters, f"{len(addresses)} addresses are guarded"
        return calls


def run(bench: Bench) -> None:
    """The first case; the others without ``torch.compile``; then, while there is time, these beside it."""
    cases = [Case(bench, *sizes) for sizes in (_CASES[:2] if bench.quick else _CASES)]
    for case in cases:
        if bench.has_time(5, case.name):
            _measure(bench, case, case.sides())
        if case is cases[0] and bench.compiles:  # the one that a bar is of
            _measure_compiled(bench, case)
    for case in cases[1:] if bench.compiles else []:
        _measure_compiled(bench, case)


def _measure_compiled(bench: Bench, case: Case) -> None:
    if bench.has_time(_COMPILE_SECONDS, f"{case.name}, beside torch.compile"):
        _measure(bench, case, case.compiled_sides())


def _measure(bench: Bench, case: Case, sides: Mapping[str, list[Call]]) -> None:
    timings = interleaved(bench, sides)
    beside = ", beside torch.compile" if _COMPILED in sides else ""
    for side, timing in timings.items():
        bench.emit(Row(case.name + beside, side, timing.figures()))
    for side in timings:
        if side not in ("eager", _BARE):
            bench.emit(Row(case.name + beside, f"{side}, over bare replay", _extra(side, timings)))


def _extra(side: str, timings: Mapping[str, Timing]) -> Figures:
    """The host time beyond a bare replay's; of peers also how many times that of ``graphed()``."""
    extra = timings[side].host_us - timings[_BARE].host_us
    figures: Figures = {"extra_host_us": extra}
    if side in (_TENSORDICT, _COMPILED) and _GRAPHED in timings:
        figures["over_graphed"] = extra / (timings[_GRAPHED].host_us - timings[_BARE].host_us)
    return figures


def _wrapper(model: nn.Module, sets: list[tuple[Tensor, ...]], options: CUDAGraphOptions) -> list[Call]:
    wrapper = CUDAGraphWrapper(model, CUDAGraphMode.FULL, options)
    how = {"batch_descriptor": BatchDescriptor(1), "cudagraph_runtime_mode": CUDAGraphMode.FULL}
    for number in range(4):
        for x in sets[0]:  # a graph is checked on two batches that differ
            x.add_(number)
        wrapper(*sets[number % len(sets)], **how)
    assert wrapper.get_stats().hits, wrapper.get_stats()
    return [partial(wrapper, *args, **how) for args in sets]
