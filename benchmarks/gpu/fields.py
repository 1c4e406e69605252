"""Other fields than language models: a diffusion transformer, a recommender, a policy of reinforcement learning."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphdispatch import CUDAGraphOptions, graphed
from graphdispatch.plan import CostModel, Workload, plan_sizes

from .bench import Bench, Call, Figures, Row, difference, interleaved
from .peers import compiled, raw_graph

__all__ = ["TITLE", "run"]

TITLE = "Other fields (graphed() with a row of padding where there is more than one row)"
_SETS = 3
_ROWS_EACH = 16
"""What a request of the trace brings: candidates to rank."""
_MEASURED = (16, 64, 256, 1024)
_AT_ONCE = CUDAGraphOptions(capture_share=None)


class _Block(nn.Module):
    """A transformer block whose scale and shift come from the step's embedding, as in a DiT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 4 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale1, shift1, scale2, shift2 = self.modulation(functional.silu(condition))[:, None].chunk(4, -1)
        y = functional.layer_norm(x, x.shape[-1:]) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = functional.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2
        return x + self.mlp(y)


class _Diffusion(nn.Module):
    """One denoising step of a DiT-S: 256 patches of 384 columns, 12 blocks."""

    def __init__(self, width: int = 384, blocks: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(_Block(width, 6) for _ in range(blocks))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        condition = self.embedding(step)
        for block in self.blocks:
            x = block(x, condition)
        return x


class _Recommender(nn.Module):
    """A DLRM-like ranker: 26 embedding tables of 100,000 rows, 13 dense features, two small perceptrons."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100_000, width) for _ in range(26))
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width))
        self.top = nn.Sequential(nn.Linear(27 * 27, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        columns = [self.dense(dense), *(table(ids[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(columns, 1)
        return self.top(torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)).sigmoid()


class _Policy(nn.Module):
    """An actor and critic on 64 observed values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.mean, self.value = nn.Linear(256, 8), nn.Linear(256, 1)

    def forward(self, observed: Tensor) -> Tensor:
        hidden = self.body(observed)
        return torch.cat([self.mean(hidden).tanh(), self.value(hidden)], 1)


class _Field(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    names: tuple[str, ...]
    rows: tuple[int, ...]


_FIELDS = {
    "diffusion transformer": _Field(
        _Diffusion, lambda n: (torch.randn(n, 256, 384), torch.randint(1000, (n,))), ("x", "step"), (1, 4, 16)
    ),
    "recommender": _Field(
        _Recommender,
        lambda n: (torch.randn(n, 13), torch.randint(100_000, (n, 26))),
        ("dense", "ids"),
        (64, 512, 4096),
    ),
    "policy": _Field(_Policy, lambda n: (torch.randn(n, 64),), ("observed",), (1, 16, 256)),
}


def run(bench: Bench) -> None:
    """Each field at three batch sizes; in a quick run the smallest of the last."""
    for name in ("policy",) if bench.quick else _FIELDS:
        field = _FIELDS[name]
        model = _made(bench, field)
        for rows in field.rows[:1] if bench.quick else field.rows:
            if not bench.has_time(20 if bench.compiles else 5, f"{name}, {rows} rows, and what follows"):
                return
            _measure(bench, f"{name}, {rows} rows", field, model, rows)
    name = "policy" if bench.quick else "recommender"
    if bench.has_time(10, f"{name}, a plan"):
        bench.attempt(f"{name}, a plan", "all", lambda: _measure_plan(bench, name))


def _measure_plan(bench: Bench, name: str) -> None:
    """What a plan by measured costs expects of steps of a trace that it has not seen, and what they really take."""
    field, steps = _FIELDS[name], [_ROWS_EACH * requests for requests in bench.requests(40 if bench.quick else 400)]
    seen, unseen = (Workload.from_steps(half) for half in (steps[::2], steps[1::2]))
    model = _made(bench, field)
    example = dict(zip(field.names, _to(bench, field.inputs(max(steps))), strict=True))
    batches = [[x[:rows] for x in example.values()] for rows in steps[1::2]]
    cost = CostModel.measure(model, example, _MEASURED, seconds=0.01 if bench.quick else 0.2)
    for graphs in (2, 8):
        plan = plan_sizes(seen, cost, max_graphs=graphs)
        if not plan.sizes:  # by these costs eager is faster for every step, as may be on a busy machine
            continue
        step = graphed(model, dynamic=dict.fromkeys(field.names, 0), sizes=plan, options=_AT_ONCE)
        step.prewarm(**example)
        expected = plan.evaluate(unseen, cost)
        for side, fn, step_ms in (("eager", model, expected.eager_ms), ("graphed()", step, expected.step_ms)):
            taken_ms = min(_mean_ms(bench, fn, batches) for _ in range(4))
            figures: Figures = {"expected_ms": step_ms, "taken_ms": taken_ms, "expected_over_taken": step_ms / taken_ms}
            if fn is step:
                figures |= {"padding": expected.padding, "sizes": " ".join(map(str, plan.sizes))}
            bench.emit(Row(f"{name}, a plan of {graphs} graphs, {len(batches)} steps", side, figures))


def _made(bench: Bench, field: _Field) -> nn.Module:
    """The field's model, drawn on the device."""
    torch.manual_seed(0)
    with bench.device:
        return field.make().to(bench.dtype).eval().requires_grad_(False)


def _mean_ms(bench: Bench, fn: Callable[..., Tensor], batches: list[list[Tensor]]) -> float:
    """Milliseconds of a step, one after the other without a wait between them, as costs are measured."""
    bench.synchronize()
    start = time.perf_counter()
    for inputs in batches:
        fn(*inputs)
    bench.synchronize()
    return 1e3 * (time.perf_counter() - start) / len(batches)


def _measure(bench: Bench, case: str, field: _Field, model: nn.Module, rows: int) -> None:
    real = max(1, rows - 1)
    sets = [_to(bench, field.inputs(real)) for _ in range(_SETS)]
    full = _to(bench, field.inputs(rows))
    graph, _ = raw_graph(bench, model, full)
    step = graphed(model, dynamic=dict.fromkeys(field.names, 0), sizes=(rows,), options=_AT_ONCE)
    step.prewarm(*full)
    sides: dict[str, Callable[..., Tensor]] = {"eager": model, "graphed()": step}
    if bench.compiles:
        sides["reduce-overhead, not padded"] = compiled(model)

    def error_of(fn: Callable[..., Tensor]) -> float:
        for inputs in (*sets, *sets):
            fn(*inputs)
        return difference(model(*sets[0]), fn(*sets[0]))

    tried = {side: bench.attempt(case, side, partial(error_of, fn)) for side, fn in sides.items()}
    errors = {side: error for side, error in tried.items() if error is not None}
    calls: dict[str, list[Call]] = {side: [partial(sides[side], *inputs) for inputs in sets] for side in errors}
    calls["bare replay, full"] = [graph.replay]
    served = step.last_decision
    for side, timing in interleaved(bench, calls).items():
        figures = timing.figures()
        if side in errors:
            figures["difference"] = errors[side]
        if side == "graphed()" and served is not None:
            figures["reason"] = str(served.reason)
        bench.emit(Row(case, side, figures))


def _to(bench: Bench, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.to(bench.device, bench.dtype if x.is_floating_point() else None) for x in inputs)
