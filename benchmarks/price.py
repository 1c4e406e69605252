"""What proven graphs cost: runs of the model for each graph, and the times of a cold service and of the first image of
``examples/diffusion.py`` beside eager.

A run is an eager one, a recorded one or a replay. Runs are counted by the one ``tanh`` of the model, under torch's
profiler. A plain capture loop takes 3 for each size: a warm-up, the recording, and the call's own replay.
"""

from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from graphdispatch import CUDAGraphOptions, Graphed, graphed

from .timing import Effort, Row

__all__ = ["TITLE", "Cache", "Encoder", "rows"]

TITLE = "runs of the model for each graph, and a cold service beside eager"
_SIZES = (1, 2, 4, 8, 16, 24, 32)
_CALLS = 300


class Encoder(nn.Module):
    """An encoder of six layers with a mask, and one ``tanh`` behind them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(6))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x`` of (rows, 16, width); ``mask`` of (rows, 16), true where a token counts."""
        for layer in self.layers:
            x = layer(x, mask[:, None, None])
        return torch.tanh(x)


class Layer(nn.Module):
    """Attention of four heads, and two linear maps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x`` of (rows, length, width); ``mask`` of (rows, 1, 1, length)."""
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.project(self.first(x)).chunk(3, -1)
        )
        attended = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.second(x))))


class Cache(nn.Module):
    """A decoder's step: it writes keys into slots of a cache, and attends to all that lie there."""

    def __init__(self, slots: int = 64, width: int = 64) -> None:
        super().__init__()
        self.project = nn.Linear(width, 2 * width)
        self.register_buffer("keys", torch.zeros(slots, width))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """``x`` of (rows, width), ``slots`` of (rows,): where each row writes."""
        query, key = self.project(x).chunk(2, -1)
        self.keys.index_copy_(0, slots, key)
        return torch.tanh(query * self.keys[slots])


def rows(effort: Effort) -> list[Row]:
    """Runs for each graph beside those of a plain capture loop, then the times of services."""
    torch.manual_seed(0)
    found = [_prewarmed(f"prewarm, {len(sizes)} sizes up to {sizes[-1]}", sizes) for sizes in (_SIZES, _to_64())]
    found += [*_on_demand(), _cached(), _prewarm_time()]
    for width in (64, 256):
        found += _service(f"cold service of width {width}", width, is_cold=True)
        found += _service(f"after prewarm of width {width}", width, is_cold=False)
    return [*found, *(_first_image(*image) for image in ((1, 24, 16), (4, 24, 16), (4, 64, 16), (1, 256, 64)))]


def _to_64() -> tuple[int, ...]:
    return (*range(1, 9), *range(12, 33, 4), 40, 48, 56, 64)


def _batch(count: int, width: int = 64) -> tuple[Tensor, Tensor]:
    mask = torch.ones(count, 16, dtype=torch.bool)
    mask[:, 12:] = False
    return torch.randn(count, 16, width), mask


def _made(sizes: tuple[int, ...], width: int = 64, **options: Any) -> tuple[Encoder, Graphed]:
    with torch.inference_mode(False):  # as users make them
        model = Encoder(width)
    return model, graphed(model, dynamic={"x": 0, "mask": 0}, sizes=sizes, **options)


