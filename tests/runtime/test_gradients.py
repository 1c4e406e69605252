"""A call that reaches something that trains has eager's gradients, wherever that lies."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import Reason, graphed

from ..helpers import AT_ONCE, serve_in_python


@pytest.fixture(autouse=True)
def _with_gradients() -> Iterator[None]:
    """Gradients are on."""
    with torch.enable_grad():
        yield


@dataclass
class Holder:
    """Holds modules where no pytree looks."""

    parts: list[Any]

    def __call__(self, x: Tensor) -> Any:
        return self.parts[0]["of"](x)


def scaled(x: Tensor, by: Any) -> Any:
    """A call of an argument."""
    return by(x)


def from_class(x: Tensor, kind: Any) -> Tensor:
    """What a class holds."""
    return x * kind.weight


def from_iterator(x: Tensor, weights: Iterator[Tensor]) -> Tensor:
    """What an iterator gives."""
    return x * next(weights)


def weight() -> Tensor:
    """A tensor that trains."""
    return torch.ones(2, requires_grad=True)


def closure() -> Callable[[Tensor], Tensor]:
    """A function over a tensor that trains."""
    held = weight()
    return lambda x: x * held


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "function": (scaled, closure),
    "partial": (scaled, lambda: partial(torch.mul, weight())),
    "holder": (scaled, lambda: Holder([{"of": nn.Linear(2, 2)}])),
    "nested holder": (scaled, lambda: Holder([{"of": Holder([{"of": nn.Sequential(nn.Linear(2, 2))}])}])),
    "namespace": (scaled, lambda: SimpleNamespace(of=nn.Linear(2, 2)).of),
    "class": (from_class, lambda: type("Holds", (), {"weight": weight()})),
    "iterator": (from_iterator, lambda: iter([weight()] * 9)),
}


@pytest.mark.parametrize("fn, argument", CASES.values(), ids=CASES)  # noqa: PT006
def test_arguments_that_hold_what_trains(fn: Callable[..., Any], argument: Callable[[], Any]) -> None:
    """Each call is differentiated."""
    step, given = graphed(fn, dynamic={"x": 0}, sizes=[4], options=AT_ONCE), argument()
    for _ in range(4):
        assert step(torch.randn(4, 2), given).requires_grad


def test_static_arguments_that_hold_what_trains() -> None:
    """A graph that was made without gradients serves no call that needs them."""
    step = graphed(scaled, dynamic={"x": 0}, static=["by"], sizes=[4], options=AT_ONCE)
    by = Holder([{"of": nn.Linear(2, 2)}])
    with torch.no_grad():
        for _ in range(4):
            step(torch.randn(4, 2), by)
    assert step.entries
    for _ in range(4):
        assert step(torch.randn(4, 2), by).requires_grad
    with torch.no_grad():
        assert not step(torch.randn(4, 2), by).requires_grad
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.EXACT


@pytest.mark.parametrize("where", ["native", "python"])
def test_a_prompt_beside_a_frozen_model(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to no module, so that none says whether it trains; a hit sees when it begins to."""
    if where == "python":
        serve_in_python(monkeypatch)
    prompt, model = weight(), nn.Linear(2, 2).eval()
    step = graphed(lambda x: model(x + prompt), dynamic={"x": 0}, sizes=[4], options=AT_ONCE)
    assert step(torch.randn(4, 2)).requires_grad
    prompt.requires_grad_(False)
    for _ in range(5):
        assert not step(torch.randn(4, 2)).requires_grad
    assert step.stats.hits
    prompt.requires_grad_()
    assert step(torch.randn(4, 2)).requires_grad
