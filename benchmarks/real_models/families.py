"""Models that people run, tiny and with random weights, each in the styles in which people call it.

``families()`` gives builders by name; a builder gives the callable, what makes fresh arguments for some rows, and the
``dynamic`` of ``graphed``. Nothing is downloaded.
"""

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["Case", "build_cases", "cases_of"]

LENGTH = 12
_VOCABULARY = 96


class Case(NamedTuple):
    """One model, called in one style."""

    family: str
    style: str
    model: Callable[..., Any]
    arguments: Callable[[int, torch.Generator], dict[str, Any]]
    """Fresh keyword arguments of so many rows."""
    dynamic: dict[str, int]


def cases_of() -> list[tuple[str, str]]:
    """The kinds and names of all families."""
    lines = Path(__file__).with_name("families.txt").read_text().splitlines()
    listed = {kind: names.split() for kind, _, names in (line.partition(":") for line in lines)}
    return [(kind, name) for kind, names in (listed | {"nn": list(_MODULES)}).items() for name in names]


def build_cases(kind: str, name: str) -> Iterator[Case]:
    """The cases of one family. Raises whatever the libraries raise for a family that cannot be made so small."""
    torch.manual_seed(0)
    if kind == "nn":
        yield from _module_cases(name)
    elif kind == "timm":
        yield from _timm_cases(name)
    else:
        yield from _CASES[kind](name, _tiny_model(kind, name))