def _runs(call: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    return sum(event.name == "aten::tanh" and not _is_within(event) for event in profiler.events())


def _is_within(event: Any) -> bool:
    """Whether an operator is called by one of the same name, as one is that a mode passes on."""
    parent = event.cpu_parent
    while parent is not None and parent.name != event.name:
        parent = parent.cpu_parent
    return parent is not None


def _prewarmed(case: str, sizes: tuple[int, ...]) -> Row:
    _, step = _made(sizes)
    batch = _batch(sizes[-1])
    return Row(f"{case}, each", _runs(lambda: step.prewarm(*batch)) / len(sizes), 3, "runs")


def _until_hit(step: Graphed, batch: Callable[[], tuple[Tensor, ...]]) -> int:
    """The runs of the calls that capture and compare, until one is served by a graph."""
    total = 0
    step._graphs.clock = float  # under a profiler a graph may seem to gain nothing, and would be timed again
    for _ in range(8):
        args = batch()
        count = _runs(lambda args=args: step(*args))
        decision = step.last_decision
        assert decision is not None
        if decision.reason.is_graph:
            return total
        total += count if decision.reason.leads_to_graph and decision.reason.name != "FIRST_SIGHTING" else 0
    raise AssertionError(decision.explain())


def _on_demand() -> list[Row]:
    _, step = _made(_SIZES, options=CUDAGraphOptions(capture_share=None))
    first, further, proof, number = (_until_hit(step, lambda n=n: _batch(n)) for n in (8, 16, 13, 11))
    return [
        Row("first capture of a signature and its second batch", first, 3, "runs"),
        Row("a further size and its second batch", further, 3, "runs"),
        Row("the first padded batch of a signature, with its proof", proof, 1, "runs"),
        Row("the first batch of a further number of rows", number, 1, "runs"),
    ]


def _cached() -> Row:
    step = graphed(Cache(), dynamic={"x": 0, "slots": 0}, sizes=(8,), options=CUDAGraphOptions(capture_share=None))
    count = _until_hit(step, lambda: (torch.randn(8, 64), torch.randperm(64)[:8]))
    return Row("a decoder's step with a KV cache until it is trusted", count, 3, "runs")


def _prewarm_time() -> Row:
    """How many eager runs of the largest size take as long as ``prewarm``, for each size."""
    model, step = _made(_SIZES)
    batch = _batch(_SIZES[-1])
    eager = median(_seconds(lambda: model(*batch)) for _ in range(15))
    return Row(
        f"prewarm, {len(_SIZES)} sizes, each",
        _seconds(lambda: step.prewarm(*batch)) / len(_SIZES) / eager,
        3,
        "eager runs",
    )


def _service(case: str, width: int, *, is_cold: bool) -> list[Row]:
    """The same 300 batches of 1 to 32 rows by graphs and eagerly, in turns."""
    model, step = _made(_SIZES, width)
    generator = torch.Generator().manual_seed(0)
    # Torch prepares its kernels at the first run of each shape, with graphs or without.
    for count in range(1, _SIZES[-1] + 1):
        model(*_batch(count, width))
    if not is_cold:
        step.prewarm(*_batch(_SIZES[-1], width))
    counts = torch.randint(1, _SIZES[-1] + 1, (_CALLS,), generator=generator).tolist()
    batches = [_batch(count, width) for count in counts]
    pairs = [_timed(step, model, batch, swapped=index % 2 == 1) for index, batch in enumerate(batches)]
    served, eager = (sum(times) for times in zip(*pairs, strict=True))
    usual = eager / _CALLS
    case = f"{case}, {_CALLS} calls of {usual * 1e3:.1f} ms"
    slow = [graph for graph, _ in pairs if graph > 3 * usual]
    return [
        Row(f"{case}: time of all", served / usual, eager / usual, "eager steps"),
        Row(f"{case}: slowest call", max(graph for graph, _ in pairs) / usual, 1, "eager steps"),
        Row(f"{case}: calls of more than three eager steps", len(slow), 0, "calls"),
    ]


def _first_image(count: int, width: int, side: int) -> Row:
    """The first images of the example without a prewarm: 30 steps, of which the second captures."""
    example = run_path(str(Path(__file__).parents[1] / "examples" / "diffusion.py"))
    with torch.inference_mode(False):
        model = example["Denoiser"](width).eval().requires_grad_(False)
    step, inputs = example["make_step"](model), (torch.randn(count, 3, side, side), torch.arange(count))
    names = ("sample", "sigma", "following", "label")
    serve = graphed(step, dynamic=dict.fromkeys(names, 0), sizes=(1, 2, 4))
    eager = median(_seconds(lambda: example["generate"](step, *inputs)) for _ in range(5))
    first = _seconds(lambda: example["generate"](serve, *inputs))
    return Row(
        f"diffusion, first {count} of width {width}, {side} x {side}, steps of {eager / 30 * 1e3:.1f} ms",
        first / eager,
        1,
        "times eager",
    )


def _timed(step: Graphed, model: Encoder, batch: tuple[Tensor, ...], *, swapped: bool) -> tuple[float, float]:
    """The seconds of a served call and of an eager one; with ``swapped`` eager goes first."""
    calls = [lambda: step(*batch), lambda: model(*batch)]
    if swapped:
        eager, served = map(_seconds, reversed(calls))
    else:
        served, eager = map(_seconds, calls)
    return served, eager


def _seconds(call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started
