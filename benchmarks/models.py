"""Models that people use, at their published sizes and with random weights, by graphs beside eager on the CPU.

A speed does not depend on the values of weights, so nothing is downloaded. All batches have one row, those of the actor
eight. README shows the rows; ``docs/pictures/chart.py`` prints them.
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, graphed

from .timing import Effort, Row, compared, interleaved

__all__ = ["TITLE", "rows"]

TITLE = "models at their published sizes by graphs, beside eager"
_MOST_TURNS = 31
_CACHE = 256  # tokens: each turn of each side goes one further


class Model(NamedTuple):
    """A model as the step that is called, and batches for it."""

    name: str
    step: Callable[..., Any]
    batch: Callable[[], dict[str, Tensor]]
    dynamic: dict[str, int]
    """The batch dimensions; none where the step's cache has a batch size of its own."""


def rows(effort: Effort) -> list[Row]:
    """For each model: a step by graphs over an eager one, in the same turns; none without transformers."""
    if importlib.util.find_spec("transformers") is None:
        return []
    found = []
    for model in _models():
        at_once = CUDAGraphOptions(capture_share=None)
        serve = graphed(model.step, dynamic=model.dynamic, sizes=(1, 2, 4, 8), options=at_once)
        for _ in range(8):
            serve(**model.batch())
        batch = model.batch()
        assert serve.last_decision is not None
        assert serve.last_decision.reason.is_graph, serve.last_decision.explain()
        sides = [lambda s=serve, b=batch: s(**b), lambda m=model, b=batch: m.step(**b)]
        found.append(compared(model.name, *interleaved(sides, min(effort.turns, _MOST_TURNS))))
    return found


def _models() -> Iterator[Model]:
    import transformers

    torch.manual_seed(0)
    yield _smollm(transformers)
    bert = transformers.BertModel(
        transformers.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    )
    yield Model(
        "MiniLM-L6, 16 tokens",
        lambda input_ids: bert(input_ids=input_ids).last_hidden_state.mean(1),
        lambda: {"input_ids": torch.randint(0, 30000, (1, 16))},
        {"input_ids": 0},
    )
    vit = transformers.ViTModel(
        transformers.ViTConfig(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768)
    )
    mobile = transformers.MobileNetV2Model(transformers.MobileNetV2Config())
    for name, net in (("ViT-Ti/16", vit), ("MobileNetV2", mobile)):
        net.eval()
        yield Model(
            f"{name}, one image",
            lambda pixel_values, net=net: net(pixel_values=pixel_values).pooler_output,
            lambda: {"pixel_values": torch.randn(1, 3, 224, 224)},
            {"pixel_values": 0},
        )
    actor = nn.Sequential(nn.Linear(17, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 12)).eval()
    yield Model("SAC actor, 8 environments", actor, lambda: {"input": torch.randn(8, 17)}, {"input": 0})


def _smollm(transformers: Any) -> Model:
    """A decode step with a static cache, as ``generate`` calls it."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    model, steps = transformers.LlamaForCausalLM(config).eval(), itertools.count()
    cache = transformers.StaticCache(config=config, max_cache_len=_CACHE)

    def step(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        out = model(input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True)
        logits: Tensor = out.logits
        return logits

    def batch() -> dict[str, Tensor]:
        cache.reset()
        return {"input_ids": torch.tensor([[next(steps) % 1000]]), "position_ids": torch.zeros(1, 1, dtype=torch.long)}

    step(**batch())
    return Model("SmolLM2-135M, decode step", step, batch, {})
