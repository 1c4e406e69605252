"""Scripted and traced callables: their schemas tell the arguments, and graphs serve them."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphdispatch as gd

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Sum(nn.Module):
    """Two arguments, by place or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(this, x: torch.Tensor, y: torch.Tensor, times: int = 2) -> torch.Tensor:  # noqa: N805 (any name will do)
        """``x`` and ``y`` of (rows, 4)."""
        return this.layer(x) + y * times


def scaled(x: torch.Tensor, y: torch.Tensor, times: int = 2) -> torch.Tensor:
    """The same without weights."""
    return torch.tanh(x) + y * times


def loaded(model: Any) -> Any:
    """A scripted module from a file."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    return torch.jit.load(file)


EXAMPLE = torch.randn(2, 4), torch.randn(2, 4)
MADE: dict[str, Callable[[], Any]] = {
    "scripted function": lambda: torch.jit.script(scaled),
    "traced function": lambda: torch.jit.trace(scaled, EXAMPLE),
    "scripted module": lambda: torch.jit.script(Sum().eval()),
    "traced module": lambda: torch.jit.trace(Sum().eval(), EXAMPLE),
    "frozen module": lambda: torch.jit.freeze(torch.jit.script(Sum().eval())),
    "optimized module": lambda: torch.jit.optimize_for_inference(torch.jit.script(Sum().eval())),
    "loaded module": lambda: loaded(Sum().eval()),
}


@pytest.mark.parametrize("by_name", [False, True], ids=["by place", "by name"])
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_torchscript_is_served(make: Callable[[], Any], by_name: bool) -> None:
    """Also by names, and after its weights have moved."""
    fn = make()
    step = gd.graphed(fn, dynamic={"x": 0, "y": 0}, sizes=(4,))
    for dtype in (
        (torch.float32, torch.float64) if isinstance(fn, nn.Module) and list(fn.parameters()) else (torch.float32,)
    ):
        if dtype is torch.float64:
            fn.to(dtype)
        for rows in (3, 3, 3, 4, 3):
            x, y = torch.randn(2, rows, 4, dtype=dtype)
            torch.testing.assert_close(step(x, y=y) if by_name else step(x, y), fn(x, y))
        assert step.last_decision.reason is gd.Reason.PADDED, step.explain(x, y)


def test_a_number_is_an_argument_of_its_own() -> None:
    """As the schema names it; another value is another signature."""
    fn = torch.jit.script(scaled)
    step = gd.graphed(fn, dynamic={"x": 0, "y": 0}, sizes=(4,))
    for times in (2, 3):
        for _ in range(4):
            x, y = torch.randn(2, 4, 4)
            torch.testing.assert_close(step(x, y, times=times), fn(x, y, times))
        assert step.last_decision.reason is gd.Reason.EXACT
    with pytest.raises(gd.ConfigError, match="expected one of \\['x', 'y', 'times'\\]"):
        gd.graphed(fn, dynamic={"z": 0}, sizes=(4,))(x, y)
