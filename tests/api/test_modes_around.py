"""Modes, transforms and traces of torch around a call: no graph serves it, since a replay would pass them by."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphdispatch import Reason, graphed

from ..helpers import AT_ONCE


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Doubled(TorchFunctionMode):
    """Doubles each sine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.sin else result


class Tripled(TorchDispatchMode):
    """Triples each sine."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is torch.ops.aten.sin.default else result


def _served() -> Any:
    step = graphed(lambda x: x.sin(), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for _ in range(3):
        step(torch.randn(4, 3))
    assert step.stats.hits == 1
    return step


@pytest.mark.parametrize(("mode", "factor"), [(Doubled, 2), (Tripled, 3)])
def test_a_mode_sees_the_operators(mode: Callable[[], AbstractContextManager[Any]], factor: int) -> None:
    """A call within it gives eager's answer, and captures nothing; after it graphs serve again."""
    step, fresh = _served(), graphed(lambda x: x.sin(), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    x = torch.randn(4, 3)
    with mode():
        for _ in range(3):
            assert torch.equal(step(x), x.sin())
            assert step.last_decision.reason is Reason.MODE_ACTIVE
            assert torch.equal(fresh(x), x.sin())
        within = step(x)
    assert torch.allclose(within, factor * x.sin())
    assert fresh.stats.hits == 0
    for each in (step, fresh, fresh, fresh):
        assert torch.equal(each(x), x.sin())
    assert step.stats.hits == 2


def test_another_default_device_is_another_call() -> None:
    """What the callable makes lies on that device; a graph of the same device serves."""
    step = graphed(lambda x: (x + 1, torch.ones(2)), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for _ in range(3):
        step(torch.randn(4, 3))
    assert step.stats.hits == 1
    with torch.device("meta"):
        x = torch.randn(4, 3, device="cpu")
        assert step(x)[1].device.type == "meta"
    other = graphed(lambda x: (x + 1, torch.ones(2)), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    with torch.device("cpu"):
        for _ in range(4):
            other(torch.randn(4, 3))
        assert other.stats.hits == 2
    with torch.device("meta"):
        assert other(x)[1].device.type == "meta"
    assert step(x)[1].device.type == "cpu"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_holds_the_operators() -> None:
    """``torch.jit.trace`` around a served call bakes no answer in."""
    step = _served()
    traced = torch.jit.trace(lambda x: step(x) + x, (torch.randn(4, 3),), check_trace=False)
    x = torch.randn(4, 3)
    assert torch.equal(traced(x), x.sin() + x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_capture_is_made_after_a_trace() -> None:
    """One that would begin within a trace waits."""
    step = graphed(lambda x: x.sin(), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    traced = torch.jit.trace(lambda x: step(x) * 2, (torch.randn(4, 3),), check_trace=False)
    x = torch.randn(4, 3)
    assert torch.equal(traced(x), x.sin() * 2)
    assert step.stats.captures == 0


def test_transforms_over_a_served_callable() -> None:
    """``torch.vmap`` over its arguments and over the weights behind it give eager's answers."""
    step = _served()
    x = torch.randn(5, 4, 3)
    assert torch.equal(torch.vmap(step)(x), x.sin())
    layer = torch.nn.Linear(3, 3)
    layer.step = graphed(layer.forward, dynamic={"input": 0}, sizes=(4,), options=AT_ONCE)
    for _ in range(3):
        layer.step(torch.randn(4, 3))
    weights = {name: torch.stack([value.detach(), value.detach() * 2]) for name, value in layer.named_parameters()}

    def run(given: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(Calls(layer), {f"layer.{name}": value for name, value in given.items()}, (x,))

    batch = torch.randn(4, 3)
    both = torch.vmap(run, in_dims=(0, None))(weights, batch)
    assert torch.allclose(both[0], torch.nn.functional.linear(batch, layer.weight, layer.bias))
    assert torch.allclose(both[1], 2 * both[0])


class Calls(torch.nn.Module):
    """Calls the served method of its layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """By the step."""
        answer: torch.Tensor = self.layer.step(x)
        return answer
