"""A Llama-architecture decoder at the batch sizes of a trace: tokens per second and step latency, by graphs or not."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from graphdispatch import CUDAGraphOptions, Graphed, Pad, eager_break, graphed
from graphdispatch.demo import PRESETS, Decoder, DecoderConfig
from graphdispatch.engines import named_sizes

from .bench import Bench, Call, Figures, Row, by_graphs, difference, latencies, percentile, served
from .peers import PaddedRawGraphs, compiled

__all__ = [
    "MODELS",
    "TITLE",
    "Inputs",
    "Makers",
    "batches",
    "emit_steps",
    "make_decoder",
    "prewarmed",
    "run",
    "sizes_and_example",
]

TITLE = "Decode steps, batch sizes from a trace (latency: from the call to the end of its work)"
MODELS: Mapping[str, DecoderConfig] = {
    "tiny": PRESETS["tiny"],
    "0.1B": DecoderConfig(layers=12, hidden=768, heads=12, kv_heads=4, head_dim=64, ffn=2048, vocab=32_000, window=256),
    "1B": PRESETS["1b"],
    # The dimensions of Llama 3 8B (its config.json), with a short window.
    "8B": DecoderConfig(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14_336, vocab=128_256, window=256
    ),
}
Inputs = tuple[Tensor, Tensor, Tensor]
Step = Callable[..., Tensor]
Makers = dict[str, tuple[Callable[[], Step], Decoder]]
"""For each side, how to make it, and the decoder whose cache it writes."""
_SIDE_SECONDS = 60.0  # left out when less time than this remains: a compilation takes about as long
_STEPS = {"8B": 60}  # of the others 200
_SECONDS = {"8B": 40.0, "1B": 20.0}  # about how long a model takes, its weights and captures included
_ALONE = ("8B", "tiny")  # measured at batch 1, too
_EAGER, _RAW, _FULL = "eager", "raw graphs by hand", "graphed() FULL"


def run(bench: Bench) -> None:
    """Each model while there is time; last of all, beside ``torch.compile``."""
    is_small = bench.quick or bench.device.type == "cpu"
    for name in ("tiny",) if is_small else ("8B", "1B", "0.1B"):
        if not bench.has_time(_SECONDS.get(name, 10.0), name):
            continue
        decoder = make_decoder(bench, name)
        count = 12 if bench.quick else _STEPS.get(name, 200)
        if name in _ALONE:
            _measure(bench, f"{name}, batch 1", decoder, batches(bench, decoder.config, [1] * count))
        steps = batches(bench, decoder.config, bench.requests(count))
        _measure(bench, name, decoder, steps)
        if bench.compiles and name in ("tiny", "0.1B"):
            _measure_compiled(bench, name, decoder, steps)
        del decoder, steps
        bench.empty_cache()


def make_decoder(bench: Bench, name: str) -> Decoder:
    """Random weights and an empty cache, with a slot for each request of the trace."""
    slots = max(bench.requests(1_000_000))
    return Decoder(MODELS[name], slots, device=bench.device, dtype=bench.dtype)


def batches(bench: Bench, config: DecoderConfig, requests: Sequence[int]) -> list[Inputs]:
    """Decode batches of so many requests, on the device: a row for each request, each in its own slot."""
    generator = torch.Generator().manual_seed(0)
    slots = max(bench.requests(1_000_000))
    made = []
    for rows in requests:
        made.append(
            (
                torch.randint(config.vocab, (rows,), generator=generator).to(bench.device),
                torch.randperm(slots, generator=generator)[:rows].to(bench.device),
                torch.randint(config.window, (rows,), generator=generator).to(bench.device),
            )
        )
    return made


def prewarmed(
    decoder: Decoder, sizes: Sequence[int], example: Inputs, mode: str = "FULL"
) -> Graphed[[Tensor, Tensor, Tensor], Tensor]:
    """The decoder behind ``graphed``, every size captured. Comparisons that are still due never wait."""
    step = graphed(
        decoder,
        dynamic={"token_ids": 0, "slots": 0, "positions": 0},
        pad={"slots": Pad.value(decoder.scratch_slot)},
        sizes=sizes,
        mode=mode,
        options=CUDAGraphOptions(padding_writes="allow", capture_share=None),
    )
    step.prewarm(*example)
    return step


def _measure(bench: Bench, name: str, decoder: Decoder, steps: list[Inputs]) -> None:
    sizes, example = sizes_and_example(steps)
    hand = (0, decoder.scratch_slot, 0)
    makers: Makers = {
        _EAGER: (lambda: decoder, decoder),
        _RAW: (lambda: PaddedRawGraphs(bench, decoder, example, hand, sizes), decoder),
        _FULL: (lambda: prewarmed(decoder, sizes, example), decoder),
    }
    if len(sizes) > 1:
        pieces = decoder.twin()
        for layer in pieces.layers:
            eager_break(layer.get_submodule("attention"))
        makers["graphed() PIECEWISE"] = (lambda: prewarmed(pieces, sizes, example, "PIECEWISE"), pieces)
    speeds = emit_steps(bench, name, steps, makers)
    for peer in (_RAW, _EAGER):
        if {_FULL, peer} <= speeds.keys():
            figures: Figures = {"tokens_per_s_ratio": speeds[_FULL] / speeds[peer]}
            bench.emit(Row(_case(name, steps), f"{_FULL} over {peer}", figures))


def _measure_compiled(bench: Bench, name: str, decoder: Decoder, steps: list[Inputs]) -> None:
    """Beside ``torch.compile``, padded by hand and not."""
    if not bench.has_time(_SIDE_SECONDS, f"{name}, beside torch.compile"):
        return
    sizes, _ = sizes_and_example(steps)
    step = compiled(decoder, dynamic=True)
    padded: Makers = {
        "eager, again": (lambda: decoder, decoder),
        "reduce-overhead, padded": (lambda: _Padded(step, sizes, decoder.scratch_slot), decoder),
    }
    emit_steps(bench, name, steps, padded)
    if bench.has_time(_SIDE_SECONDS, f"{name}, reduce-overhead, not padded"):
        emit_steps(bench, name, steps, {"reduce-overhead, not padded": (lambda: step, decoder)})
    torch._dynamo.reset()


def sizes_and_example(steps: Sequence[Inputs]) -> tuple[list[int], Inputs]:
    """vLLM's sizes up to the largest batch, and that batch."""
    example = max(steps, key=lambda inputs: len(inputs[0]))
    largest = len(example[0])
    return sorted({*named_sizes("vllm", largest), largest}), example


