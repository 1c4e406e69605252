"""``piecewise_backend``: an FX graph from torch.compile, split and served by piecewise graphs."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import graphdispatch as gd
from graphdispatch.capture.piecewise import PiecewiseGraph


class Attentive(nn.Module):
    """One attention between linear layers; also returns the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        q = torch.relu(self.first(x)).view(x.shape[0], 1, 2, 4)
        mixed = F.scaled_dot_product_attention(q, q, q).reshape(x.shape[0], 8)
        return self.last(mixed + x), x.shape[0]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Each test compiles anew."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [F.scaled_dot_product_attention, "scaled_dot_product_attention"])
def test_changing_batches_are_padded_and_equal_eager(name: object) -> None:
    """Batches of one dynamic dimension go to the next size, split at the attention, and give eager's answer."""
    model = Attentive().eval()
    backend = gd.piecewise_backend([name], max_size=16)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (3, 4, 3, 2, 7, 8, 5, 6, 7, 20, 3, 7):
            x = torch.randn(rows, 8)
            (y, count), (want, _) = compiled(x), model(x)
            assert torch.allclose(y, want, atol=1e-5)
            assert count == rows
    (served,) = backend.graphs
    assert served.stats.hits >= 2
    assert all(isinstance(entry.graph, PiecewiseGraph) and entry.graph.breaks for entry in served.entries)


def test_without_split_operators_it_is_one_graph() -> None:
    """A graph that is cut nowhere is captured whole."""
    model = Attentive().eval()
    backend = gd.piecewise_backend(max_size=8)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, 8)
            assert torch.equal(compiled(x)[0], model(x)[0])
    (entry,) = backend.graphs[0].entries
    assert isinstance(entry.graph, PiecewiseGraph)
    assert len(entry.graph.graphs) == 1


def test_training_gets_its_gradients() -> None:
    """A call with gradients on runs eagerly and can be differentiated."""
    model = Attentive()
    compiled = torch.compile(model, backend=gd.piecewise_backend(["scaled_dot_product_attention"]), dynamic=True)
    x = torch.randn(3, 8)
    compiled(x)[0].sum().backward()
    got = model.first.weight.grad
    model.zero_grad()
    model(x)[0].sum().backward()
    assert got is not None
    assert torch.allclose(got, model.first.weight.grad)  # type: ignore[arg-type]


def test_a_split_operator_must_be_named_or_called() -> None:
    """Anything else among the split operators is refused."""
    with pytest.raises(gd.ConfigError, match="split_ops must be functions, operators or names, got 3"):
        gd.piecewise_backend([3])
