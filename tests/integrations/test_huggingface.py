"""A real Hugging Face decoder: a decode step with a ``StaticCache``, and whole batches through ``graphed``."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, Reason, graphed
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper

transformers = pytest.importorskip("transformers")
TOKENS = 64


@pytest.fixture(scope="module")
def config() -> Any:
    """A Llama with four layers and grouped-query attention."""
    return transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        max_position_embeddings=2 * TOKENS,
    )


@pytest.fixture(scope="module")
def model(config: Any) -> Any:
    """The model with random weights."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def _decoder(model: Any, config: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    cache = transformers.StaticCache(config=config, max_cache_len=TOKENS)

    def step(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        out = model(input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True)
        logits: torch.Tensor = out.logits
        return logits

    # The first token of a cache takes another path in transformers (it allocates); both sides take it eagerly.
    step(torch.tensor([[1]]), torch.tensor([[0]]))
    cache.reset()
    return step


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_decode_is_bit_identical(model: Any, config: Any, mode: Callable[[], AbstractContextManager[None]]) -> None:
    """64 greedy tokens through ``CUDAGraphWrapper`` have the logits of eager, bit for bit, each with its own cache."""
    descriptor = BatchDescriptor(1, 1, True)
    with mode():
        eager, wrapped = _decoder(model, config), CUDAGraphWrapper(_decoder(model, config))
        token = torch.tensor([[1]])
        for position in range(TOKENS):
            where = torch.tensor([[position]])
            expected = eager(token, where)
            got = wrapped(token, where, batch_descriptor=descriptor, cudagraph_runtime_mode=CUDAGraphMode.FULL)
            assert torch.equal(got, expected), f"token {position}"
            token = expected[:, -1].argmax(-1, keepdim=True)
    stats = wrapped.get_stats()
    assert (stats.captures, stats.hits) == (1, TOKENS - 2)
    assert set(stats.reasons) == {Reason.CAPTURED_NOW, Reason.VERIFIED_NOW}


def test_batches_of_prompts(model: Any) -> None:
    """Batches of one to eight prompts of one length are served by three graphs, with eager's logits."""
    # Without a mask of its own transformers looks for packed sequences, which reads values back to the host.
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
        return logits

    step = graphed(forward, dynamic={"input_ids": 0}, sizes=(2, 4, 8))
    step.prewarm(torch.randint(0, 100, (3, 12)))
    for rows in (1, 2, 3, 5, 8, 7, 4, 6):
        ids = torch.randint(0, 100, (rows, 12))
        torch.testing.assert_close(step(ids), forward(ids))
    assert (step.stats.captures, step.stats.hits) == (3, 8)
