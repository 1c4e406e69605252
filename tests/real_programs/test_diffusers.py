"""A pipeline of diffusers whose network is attached: the same images, and the pipeline works as before."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import graphdispatch as gd

diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def pipe() -> Any:
    """A tiny Stable Diffusion without a text encoder."""
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    parts = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    made = diffusers.StableDiffusionPipeline(
        unet=unet,
        vae=diffusers.AutoencoderKL(block_out_channels=[16], norm_num_groups=8),
        scheduler=diffusers.DDIMScheduler(),
        requires_safety_checker=False,
        **parts,
    )
    made.set_progress_bar_config(disable=True)
    return made


def images(pipe: Any, count: int, seed: int) -> Any:
    """As many images, of one seed."""
    prompts = torch.randn(count, 4, 32, generator=torch.Generator().manual_seed(seed)).to(pipe.unet.dtype)
    made = pipe(
        prompt_embeds=prompts,
        negative_prompt_embeds=torch.zeros_like(prompts),
        num_inference_steps=8,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )
    return torch.tensor(made.images)


def test_an_attached_network_gives_the_same_images(pipe: Any) -> None:
    """For requests of one and of two images, from the second step of each on by graphs."""
    requests = [(1, 1), (1, 2), (2, 3), (1, 4), (2, 5)]
    expected = [images(pipe, *request) for request in requests]
    handle = gd.attach(pipe.unet, dynamic={"sample": 0, "encoder_hidden_states": 0}, sizes=(2, 4))
    for request, image in zip(requests, expected, strict=True):
        torch.testing.assert_close(images(pipe, *request), image)
    assert handle.stats.hits == 40 - 6  # two sizes, of which each takes three calls
    assert handle.health().is_well


def test_the_pipeline_works_as_before(pipe: Any, tmp_path: Path) -> None:
    """It saves the network, and moves it to another type."""
    handle = gd.attach(pipe.unet, dynamic={"sample": 0, "encoder_hidden_states": 0}, sizes=(2,))
    images(pipe, 1, 1)
    pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["unet"] == ["diffusers", "UNet2DConditionModel"]
    pipe.to(torch.float64)
    assert pipe.unet.dtype is torch.float64
    plain = pipe.__class__(**{name: getattr(pipe, name) for name in pipe.components}, requires_safety_checker=False)
    image = images(pipe, 1, 1)
    handle.detach()
    torch.testing.assert_close(images(plain, 1, 1), image)
