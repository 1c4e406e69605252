"""A service whose calls vary in batch size and length: its graphs beside eager, and planned ones beside a grid."""

import random
from collections.abc import Callable
from itertools import product
from time import thread_time

import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Dim, Graphed, graphed
from graphdispatch.plan import CostModel, Plan, Workload, plan_sizes

from .timing import Effort, Row

__all__ = ["TITLE", "rows"]

TITLE = "1,500 calls of an encoder, batches of 1 to 8, lengths of 16 to 64, with masks: microseconds of a call"
_CALLS = 1500
_GRIDS = {"two graphs": ([4, 8], [64]), "four graphs": ([4, 8], [40, 64])}
_SHARE = 0.5
_BY_HAND = ([2, 4, 8], [32, 64])
_LAYERS = 8
Call = tuple[Tensor, Tensor]


class _Layer(nn.Module):
    """Attention and a gated MLP, with norms written out as model files have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.gate = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + bias, -1)
        x = x + self.out(weights @ v)
        y = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class _Encoder(nn.Module):
    """Token logits and a pooled vector, of tokens and a mask of zeros and ones."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, width), nn.Embedding(128, width)
        self.layers = nn.ModuleList([_Layer(width) for _ in range(_LAYERS)])
        self.head = nn.Linear(width, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        bias = (1.0 - attention_mask[:, None, :].float()) * -1e9
        for layer in self.layers:
            x = layer(x, bias)
        weights = attention_mask[:, :, None].float()
        return self.head(x), (x * weights).sum(1) / weights.sum(1)


def rows(effort: Effort) -> list[Row]:
    """The whole run with all captures and its last third, for some sizes; and two sets of as many graphs once they are
    captured."""
    del effort
    with torch.inference_mode(False), torch.no_grad():
        return _rows()


def _rows() -> list[Row]:
    torch.manual_seed(0)
    model = _Encoder().eval()
    calls = _calls()
    for ids, mask in calls[:20]:
        model(ids, mask)
    sides = {name: _served(model, Plan.from_sizes(product(*grid))) for name, grid in _GRIDS.items()}
    share = CUDAGraphOptions(capture_share=_SHARE)
    sides[f"two graphs, capture_share={_SHARE}"] = _served(
        model, Plan.from_sizes(product(*_GRIDS["two graphs"])), share
    )
    sides["batch alone"] = graphed(model, dynamic={"input_ids": 0, "attention_mask": 0}, sizes=(4, 8))
    found: list[Row] = []
    for name, side in sides.items():
        eager, times = _in_turns(model, side, calls)
        late = slice(2 * _CALLS // 3, None)
        found += [
            Row(f"{name}: whole run, captures and comparisons included", _mean(times), _mean(eager)),
            Row(f"{name}: its last 500 calls", _mean(times[late]), _mean(eager[late])),
            Row(f"{name}: calls that a graph served", 100 * side.stats.graph_ratio, unit="%"),
            Row(f"{name}: captures", side.stats.captures, unit=""),
        ]
    made = Plan.from_sizes(product(*_BY_HAND))
    traffic, cost = Workload.from_steps([(ids.shape[0], ids.shape[1]) for ids, _ in calls]), _costs(model)
    plan = plan_sizes(traffic, cost, max_graphs=len(made.sizes))
    both = _served(model, plan), _served(model, made)
    for side in both:
        _times(side, calls)
    planned, by_hand = _in_turns(*both, calls)
    found.append(
        Row(f"{len(plan.sizes)} planned graphs over {len(made.sizes)} of a grid", _mean(planned), _mean(by_hand))
    )
    expected, by_hand_ms = (each.evaluate(traffic, cost).step_ms for each in (plan, made))
    found.append(Row("the same by the cost model", 1e3 * expected, 1e3 * by_hand_ms))
    return found


def _served(
    model: nn.Module, plan: Plan, options: CUDAGraphOptions | None = None
) -> Graphed[..., tuple[Tensor, Tensor]]:
    seq = Dim("seq", pad={"attention_mask": 0})
    dynamic = {"input_ids": {0: "batch", 1: seq}, "attention_mask": {0: "batch", 1: "seq"}}
    return graphed(model, dynamic=dynamic, sizes=plan, options=options)


def _calls() -> list[Call]:
    chance = random.Random(0)
    calls = []
    for _ in range(_CALLS):
        batch, length = chance.randint(1, 8), chance.randint(16, 64)
        mask = torch.ones(batch, length, dtype=torch.long)
        for row in range(batch):
            mask[row, chance.randint(length // 2, length) :] = 0
        calls.append((torch.randint(1, 1000, (batch, length)), mask))
    return calls


def _times(serve: Callable[[Tensor, Tensor], object], calls: list[Call]) -> list[float]:
    """Seconds of processor for each call."""
    times = []
    for ids, mask in calls:
        begun = thread_time()
        serve(ids, mask)
        times.append(thread_time() - begun)
    return times


def _in_turns(
    one: Callable[[Tensor, Tensor], object], other: Callable[[Tensor, Tensor], object], calls: list[Call]
) -> tuple[list[float], list[float]]:
    """The times of both sides, which serve each call one after the other."""
    times = [(_times(one, [call])[0], _times(other, [call])[0]) for call in calls]
    return [a for a, _ in times], [b for _, b in times]


def _mean(times: list[float]) -> float:
    return 1e6 * sum(times) / len(times)


def _costs(model: nn.Module) -> CostModel:
    """Milliseconds by tokens, of eager calls and of full graphs, at some sizes."""
    eager, graph = {}, {}
    for batch, length in ((1, 16), (2, 32), (4, 40), (4, 64), (8, 48), (8, 64)):
        ids, mask = torch.randint(1, 1000, (batch, length)), torch.ones(batch, length, dtype=torch.long)
        serve = _served(model, Plan.from_sizes([(batch, length)]))
        serve.prewarm(ids, mask)
        for times, side in ((eager, model), (graph, serve)):
            times[batch * length] = 1e3 * sorted(_times(side, [(ids, mask)] * 30))[15]
    return CostModel(eager_ms=eager, full_ms=graph)
