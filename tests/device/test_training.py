"""Training steps on the device, whose backward passes run on a thread of their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from queued_device import DEVICE, delays
from torch import Tensor, nn
from torch.optim import SGD, Adam

import graphdispatch as gd
from graphdispatch import CUDAGraphOptions, Reason

from ..helpers import assert_same

Step = Callable[[Tensor, Tensor], Tensor]


def learner(optimizer: Callable[..., torch.optim.Optimizer], settings: dict[str, Any]) -> tuple[nn.Module, Step]:
    """A small network, and the step that trains it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE)
    trained = optimizer(model.parameters(), lr=0.05, foreach=False, **settings)

    def step(x: Tensor, y: Tensor) -> Tensor:
        trained.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        trained.step()
        return loss

    return model, step


def batch() -> tuple[Tensor, Tensor]:
    """A random batch on the device."""
    return torch.randn(16, 4).to(DEVICE), torch.randn(16, 3).to(DEVICE)


@pytest.mark.parametrize(("optimizer", "settings"), [(SGD, {"momentum": 0.9}), (Adam, {"capturable": True})])
def test_a_training_step_is_served_whole(optimizer: Any, settings: dict[str, Any]) -> None:
    """Parameters and gradients are those of eager after each step, whatever the delays of the device's queues."""
    with torch.enable_grad():
        (served, step), (plain, eager) = learner(optimizer, settings), learner(optimizer, settings)
        train = gd.graphed(step, dynamic={}, gradients="inside", options=CUDAGraphOptions(capture_share=None))
        delays(1, 100)
        for _ in range(20):
            given = batch()
            assert_same(train(*given).cpu(), eager(*given).detach().cpu())
            for ours, theirs in zip(served.parameters(), plain.parameters(), strict=True):
                assert_same((ours.detach().cpu(), ours.grad.cpu()), (theirs.detach().cpu(), theirs.grad.cpu()))
        assert train.last_decision.reason is Reason.EXACT


def test_an_optimizer_that_no_graph_holds_is_named() -> None:
    """With what makes one that a graph holds."""
    with torch.enable_grad():
        _, step = learner(Adam, {})
        train = gd.graphed(step, dynamic={}, gradients="inside", options=CUDAGraphOptions(capture_share=None))
        for _ in range(3):
            train(*batch())
        assert "Adam(capturable=True)" in train.explain(*batch())
