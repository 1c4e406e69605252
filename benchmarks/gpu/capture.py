"""What it costs to capture all of vLLM's sizes: seconds and bytes, by ``prewarm``, by hand, by ``torch.compile``."""

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphdispatch import Graphed
from graphdispatch.demo import Decoder
from graphdispatch.engines import named_sizes

from .bench import Bench, Figures, Row, by_graphs, served
from .decode import Inputs, make_decoder, prewarmed
from .peers import compiled, new_pool, raw_graph

__all__ = ["TITLE", "run"]

TITLE = "Capture of vLLM's sizes (bytes: what the device lost, and what of it the allocator reserved)"
_COMPILE_SECONDS = 90.0
_PREWARM, _LOOP = "graphed().prewarm", "torch's graphs in a loop"
_LARGEST = ", the largest alone"


def run(bench: Bench) -> None:
    """All sides on one decoder; each gives its graphs back before the next."""
    name = "tiny" if bench.quick or bench.device.type == "cpu" else "1B"
    decoder = make_decoder(bench, name)
    sizes = named_sizes("vllm", 16 if bench.quick else 512)
    example = _example(bench, decoder, sizes[-1])
    for size in sizes:  # what is loaded on first use is nobody's cost
        decoder(*(x[:size] for x in example))
    prewarmed(decoder, sizes[:1], example).clear()
    case = f"{name}, {len(sizes)} sizes to {sizes[-1]}"
    sides: dict[str, Callable[[], Any]] = {
        _LOOP: lambda: _loop(bench, decoder, sizes, example, collects=False),
        _PREWARM: lambda: prewarmed(decoder, sizes, example),
        _PREWARM + _LARGEST: lambda: prewarmed(decoder, sizes[-1:], example),
        _LOOP + _LARGEST: lambda: _loop(bench, decoder, sizes[-1:], example, collects=False),
        f"{_LOOP}, gc each": lambda: _loop(bench, decoder, sizes, example, collects=True),
    }
    if bench.compiles:
        sides["reduce-overhead, compilation included"] = lambda: _compiled(decoder, sizes, example)
    found: dict[str, Figures] = {}
    for side, make in sides.items():
        if bench.has_time(_COMPILE_SECONDS if side.startswith("reduce") else 10, f"{case}, {side}"):
            then = partial(_serve_all, bench, f"{case}, then batches of {sizes[-1]} sizes", example)
            figures = bench.attempt(
                case, side, partial(_cost, bench, make, example, then if side == _PREWARM else None)
            )
            if figures is not None:
                found[side] = figures
                bench.emit(Row(case, side, figures))
                _compare(bench, case, found, side)


def _compare(bench: Bench, case: str, found: dict[str, Figures], latest: str) -> None:
    """The rows of ratios that the latest side completes."""
    ratios = (
        (_PREWARM, _LOOP, "seconds"),
        (_PREWARM, _PREWARM + _LARGEST, "device_MiB"),
        (_PREWARM, _PREWARM + _LARGEST, "reserved_MiB"),
        (_LOOP, _LOOP + _LARGEST, "device_MiB"),
    )
    for one, other, figure in ratios:
        upper, lower = (float(found.get(side, {}).get(figure, 0)) for side in (one, other))
        if latest in (one, other) and upper and lower:
            bench.emit(Row(case, f"{one} over {other}", {f"{figure}_ratio": upper / lower}))


def _serve_all(bench: Bench, case: str, example: Inputs, step: Graphed[..., Tensor]) -> None:
    """A batch of each number of rows, the largest first: how many were hits, and how many compared a graph first."""
    rows = range(len(example[0]), 0, -1)
    before, compared = served(step.stats), step.stats.verifications
    start = time.perf_counter()
    for count in rows:
        step(*(x[:count] for x in example))
    bench.synchronize()
    figures: Figures = {"seconds": time.perf_counter() - start, "comparisons": step.stats.verifications - compared}
    bench.emit(Row(case, "graphed()", figures | by_graphs(step.stats, before, len(rows))))


def _cost(
    bench: Bench, make: Callable[[], Any], example: Inputs, then: Callable[[Graphed[..., Tensor]], None] | None
) -> Figures:
    """Seconds to make the graphs, and the memory that is gone while they are kept; ``then`` uses them."""
    free, reserved = _settled(bench)
    start = time.perf_counter()
    kept = make()
    bench.synchronize()
    seconds = time.perf_counter() - start
    free_after, reserved_after = _settled(bench)
    figures: Figures = {"seconds": seconds}
    if bench.device.type != "cpu":
        figures |= {
            "device_MiB": (free - free_after) / 2**20,
            "reserved_MiB": (reserved_after - reserved) / 2**20,
        }
    if isinstance(kept, Graphed):
        figures["accounted_MiB"] = kept.memory_bytes / 2**20
        if then is not None:
            then(kept)
        kept.clear()
    del kept
    torch._dynamo.reset()
    _settled(bench)
    return figures


def _settled(bench: Bench) -> tuple[int, int]:
    """Bytes that the device has free, and that torch holds there; 0 where there is no such device."""
    gc.collect()  # graphs of an earlier side may be part of a circle
    bench.empty_cache()
    if bench.device.type == "cpu":
        return 0, 0
    return torch.accelerator.get_memory_info(bench.device)[0], torch.accelerator.memory_reserved(bench.device)


def _loop(bench: Bench, decoder: Decoder, sizes: Sequence[int], example: Inputs, *, collects: bool) -> list[Any]:
    pool, kept = new_pool(bench), []
    for size in reversed(sizes):
        if collects:
            gc.collect()
        kept.append(raw_graph(bench, decoder, [x[:size] for x in example], pool))
    return kept


def _compiled(decoder: Decoder, sizes: Sequence[int], example: Inputs) -> Callable[..., Tensor]:
    step = compiled(decoder, dynamic=True)
    for size in reversed(sizes):
        for _ in range(2):  # once to warm up, once to record
            step(*(x[:size] for x in example))
    return step


def _example(bench: Bench, decoder: Decoder, rows: int) -> Inputs:
    """Distinct places, as a step has them."""
    row, window = torch.arange(rows, device=bench.device), decoder.config.window
    return row % decoder.config.vocab, row // window, row % window
