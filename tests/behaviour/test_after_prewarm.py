"""After ``prewarm()`` every call is a hit: of an MLP, of an encoder with two dynamic dimensions, of a recommender, and
of a module that another object calls."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import graphdispatch as gd

CALLS = 300


@dataclass
class Program:
    """A callable that is served, what calls it, and its random batches."""

    serve: Any
    call: Any
    eager: Any
    example: tuple[torch.Tensor, ...]
    batches: Iterator[tuple[torch.Tensor, ...]]


def rows(most: int) -> Iterator[int]:
    """Random numbers of rows, each as likely as the others."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield int(torch.randint(1, most + 1, (), generator=generator))


def mlp() -> Program:
    """The README's."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.GELU()).eval()
    serve = gd.graphed(model, dynamic={"input": 0}, max_size=16)
    return Program(serve, serve, model, (torch.randn(4, 64),), ((torch.randn(n, 64),) for n in rows(16)))


def encoder() -> Program:
    """Requests of different lengths, whose padding a mask hides; a mean over the real tokens."""
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    model.requires_grad_(False)

    def embed(x: torch.Tensor, mask: torch.Tensor) -> Any:
        hidden = model(x, mask=None, src_key_padding_mask=mask == 0)
        weights = mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)

    def batch(n: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones(n, length, dtype=torch.int64)
        mask[:, 1:] = torch.randint(0, 2, (n, length - 1)).cumprod(1)
        return torch.randn(n, length, 16), mask

    length = gd.Dim("length", sizes=[8, 16], pad={"mask": 0})
    dynamic = {"x": {0: "batch", 1: length}, "mask": {0: "batch", 1: "length"}}
    serve = gd.graphed(embed, dynamic=dynamic, pad={"mask": 1}, sizes=(1, 2, 4, 8))
    return Program(serve, serve, embed, batch(2, 16), (batch(n, m) for n, m in zip(rows(8), rows(16), strict=False)))


class Recommender(torch.nn.Module):
    """Tables of users and items, their product and some features through a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = torch.nn.Embedding(50, 8), torch.nn.EmbeddingBag(40, 8, mode="sum")
        self.tower = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, user: torch.Tensor, items: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """A score for each row."""
        both = torch.cat([self.users(user), self.items(items), features], dim=-1)
        return torch.sigmoid(self.tower(both)).squeeze(-1)


def recommender() -> Program:
    """It takes identifiers and numbers."""
    model = Recommender().eval()

    def batch(n: int) -> tuple[torch.Tensor, ...]:
        return torch.randint(50, (n,)), torch.randint(40, (n, 5)), torch.randn(n, 4)

    serve = gd.graphed(model, dynamic={"user": 0, "items": 0, "features": 0}, max_size=32)
    return Program(serve, serve, model, batch(3), (batch(n) for n in rows(32)))


def attached() -> Program:
    """The network of a sampler that makes four steps with it."""
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 8)).eval()

    def sample(x: torch.Tensor) -> torch.Tensor:
        for step in range(4):
            x = x - network(x) / (step + 1)
        return x

    serve = gd.attach(network, dynamic={"input": 0}, max_size=16)
    eager = torch.nn.Sequential(*network).eval()  # the same modules, which nobody serves

    def expected(x: torch.Tensor) -> torch.Tensor:
        for step in range(4):
            x = x - eager(x) / (step + 1)
        return x

    return Program(serve, sample, expected, (torch.randn(4, 8),), ((torch.randn(n, 8),) for n in rows(16)))


@pytest.mark.parametrize("make", [mlp, encoder, recommender, attached])
def test_every_call_after_a_prewarm_is_a_hit(make: Any) -> None:
    """None is compared or captured, of any number of rows and any length; each answer is eager's."""
    torch.manual_seed(0)
    program = make()
    with torch.no_grad():
        program.serve.prewarm(*program.example)
        stats = program.serve.stats
        hits, calls, captures = stats.hits, stats.calls, stats.captures
        for _, batch in zip(range(CALLS), program.batches, strict=False):
            torch.testing.assert_close(program.call(*batch), program.eager(*batch))
    made = CALLS * (4 if make is attached else 1)
    assert (stats.calls - calls, stats.hits - hits, stats.captures - captures) == (made, made, 0), stats.reasons
