"""Tiny decoders of many families with random weights, and the requests that are made of them."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers

CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
"""The argument by which this transformers gives a model its cache."""

_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 256,
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 256}
_MOE = {"num_experts_per_tok": 2}
_SLIDING = {"sliding_window": 8}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _COMMON),
    "mistral": ("MistralConfig", _COMMON | _SLIDING),
    "qwen3": ("Qwen3Config", _COMMON | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", _COMMON | _SLIDING | {"head_dim": 8}),
    "phi3": ("Phi3Config", _COMMON),
    "gpt2": ("GPT2Config", _GPT),
    "opt": ("OPTConfig", _COMMON | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
    "falcon": ("FalconConfig", _COMMON),
    "gpt_oss": ("GptOssConfig", _COMMON | _SLIDING | _MOE | {"head_dim": 8, "num_local_experts": 4}),
    "mixtral": ("MixtralConfig", _COMMON | _MOE | {"num_local_experts": 4}),
    "lfm2": ("Lfm2Config", _COMMON),
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 4}),
}
"""By family: the class of its configuration and the configuration."""


def make_model(family: str) -> Any:
    """The model, which generates until ``max_new_tokens``."""
    torch.manual_seed(0)
    kind, settings = FAMILIES[family]
    config = getattr(transformers, kind)(**settings, **_TOKENS)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(rows: int, length: int, *, pads: bool = True) -> dict[str, torch.Tensor]:
    """A batch of prompts: with ``pads``, all but every fourth have some padding on the left."""
    ids = torch.randint(2, 99, (rows, length), generator=torch.Generator().manual_seed(100 * rows + length))
    mask = torch.ones_like(ids)
    for row in range(rows if pads else 0):
        ids[row, : row % 4], mask[row, : row % 4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampling": {"max_new_tokens": 12, "do_sample": True, "top_k": 20},
    "beams": GREEDY | {"num_beams": 3},
    "beam sampling": {"max_new_tokens": 12, "do_sample": True, "num_beams": 2},
    "several sequences": {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 2},
    "penalties": GREEDY | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
"""Ways to generate that graphs serve."""

Requests = list[tuple[dict[str, torch.Tensor], dict[str, Any]]]


def answers(model: Any, requests: Requests, note: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
    """The tokens of each request, which begins with the same random numbers wherever it is made."""
    tokens = []
    for batch, settings in requests:
        torch.manual_seed(7)
        tokens.append(model.generate(**batch, **settings))
        note()
    return tokens