def _case(name: str, steps: list[Inputs]) -> str:
    return f"{name}, {len(steps)} steps"


def emit_steps(bench: Bench, name: str, steps: list[Inputs], makers: Makers) -> dict[str, float]:
    """Make each side and run it over all steps twice, check it, then time all; a row each. Their tokens a second."""
    case, speeds = _case(name, steps), {}
    made = {side: bench.attempt(case, side, partial(_ready, make, steps)) for side, (make, _) in makers.items()}
    sides = {side: fn for side, fn in made.items() if fn is not None}
    errors = {side: _error(fn, makers[side][1], steps[len(steps) // 2]) for side, fn in sides.items()}
    calls: dict[str, list[Call]] = {side: [partial(fn, *inputs) for inputs in steps] for side, fn in sides.items()}
    tokens = sum(len(inputs[0]) for inputs in steps)
    before = {side: served(fn.stats) for side, fn in sides.items() if isinstance(fn, Graphed)}
    for side, taken in latencies(bench, calls).items():
        speeds[side] = tokens / sum(taken)
        figures: Figures = {
            "tokens_per_s": speeds[side],
            "p50_ms": 1e3 * percentile(taken, 50),
            "p99_ms": 1e3 * percentile(taken, 99),
            "difference": errors[side],
        }
        step = sides[side]
        if isinstance(step, Graphed):
            figures |= by_graphs(step.stats, before[side], len(steps))
        bench.emit(Row(case, side, {**figures, **_skips(side)}))
    return speeds


def _ready(make: Callable[[], Step], steps: list[Inputs]) -> Step:
    fn = make()
    for inputs in (*steps, *steps):
        fn(*inputs)
    return fn


def _error(fn: Step, decoder: Decoder, inputs: Inputs) -> float:
    """How far one step is from eager's, both on an empty cache."""
    answers = []
    for one in (decoder, fn):
        decoder.cache_keys.zero_()
        decoder.cache_values.zero_()
        answers.append(one(*inputs).clone())
    return difference(*answers)


def _skips(side: str) -> dict[str, float]:
    """How many of Inductor's graphs were not captured, which it does without an error."""
    if not side.startswith("reduce"):
        return {}
    counters = torch._dynamo.utils.counters["inductor"]
    return {"cudagraph_skips": float(counters["cudagraph_skips"])}


class _Padded:
    """Pads by hand before a compiled step, so that it sees the capture sizes alone."""

    def __init__(self, step: Callable[..., Tensor], sizes: Sequence[int], scratch_slot: int) -> None:
        self._step = step
        self._size_of = [min(s for s in sizes if s >= rows) for rows in range(max(sizes) + 1)]
        self._pads = (0, scratch_slot, 0)

    def __call__(self, *inputs: Tensor) -> Tensor:
        rows = len(inputs[0])
        more = self._size_of[rows] - rows
        if more:
            inputs = tuple(torch.cat([x, x.new_full((more,), p)]) for x, p in zip(inputs, self._pads, strict=True))
        return self._step(*inputs)[:rows].clone()
