"""A decode step of a real Hugging Face decoder with a ``StaticCache``."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, Reason
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper

transformers = pytest.importorskip("transformers")

from .families import CACHE, make_model  # noqa: E402

TOKENS = 24


def _decoder(model: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    cache = transformers.StaticCache(config=model.config, max_cache_len=TOKENS)

    def step(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        out = model(input_ids=input_ids, position_ids=position_ids, use_cache=True, **{CACHE: cache})
        logits: torch.Tensor = out.logits
        return logits

    # The first token of a cache takes another path in transformers (it allocates); both sides take it eagerly.
    step(torch.tensor([[1]]), torch.tensor([[0]]))
    cache.reset()
    return step


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_decode_is_bit_identical(mode: Callable[[], AbstractContextManager[None]]) -> None:
    """Greedy tokens through ``CUDAGraphWrapper`` have the logits of eager, bit for bit, each with its own cache."""
    descriptor, model = BatchDescriptor(1, 1, True), make_model("llama")
    with mode():
        eager, wrapped = _decoder(model), CUDAGraphWrapper(_decoder(model))
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
