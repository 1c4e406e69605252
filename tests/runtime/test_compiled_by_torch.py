"""Callables that torch has compiled: scripted and traced ones are served, packages of AOTInductor are not."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.export.pt2_archive._package import AOTICompiledModel

import graphdispatch as gd

from ..helpers import check_calls

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


EXAMPLE = torch.randn(2, 4), torch.randn(2, 4)
MADE: dict[str, Callable[[], Any]] = {
    "scripted function": lambda: torch.jit.script(scaled),
    "traced function": lambda: torch.jit.trace(scaled, EXAMPLE),
    "scripted module": lambda: torch.jit.script(Sum().eval()),
    "traced module": lambda: torch.jit.trace(Sum().eval(), EXAMPLE),
    "frozen module": lambda: torch.jit.freeze(torch.jit.script(Sum().eval())),
    "optimized module": lambda: torch.jit.optimize_for_inference(torch.jit.script(Sum().eval())),
}


@pytest.mark.parametrize("by_name", [False, True], ids=["by place", "by name"])
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_torchscript_is_served(make: Callable[[], Any], by_name: bool) -> None:
    """Also by names, and after its weights have moved; padded by the user's word, since nobody sees what a script
    reads of sizes."""
    fn = make()
    options = gd.CUDAGraphOptions(rows="independent")
    step = gd.graphed(fn, dynamic={"x": 0, "y": 0}, sizes=(4,), options=options)
    moves = isinstance(fn, nn.Module) and bool(list(fn.parameters()))
    for dtype in (torch.float32, torch.float64)[: 1 + moves]:
        if dtype is torch.float64:
            fn.to(dtype)
        for rows in (3, 3, 3, 4, 3):
            x, y = torch.randn(2, rows, 4, dtype=dtype)
            torch.testing.assert_close(step(x, y=y) if by_name else step(x, y), fn(x, y))
        assert step.last_decision.reason is gd.Reason.PADDED, step.explain(x, y)


def test_a_script_is_not_padded_by_itself() -> None:
    """Without the user's word exact sizes are served, and the reason says why."""
    fn = torch.jit.script(scaled)
    step = gd.graphed(fn, dynamic={"x": 0, "y": 0}, sizes=(4,))
    for rows in (4, 4, 4, 4, 3):
        x, y = torch.randn(2, rows, 4)
        torch.testing.assert_close(step(x, y), fn(x, y))
    assert step.last_decision.reason is gd.Reason.PADDING_UNPROVEN
    assert "a script of torch.jit" in step.explain(x, y)
    assert step.stats.hits == 1


def test_a_package_of_aotinductor_is_refused_in_words(capfd: pytest.CaptureFixture[str]) -> None:
    """Its kernels run past torch's dispatcher, so that no graph of the CPU holds them; nothing is tried."""
    spec = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),)).call_spec
    specs = [torch.utils._pytree.treespec_dumps(each) for each in (spec.in_spec, spec.out_spec)]
    weight = torch.randn(4, 4)
    loader = SimpleNamespace(get_call_spec=lambda: specs, boxed_run=lambda inputs: [inputs[0] @ weight])
    package = AOTICompiledModel(loader)
    step = gd.graphed(lambda x: package(x), dynamic={"x": 0}, sizes=(2,))
    check_calls(step, *torch.randn(4, 2, 4), fn=lambda x: x @ weight)
    assert step.last_decision.reason is gd.Reason.CAPTURE_UNSAFE
    assert "runs a package of AOTInductor" in step.last_decision.detail
    assert "rror" not in capfd.readouterr().err


def test_code_of_the_compiler_that_cannot_be_hashed_is_refused() -> None:
    """Around a graph break it may have a dict among its constants, which no set takes."""

    @torch.compiler.disable
    def apply(x: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return fn(x)

    @torch.compile(backend="eager", dynamic=True)
    def model(x: torch.Tensor) -> torch.Tensor:
        return apply(x + 1, lambda v: v * 2) + 1

    serve = gd.graphed(model, dynamic={"x": 0}, options=gd.CUDAGraphOptions(capture_share=None))
    check_calls(serve, *[torch.ones(4, 3)] * 4, fn=lambda x: x * 5)
    assert serve.last_decision.reason.name == "STATE_UNSEEN"
    assert "torch.compile made" in serve.last_decision.detail
