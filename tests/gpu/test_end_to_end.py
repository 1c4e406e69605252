"""The two front ends on a GPU: ``graphed`` and ``CUDAGraphWrapper`` give eager's answers from graphs."""

import pytest
import torch

import graphdispatch as gd
from graphdispatch.backends import Backend

from ..helpers import AT_ONCE

pytestmark = pytest.mark.gpu


class Block(torch.nn.Module):
    """A small model whose rows are independent."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.up = torch.nn.Linear(32, 128)
        self.down = torch.nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + change


@pytest.fixture
def model(cuda: Backend) -> Block:
    """The model on the GPU, with seeded weights."""
    torch.manual_seed(0)
    return Block().to(cuda.device).eval()


def test_weights_are_cast_by_the_graph(cuda: Backend, model: Block) -> None:
    """Under autocast: no copy of a weight is taken from the region, none is left to it, and weights may be written."""
    decode = gd.graphed(model, dynamic={"x": 0}, sizes=(8,), options=AT_ONCE)
    batches = [torch.randn(8, 32, device=cuda.device) for _ in range(4)]
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(batches[0])  # from here on the region has copies of the weights
            for batch in batches:
                torch.testing.assert_close(decode(x=batch), model(batch))
        next(model.parameters()).mul_(2)
    assert decode.stats.hits >= 5, decode.stats.reasons  # one batch more is compared where it runs other code
