"""Modes of the calling thread: gradients, autocast, inference mode, the random generator."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from graphdispatch import CUDAGraphOptions, Reason

from ..helpers import assert_same
from .front_end import Open

INPUT = {"dynamic": {"input": 0}}


def test_dropout(settled: Open) -> None:
    """Each replay draws anew, and unpadded it draws the very numbers that eager would."""
    model = nn.Dropout(0.5).train()
    options = CUDAGraphOptions(rows="independent")  # padding rows draw numbers, too
    step = settled(model, options=options, **INPUT)
    x, found = torch.ones(4, 3), []
    for fn in (step, model):
        torch.manual_seed(1)
        found.append(([fn(x) for _ in range(3)], torch.get_rng_state()))
    assert_same(*found)
    assert not torch.equal(*found[0][0][:2])


def test_autocast_flip(settled: Open) -> None:
    """Autocast chooses other operators, so it is part of what a graph is for, and so is its type."""
    model = nn.Linear(3, 3).eval()
    step = settled(model, **INPUT)
    x = torch.randn(4, 3)
    for _ in range(2):
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert step(x).dtype is dtype
    assert step(x).dtype is torch.float32
    step.check(Reason.EXACT)


def test_autocast_weight_written(tried: Open) -> None:
    """The graph casts weights in each replay; no copy is taken from an autocast region, and none is left to it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).eval()
    x = torch.randn(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # from here on the region has copies of the weights
        step = tried(model, **INPUT)
        step.check_calls(x)
    assert step.hits > 0
    for factor in (3, 0.5):
        model[0].weight.mul_(factor)
        with torch.autocast("cpu", torch.bfloat16):
            step.check_calls(x)
            step.check(Reason.EXACT)


class Doubled(TorchFunctionMode):
    """Doubles each sine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.sin else result


def test_mode_around(settled: Open) -> None:
    """A mode sees each operator of a call within it, and a replay has none to show; afterwards graphs serve again."""
    step = settled(lambda x: x.sin())
    for _ in range(3):
        with Doubled():
            step.check_calls(4)
            step.check(Reason.MODE_ACTIVE)
        step.check_calls(4)
        step.check(Reason.EXACT)


def test_parametrization_cached(tried: Open) -> None:
    """While computed weights are cached nothing is captured, since a graph would keep them; it is served after that."""
    model = nn.Linear(3, 3).eval()
    parametrize.register_parametrization(model, "weight", nn.ReLU())
    with parametrize.cached():
        step = tried(model, **INPUT)
        step.check_calls(4)
        step.check(Reason.CAPTURE_UNSAFE)
    model.parametrizations.weight.original.mul_(3)
    step.renew(torch.randn(4, 3))
    step.check_calls(*[4] * 20)
    step.check(Reason.EXACT)


def test_inference_mode(settled: Open) -> None:
    """A step that was captured under ``no_grad`` serves inference mode with a graph of its own, and the reverse."""
    step = settled(lambda x: x * 2)
    with torch.inference_mode():
        step.check_calls(4, 4, 4)
        step.check(Reason.EXACT, everywhere=False)
        inside = torch.randn(4, 3)
    step.check_calls(inside)


def test_gradient_needed(settled: Open) -> None:
    """With gradients on, an input that requires one is differentiated by eager."""
    step = settled(lambda x: x * 2)
    x = torch.randn(4, 3, requires_grad=True)
    with torch.enable_grad():
        step(x).sum().backward()
    assert x.grad is not None
    step.check(Reason.NEEDS_GRADIENTS)


def test_training_with_gradients(settled: Open) -> None:
    """So is a module in training mode whose parameters require gradients."""
    model = nn.Linear(3, 3).eval()
    step = settled(model, **INPUT)
    model.train()
    with torch.enable_grad():
        assert step(torch.randn(4, 3)).requires_grad
    step.check(Reason.NEEDS_GRADIENTS)


def test_gradients_on_by_default(settled: Open) -> None:
    """A module in eval mode is served with gradients on, too; the outputs then require none, unlike eager's."""
    model = nn.Linear(3, 3).eval()
    step = settled(model, **INPUT)
    with torch.enable_grad():
        x = torch.randn(4, 3)
        out = step(x)
    assert not out.requires_grad
    assert torch.equal(out, model(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own dual level uses it
def test_forward_mode_gradients(settled: Open) -> None:
    """A dual tensor carries its tangent without requiring a gradient; a graph would drop it."""
    model = nn.Linear(3, 3).eval().requires_grad_(False)
    step = settled(model, **INPUT)
    x, tangent = torch.randn(4, 3), torch.randn(4, 3)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), forward_ad.dual_level():
            answer = forward_ad.unpack_dual(step(forward_ad.make_dual(x, tangent)))
            assert torch.equal(answer.primal, model(x))
            assert torch.allclose(answer.tangent, tangent @ model.weight.T)
        step.check(Reason.NEEDS_GRADIENTS)
    step.check_calls(x)
    step.check(Reason.EXACT)
