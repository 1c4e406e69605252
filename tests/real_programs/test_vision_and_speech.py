"""LLaVA, which compares counts on the host in one method, and Whisper's encoder under ``generate``."""

from typing import Any

import pytest
import torch

import graphdispatch as gd

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_llava_is_served_around_the_method_that_reads_back() -> None:
    """Its images become a Python list, one for each row; so each number of rows has a graph of its own. A padded prompt
    needs as many image tokens as a real one: it repeats the last."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SMALL, image_size=16, patch_size=8),
        text_config=transformers.LlamaConfig(**SMALL, vocab_size=100),
        image_token_index=99,
        image_seq_length=4,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval().requires_grad_(False)

    def logits(input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        return model(input_ids=input_ids, pixel_values=pixel_values, use_cache=False).logits  # type: ignore[no-any-return]

    gd.eager_break(model.model, "get_placeholder_mask")  # as the refusal says
    names = ("input_ids", "pixel_values")
    step = gd.graphed(
        logits,
        dynamic=dict.fromkeys(names, 0),
        pad=dict.fromkeys(names, "repeat_last"),
        sizes=(2, 4),
        mode="PIECEWISE",
        options=gd.CUDAGraphOptions(capture_share=None),
    )
    for rows in (2, 1, 4, 3, 1, 1, 2, 2, 3, 3, 2, 4, 4):
        ids = torch.cat([torch.full((rows, 4), 99), torch.randint(1, 90, (rows, 6))], dim=1)
        pixels = torch.randn(rows, 3, 16, 16)
        torch.testing.assert_close(step(ids, pixels), logits(ids, pixels))
    assert step.last_decision.mode is gd.CUDAGraphMode.PIECEWISE
    assert step.stats.hits == 3


def test_whisper_generates_the_same_with_its_encoder_attached() -> None:
    """One line; the decoder's loop is transformers' own."""
    layers = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in LAYERS.items()}
    config = transformers.WhisperConfig(
        d_model=32, vocab_size=100, num_mel_bins=8, max_source_positions=50, max_target_positions=40, **layers, **TOKENS
    )
    model: Any = transformers.WhisperForConditionalGeneration(config).eval()
    batches = [torch.randn(rows, 8, 100) for rows in (2, 1, 4, 3, 1, 2)]
    expected = [model.generate(batch, max_new_tokens=4) for batch in batches]
    options = gd.CUDAGraphOptions(capture_share=None)
    handle = gd.attach(model.model.encoder, dynamic={"input_features": 0}, sizes=(2, 4), options=options)
    for _ in range(3):
        for batch, tokens in zip(batches, expected, strict=True):
            assert torch.equal(model.generate(batch, max_new_tokens=4), tokens)
    assert handle.stats.hits > handle.stats.calls // 2, handle.health()


LAYERS = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
