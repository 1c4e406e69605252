"""Refusals say what the user can do."""

import torch
from torch import nn

from graphdispatch.api.graphed import graphed


class _Reading(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() < 1e9 else x


def _explain(model: nn.Module, **arguments: torch.Tensor) -> str:
    served = graphed(model, dynamic=dict.fromkeys(arguments, 0), sizes=[4])
    with torch.no_grad():
        for _ in range(3):
            served(**arguments)
        return str(served.explain(**arguments))


def test_the_nearest_module_to_break_at_is_named() -> None:
    """A read deep in a model names the smallest module around it, under its name in the served model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), _Reading())).eval()
    assert "eager_break(model.get_submodule('1.1')) with mode='PIECEWISE'" in _explain(model, input=torch.randn(4, 4))


def test_a_read_in_the_served_module_names_none() -> None:
    """There is no module to break at around a read of the served module itself."""
    assert "eager_break(" not in _explain(_Reading().eval(), x=torch.randn(4, 4))


def test_arguments_that_are_one_tensor_are_named() -> None:
    """A callable that asks whether two arguments are one tensor gets two copies in a graph; the refusal names them."""

    class Attention(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return query * 2 if query is key else key * 3

    x = torch.randn(4, 4)
    assert "query, key are one tensor" in _explain(Attention().eval(), query=x, key=x)


def test_a_normalisation_over_the_batch_is_probed_with_more_rows() -> None:
    """A callable that raises for one row is captured for two: the rows of its outputs are learnt with three."""

    def model(x: torch.Tensor) -> torch.Tensor:
        if len(x) < 2:
            raise ValueError("too few")
        return x * 2

    served = graphed(model, dynamic={"x": 0}, sizes=[2])
    for _ in range(5):
        x = torch.randn(2, 3)
        assert torch.equal(served(x), x * 2)
    assert served.stats.hits == 2
