"""Refusals say what the user can do."""

import torch
from torch import nn

from graphdispatch import graphed


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


def test_a_module_behind_a_function_is_named() -> None:
    """Of a function that calls a model, the model's class stands for the model."""

    class Package(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), _Reading()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Package().eval()

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(model(x))

    served = graphed(step, dynamic={"x": 0}, sizes=[4])
    with torch.no_grad():
        for _ in range(3):
            served(torch.randn(4, 4))
        assert "eager_break(Package.get_submodule('blocks.1')) with" in served.explain(torch.randn(4, 4))
        served = graphed(model, dynamic={"x": 0}, sizes=[4], mode="PIECEWISE")
        for _ in range(3):
            served(torch.randn(4, 4))
        text = served.explain(torch.randn(4, 4))
    assert "eager_break(model.get_submodule('blocks.1'))" in text
    assert "with mode" not in text


class _Anchors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell_anchors: list[torch.Tensor] | None = None
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cell_anchors = [x * 1]
        return x


class _Rebinding(_Anchors):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.5 + x[0]
        return x


class _Method:
    def __init__(self) -> None:
        self.last: torch.Tensor | None = None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 1
        return x


def test_what_is_rebound_is_named_as_it_is_spelled() -> None:
    """Modules within modules are attributes, or entries of a list; a method's object is its class."""
    nested = nn.Sequential(nn.Identity(), nn.Sequential(_Anchors())).eval()
    step = _Method().run
    for fn, name, what in (
        (_Anchors().eval(), "x", "_Anchors.cell_anchors was rebound"),
        (nested, "input", "Sequential[1][0].cell_anchors was rebound"),
        (_Rebinding().eval(), "x", "_Rebinding.mean was rebound"),
        (step, "x", "_Method.last was rebound"),
        (lambda x: nested(x), "x", "[1][0].cell_anchors was rebound"),
    ):
        served = graphed(fn, dynamic={name: 0}, sizes=[4])
        with torch.no_grad():
            for _ in range(3):
                served(torch.randn(4, 4))
            assert what in served.explain(torch.randn(4, 4))


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
