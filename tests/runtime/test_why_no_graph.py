"""A call that the graphs of a prewarm do not serve says in what it differs, and what to do about that."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import Graphed, Reason, graphed
from graphdispatch.errors import FallbackError

X = torch.randn(3, 8)


class Model(nn.Module):
    """Its arguments are optional, and it holds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor, mask: Tensor | None = None, mode: str = "a") -> Tensor:
        """The answer depends on all of them."""
        y = self.layer((x - self.mean).to(self.layer.weight.dtype))
        y = y if mask is None else y * mask
        return y if mode == "a" else -y


def prewarmed(*example: Any, **settings: Any) -> Graphed[..., Any]:
    """A served model with graphs for calls like the example."""
    step = graphed(Model().eval(), dynamic={"x": 0}, sizes=(4,), **settings)
    step.prewarm(*example)
    return step


OTHERS: dict[str, tuple[tuple[Any, ...], Callable[[Any], Any], str, Callable[[], AbstractContextManager[Any]]]] = {
    "dtype": ((X,), lambda f: f(X.double()), "input 'x' must be a tensor of dtype torch.float32", nullcontext),
    "shape": ((X, X[:1]), lambda f: f(X, X[0]), "input 'mask' must be a tensor of shape (1, 8), got (8,)", nullcontext),
    "layout": ((X,), lambda f: f(X.t().contiguous().t()), "input 'x' must be contiguous in memory", nullcontext),
    "given": ((X,), lambda f: f(X, mode="b"), "argument 'mode' must be left out", nullcontext),
    "left out": ((X, X[:1]), lambda f: f(X), "argument 'mask' must be given", nullcontext),
    "by name": ((X,), lambda f: f(x=X), "given by name: none", nullcontext),
    "inference mode": ((X,), lambda f: f(X), "torch.inference_mode must be off", torch.inference_mode),
    "autocast": (
        (X,),
        lambda f: f(X),
        "autocast must be off, got torch.bfloat16",
        lambda: torch.autocast("cpu", torch.bfloat16),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_from_the_calls_with_graphs_is_named(name: str) -> None:
    """By ``explain``, the decision and ``health``; and prewarm() with such a call is right."""
    example, call, said, around = OTHERS[name]
    step = prewarmed(*example)
    with around():
        assert f"there are graphs for other calls ({said}" in call(step.explain)
        call(step)
        assert step.last_decision is not None
        assert step.last_decision.reason is Reason.FIRST_SIGHTING
        assert said in step.last_decision.detail
        assert said in str(step.health())
        call(step.prewarm)
        torch.testing.assert_close(call(step), call(step.unwrap()))
    assert step.last_decision.reason is Reason.PADDED


def test_a_new_callable_has_no_other_calls() -> None:
    """Nothing is said of graphs where there are none."""
    step = graphed(Model().eval(), dynamic={"x": 0}, sizes=(4,))
    assert step.explain(X) == f"eager, 3 rows: {Reason.FIRST_SIGHTING.text}"


def test_graphs_that_a_new_buffer_ended_are_named() -> None:
    """By ``explain`` and ``health``, with the buffer; prewarm() captures again; writing in place keeps them."""
    step = prewarmed(X)
    model = step.unwrap()
    model.mean.copy_(model.mean + 1)
    step(X)
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.PADDED
    model.mean = model.mean + 1
    change = "mean: another tensor in its place; copy_() into the old one keeps its graphs"
    step(X)
    assert f"its graphs are gone, since the callable changed ({change})" in step.last_decision.detail
    assert "or by prewarm()" in step.last_decision.detail
    assert f"1 of 1 graphs are gone (changed: {change})" in str(step.health())
    step.prewarm(X)
    torch.testing.assert_close(step(X), model(X))
    assert step.last_decision.reason is Reason.PADDED


def test_graphs_that_another_dtype_ended_are_gone_for_other_calls_too() -> None:
    """The call has a signature of its own, which never had a graph."""
    step = prewarmed(X)
    step.unwrap().double()
    assert "its graphs are gone, since the callable changed (" in step.explain(X.double())


def test_another_module_in_the_place_of_one_is_named() -> None:
    """Both would look the same in words."""
    step = prewarmed(X)
    step.unwrap().layer = nn.Linear(8, 8).eval()
    assert "layer: another object in its place (a torch.nn.modules.linear.Linear)" in step.explain(X)


def loose(x: Tensor) -> Tensor:
    """What it reads belongs to no module."""
    return x * PROMPT


PROMPT = torch.ones(8, requires_grad=True)
TRAINS: dict[str, tuple[Callable[..., Any], Tensor, str]] = {
    "argument": (Model().eval(), X.clone().requires_grad_(), "argument 'x' requires one; detach() it"),
    "module": (Model(), X, "Linear 'layer' is in training mode; call eval()"),
    "beside": (loose, X, "a tensor that it reads beside its modules requires one; use torch.no_grad()"),
}


@pytest.mark.parametrize("name", TRAINS)
def test_what_needs_gradients_is_named(name: str) -> None:
    """By ``explain``, the decision and the error of a strict callable; the remedies are right."""
    fn, x, said = TRAINS[name]
    step, strict = (graphed(fn, dynamic={"x": 0}, sizes=(4,), strict=is_strict) for is_strict in (False, True))
    with torch.enable_grad():
        assert step.explain(x).startswith(f"eager: the call needs gradients: {said}")
        step(x)
        assert step.last_decision is not None
        assert said in step.last_decision.detail
        with pytest.raises(FallbackError, match="the call needs gradients"):
            strict(x)
    step.prewarm(x.detach())
    step(x.detach())
    assert step.last_decision.reason is Reason.PADDED
    if isinstance(fn, nn.Module):
        fn.eval()
        step.prewarm(x.detach())
        with torch.enable_grad():
            step(x.detach())
        assert step.last_decision.reason is Reason.PADDED
