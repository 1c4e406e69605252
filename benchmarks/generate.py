"""``generate()`` of a small Llama: microseconds per token by graphs, over transformers' own ways in the same turns.

Beside its default cache, which grows, stands its static cache, eagerly and compiled. Compiling has a limit of time; it
needs a compiler, and is left out where it fails.
"""

import importlib.util
import signal
from collections.abc import Callable
from typing import Any

import torch

from .timing import Effort, Row, compared, interleaved

__all__ = ["TITLE", "make_model", "rows"]

TITLE = "generate() by graphs over transformers, microseconds per token (a Llama of 4 layers x 256)"
_TOKENS = 48
_MOST_TURNS = 7  # a turn generates whole sequences
_COMPILE_SECONDS = 240


def rows(effort: Effort) -> list[Row]:
    """For batches of 1 and 4: graphs over each other way; none without transformers."""
    if importlib.util.find_spec("transformers") is None:
        return []
    import transformers

    from graphdispatch.integrations.transformers import graphed_generation

    plain, twin = (make_model(transformers) for _ in range(2))
    graphed_generation(twin, cache_lengths=(64,))
    found = []
    for count in (1, 4):
        batch = {"input_ids": torch.randint(2, 1000, (count, 9)), "attention_mask": torch.ones(count, 9).long()}
        request: dict[str, Any] = {**batch, "max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS, "do_sample": False}
        ways: dict[str, Callable[[], Any]] = {
            "graphs": lambda request=request: twin.generate(**request),
            "default cache": lambda request=request: plain.generate(**request),
            "static cache": lambda request=request: plain.generate(**request, cache_implementation="static"),
        }
        compiled = _compiled(transformers, plain, request)
        if compiled is not None:
            ways["static cache, compiled"] = compiled
        for way in ways.values():
            way()
        graphs_s, *others_s = interleaved(list(ways.values()), min(effort.turns, _MOST_TURNS))
        for name, seconds in zip(list(ways)[1:], others_s, strict=True):
            found.append(compared(f"batch {count}, graphs over {name}", graphs_s, seconds, _TOKENS))
    return found


def make_model(transformers: Any, dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    """A Llama of random weights on the default device; small, but for other ``sizes``. It never ends by itself."""
    torch.manual_seed(0)
    small = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    }
    config = transformers.LlamaConfig(**{**small, **sizes}, pad_token_id=1, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    return model


def _compiled(transformers: Any, model: Any, request: dict[str, Any]) -> Callable[[], Any] | None:
    """``generate`` with transformers' compiled static cache, once it is compiled; None where that fails or is slow."""
    config = transformers.CompileConfig(mode="default")
    config._compile_all_devices = True

    def way() -> Any:
        return model.generate(**request, cache_implementation="static", compile_config=config)

    def give_up(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_COMPILE_SECONDS)
    try:
        way()
    except Exception as error:
        print(f"transformers' compiled static cache is left out: {type(error).__name__}")
        return None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return way
