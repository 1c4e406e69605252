"""transformers' ``generate()`` of a Llama of a billion random weights, by graphs and by transformers' own ways."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..generate import make_model
from .bench import Bench, Figures, Row, latencies, percentile

__all__ = ["TITLE", "run"]

TITLE = "generate(), 64 new tokens (tokens per second of whole requests; median of turns)"
_LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32_000}
_LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8}
_CACHE = 128  # tokens, enough for the prompt and what is generated
_COMPILE_SECONDS = 90
_GRAPHS, _STATIC = "graphed_generation()", "static cache"
_Way = Callable[[], torch.Tensor]


def run(bench: Bench) -> None:
    """Batches of 1 and 4; last of all the compiled static cache."""
    import transformers

    from graphdispatch.integrations.transformers import graphed_generation

    is_small = bench.quick or bench.device.type == "cpu"
    with torch.device(bench.device):
        plain, twin = (make_model(transformers, bench.dtype, **({} if is_small else _LLAMA)) for _ in range(2))
    serving = graphed_generation(twin, cache_lengths=(_CACHE,))
    tokens = 16 if bench.quick else 64
    request = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "disable_compile": True}
    compiled = []
    for count in (1, 4):
        if not bench.has_time(15, f"batch {count}"):
            return
        torch.manual_seed(count)
        ids = torch.randint(2, 1000, (count, 9)).to(bench.device)
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **request}
        ways: dict[str, _Way] = {
            _GRAPHS: partial(twin.generate, **batch),
            "default cache": partial(plain.generate, **batch),
            _STATIC: partial(plain.generate, **batch, cache_implementation="static"),
        }
        _measure(bench, f"batch {count}", ways, count * tokens)
        bench.emit(Row(f"batch {count}", "steps by graphs so far", {"hit_rate": serving.stats.hit_rate}))
        batch["disable_compile"] = False
        compile_config = transformers.CompileConfig(mode="reduce-overhead")
        ways["static cache, compiled"] = partial(
            plain.generate, **batch, cache_implementation="static", compile_config=compile_config
        )
        compiled.append((f"batch {count}, beside torch.compile", ways, count * tokens))
    for case, ways, generated in compiled if bench.compiles else []:
        if bench.has_time(_COMPILE_SECONDS, case):
            _measure(bench, case, ways, generated)


def _measure(bench: Bench, case: str, ways: dict[str, _Way], generated: int) -> None:
    """Each way twice untimed, then in turns; and the share of the static cache's tokens that it gives, too."""
    made = {side: bench.attempt(case, side, lambda way=way: (way(), way())[1]) for side, way in ways.items()}
    turns = 2 if bench.quick else 3
    taken = latencies(bench, {side: [ways[side]] * turns for side, got in made.items() if got is not None})
    speeds = {side: generated / percentile(times, 50) for side, times in taken.items()}
    for side, speed in speeds.items():
        figures: Figures = {"tokens_per_s": speed}
        got, expected = made[side], made.get(_STATIC)
        if got is not None and expected is not None:
            figures["same_tokens"] = float((got == expected).double().mean())
        bench.emit(Row(case, side, figures))
    for side in speeds:
        if side != _GRAPHS and _GRAPHS in speeds:
            ratio: Figures = {"tokens_per_s_ratio": speeds[_GRAPHS] / speeds[side]}
            bench.emit(Row(case, f"{_GRAPHS} over {side}", ratio))