_TINY = {
    "hidden_size d_model n_embd dim embedding_size emb_dim word_embed_proj_dim hidden_dim": 32,
    "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size n_inner hidden_dim_ff": 64,
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers": 2,
    "num_decoder_layers num_encoder_layers": 2,
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads": 4,
    "num_encoder_attention_heads num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim kv_lora_rank q_lora_rank": 8,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings n_positions max_seq_len seq_length": 64,
    "num_experts num_local_experts moe_num_experts n_routed_experts": 4,
    "num_experts_per_tok moe_top_k num_experts_per_token": 2,
    "n_group topk_group": 1,
    "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size": 32,
    "image_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id decoder_start_token_id": 2,
    "conv_dim": (32, 32),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "state_size mamba_d_state": 8,
    "attention_window": 4,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "funnel": {"block_sizes": [1, 1], "d_head": 8, "d_inner": 64},
    "levit": {"image_size": 64},
    "swin": {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "patch_size": 4},
    "swinv2": {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4, "patch_size": 4},
    "focalnet": {"depths": [1, 1], "embed_dim": 16, "focal_levels": [1, 1], "focal_windows": [3, 3], "patch_size": 4},
    "hiera": {"image_size": [32, 32], "depths": [1, 1], "embed_dim": 16, "num_heads": [1, 2], "query_stride": [2, 2]},
    "mobilevit": {"hidden_sizes": [32, 32, 32], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16]},
    "convnext": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 16]},
    "convnextv2": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 16]},
    "resnet": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 16], "embedding_size": 8},
    "regnet": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 16, 16], "embedding_size": 8, "groups_width": 8},
    "bit": {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 32, 32, 32], "embedding_size": 32, "num_groups": 8},
    "longt5": {"local_radius": 4, "global_block_size": 4},
    "splinter": {"initialize_new_qass": False},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 4},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "use_mamba_kernels": False},
    "roc_bert": {"pronunciation_vocab_size": 50, "shape_vocab_size": 50},
    "luke": {"entity_vocab_size": 50, "entity_emb_size": 16},
    "xlnet": {"d_head": 8, "d_inner": 64},
    "xmod": {"default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "led": {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": [4, 4]},
    "vit_mae": {"mask_ratio": 0.0},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": None},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4},
    },
    "minimax": {"block_size": 4},
    "fsmt": {"src_vocab_size": _VOCABULARY, "tgt_vocab_size": _VOCABULARY, "langs": ["en", "de"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
}
_AUTO = {"encoder": "AutoModel", "decoder": "AutoModelForCausalLM", "seq2seq": "AutoModelForSeq2SeqLM"}


def _tiny_model(kind: str, name: str) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[name]
    known = config_class().to_dict()

    def kind_of(value: Any) -> type:
        return list if isinstance(value, tuple) else type(value)

    sizes = {
        key: value
        for keys, value in _TINY.items()
        for key in keys.split()
        if key in known and kind_of(known[key]) in (kind_of(value), type(None))
    }
    config = config_class(**(sizes | _SPECIAL.get(name, {})))
    return getattr(transformers, _AUTO.get(kind, "AutoModel")).from_config(config).eval()


def _ids(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, _VOCABULARY, (rows, LENGTH), generator=generator)


def _mask(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Padding on the right in every second batch, as a tokenizer gives it."""
    lengths = torch.randint(4, LENGTH + 1, (rows,), generator=generator)
    if int(torch.randint(2, (1,), generator=generator)):
        lengths[:] = LENGTH
    return (torch.arange(LENGTH) < lengths[:, None]).long()


def _encoder_cases(name: str, model: Any) -> Iterator[Case]:
    yield Case(name, "plain", model, lambda n, g: {"input_ids": _ids(n, g)}, {"input_ids": 0})
    both = {"input_ids": 0, "attention_mask": 0}
    yield Case(name, "mask", model, lambda n, g: {"input_ids": _ids(n, g), "attention_mask": _mask(n, g)}, both)
    declared = both | {"token_type_ids": 0}
    if "token_type_ids" in model.forward.__code__.co_varnames:
        yield Case(name, "optional", model, lambda n, g: {"input_ids": _ids(n, g), "token_type_ids": None}, declared)


def _decoder_cases(name: str, model: Any) -> Iterator[Case]:
    ids, both = {"input_ids": 0}, {"input_ids": 0, "attention_mask": 0}
    yield Case(name, "default", model, lambda n, g: {"input_ids": _ids(n, g)}, ids)
    yield Case(name, "no cache", model, lambda n, g: {"input_ids": _ids(n, g), "use_cache": False}, ids)
    yield Case(
        name,
        "no cache, mask",
        model,
        lambda n, g: {"input_ids": _ids(n, g), "attention_mask": _mask(n, g), "use_cache": False},
        both,
    )


def _seq2seq_cases(name: str, model: Any) -> Iterator[Case]:
    def plain(n: int, g: torch.Generator) -> dict[str, Any]:
        return {"input_ids": _ids(n, g), "decoder_input_ids": _ids(n, g)[:, :5], "use_cache": False}

    ids = {"input_ids": 0, "decoder_input_ids": 0}
    yield Case(name, "no cache", model, plain, ids)
    yield Case(
        name,
        "no cache, mask",
        model,
        lambda n, g: plain(n, g) | {"attention_mask": _mask(n, g)},
        ids | {"attention_mask": 0},
    )
    yield Case(name, "default", model, lambda n, g: plain(n, g) | {"use_cache": None}, ids)


def _vision_cases(name: str, model: Any) -> Iterator[Case]:
    size = getattr(model.config, "image_size", 32) or 32
    size = size if isinstance(size, int) else size[0]
    size = max(size, 32)
    yield Case(
        name,
        "pixels",
        model,
        lambda n, g: {"pixel_values": torch.randn(n, 3, size, size, generator=g)},
        {"pixel_values": 0},
    )


def _audio_cases(name: str, model: Any) -> Iterator[Case]:
    values = {"input_values": 0}
    yield Case(name, "plain", model, lambda n, g: {"input_values": torch.randn(n, 800, generator=g)}, values)

    def masked(n: int, g: torch.Generator) -> dict[str, Any]:
        return {
            "input_values": torch.randn(n, 800, generator=g),
            "attention_mask": torch.ones(n, 800, dtype=torch.long),
        }

    yield Case(name, "mask", model, masked, values | {"attention_mask": 0})


_CASES = {
    "encoder": _encoder_cases,
    "decoder": _decoder_cases,
    "seq2seq": _seq2seq_cases,
    "vision": _vision_cases,
    "audio": _audio_cases,
}


def stub_torchvision() -> None:
    """Names of torchvision that timm imports and small models do not use."""
    if "torchvision" in sys.modules:
        return

    class _Stub(types.ModuleType):
        __path__ = ()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(
                name, (nn.Module,), {"BILINEAR": 0, "BICUBIC": 1, "NEAREST": 2, "LANCZOS": 3, "BOX": 4, "HAMMING": 5}
            )

    parts = ("transforms", "transforms.functional", "datasets", "ops", "ops.misc", "utils", "models")
    for name in ("", *parts, "models.feature_extraction"):
        full = f"torchvision.{name}".rstrip(".")
        sys.modules[full] = _Stub(full)
        parent, _, child = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[full])


def _timm_cases(name: str) -> Iterator[Case]:
    stub_torchvision()
    import timm

    small = {"img_size": 64} if name.startswith(("vit", "deit", "mixer", "gmlp", "resmlp", "xcit")) else {}
    model = timm.create_model(name, pretrained=False, num_classes=10, **small).eval()
    size = 64 if small or ("224" not in name and name not in ("levit_128s", "crossvit_tiny_240")) else 224
    size = (
        240 if name == "crossvit_tiny_240" else 224 if name in ("levit_128s", "coat_lite_tiny", "pit_ti_224") else size
    )
    yield Case(name, "image", model, lambda n, g: {"x": torch.randn(n, 3, size, size, generator=g)}, {"x": 0})


def _recurrent(kind: type[nn.Module]) -> Callable[[], tuple[nn.Module, Any, dict[str, int]]]:
    def make() -> tuple[nn.Module, Any, dict[str, int]]:
        layer = kind(8, 16, 2, batch_first=True)
        return layer, lambda n, g: {"input": torch.randn(n, 6, 8, generator=g)}, {"input": 0}

    return make


def _encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


def _padding(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.arange(6) >= torch.randint(2, 7, (n, 1), generator=g)


def _sequence(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(n, 6, 16, generator=g)


_MODULES: dict[str, Callable[[], tuple[nn.Module, Any, dict[str, int]]]] = {
    "Linear": lambda: (nn.Linear(16, 16), lambda n, g: {"input": _sequence(n, g)}, {"input": 0}),
    "MLP": lambda: (
        nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(), nn.LayerNorm(64), nn.Linear(64, 4)),
        lambda n, g: {"input": _sequence(n, g)},
        {"input": 0},
    ),
    "Conv2d": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
        ),
        lambda n, g: {"input": torch.randn(n, 3, 8, 8, generator=g)},
        {"input": 0},
    ),
    "Embedding": lambda: (nn.Embedding(96, 8), lambda n, g: {"input": _ids(n, g)}, {"input": 0}),
    "EmbeddingBag": lambda: (nn.EmbeddingBag(96, 8), lambda n, g: {"input": _ids(n, g)}, {"input": 0}),
    "LSTM": _recurrent(nn.LSTM),
    "GRU": _recurrent(nn.GRU),
    "RNN": _recurrent(nn.RNN),
    "LSTMCell": lambda: (nn.LSTMCell(8, 16), lambda n, g: {"input": torch.randn(n, 8, generator=g)}, {"input": 0}),
    "MultiheadAttention": lambda: (
        nn.MultiheadAttention(16, 2, batch_first=True),
        lambda n, g: {"query": (x := _sequence(n, g)), "key": x, "value": x, "key_padding_mask": _padding(n, g)},
        {"query": 0, "key": 0, "value": 0, "key_padding_mask": 0},
    ),
    "TransformerEncoderLayer": lambda: (_encoder_layer(), lambda n, g: {"src": _sequence(n, g)}, {"src": 0}),
    "TransformerEncoder": lambda: (
        nn.TransformerEncoder(_encoder_layer(), 2),
        lambda n, g: {"src": _sequence(n, g)},
        {"src": 0},
    ),
    "TransformerEncoder, mask": lambda: (
        nn.TransformerEncoder(_encoder_layer(), 2, enable_nested_tensor=False),
        lambda n, g: {"src": _sequence(n, g), "src_key_padding_mask": _padding(n, g)},
        {"src": 0, "src_key_padding_mask": 0},
    ),
    "TransformerDecoder": lambda: (
        nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 2),
        lambda n, g: {"tgt": _sequence(n, g), "memory": _sequence(n, g)},
        {"tgt": 0, "memory": 0},
    ),
    "Transformer": lambda: (
        nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
        lambda n, g: {"src": _sequence(n, g), "tgt": _sequence(n, g)},
        {"src": 0, "tgt": 0},
    ),
    "GroupNorm": lambda: (
        nn.GroupNorm(4, 16),
        lambda n, g: {"input": torch.randn(n, 16, 5, generator=g)},
        {"input": 0},
    ),
    "ScriptedMLP": lambda: (
        torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU())),
        lambda n, g: {"input": _sequence(n, g)},
        {"input": 0},
    ),
}


def _module_cases(name: str) -> Iterator[Case]:
    model, arguments, dynamic = _MODULES[name]()
    yield Case(name, "call", model.eval(), arguments, dynamic)
