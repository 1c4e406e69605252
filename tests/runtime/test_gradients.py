"""A call that reaches something that trains has eager's gradients, wherever that lies."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
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
    "computed": (scaled, lambda: partial(torch.mul, weight() * 2)),
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


PROMPT = torch.ones(2)
MODULE = ModuleType("prompts")
MODULE.held = SimpleNamespace(prompt=PROMPT)  # type: ignore[attr-defined]


class Prompts:
    """A class that holds a tensor, and has a method that reads a global one."""

    prompt = PROMPT
    later: Any = None

    def add(self, x: Tensor) -> Tensor:
        """With what a global variable holds."""
        return self.plus(x)

    def plus(self, x: Tensor) -> Tensor:
        """The same, for another method."""
        return x + PROMPT


class Prompted(nn.Module):
    """A module whose code reads a global tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """With the prompt."""
        return x + PROMPT


OBJECT = Prompts()
BY_CODE: dict[str, Callable[[Tensor], Tensor]] = {
    "forward": Prompted().eval(),
    "method": OBJECT.add,
    "method of an object": lambda x: OBJECT.add(x),
    "class": lambda x: x + Prompts.prompt,
    "module": lambda x: x + MODULE.held.prompt,
    "a name that nobody sees": lambda x: x + globals()["".join(("PRO", "MPT"))],
}


@pytest.mark.parametrize("is_unsafe", [False, True])
@pytest.mark.parametrize("fn", BY_CODE.values(), ids=BY_CODE)
def test_what_trains_where_code_alone_leads_to(fn: Callable[[Tensor], Tensor], is_unsafe: bool) -> None:
    """Each call is differentiated, whether the call can be captured or not. Where it finds the tensor under a name that
    it makes up, those are once its code was watched; a call that no graph can hold is watched up to what shows that."""

    def call(x: Tensor) -> Tensor:
        return fn(x) if not is_unsafe or x.sum().item() < 1e9 else x

    PROMPT.requires_grad_()
    try:
        step = graphed(fn if not is_unsafe else call, dynamic={"x": 0}, sizes=[4], options=AT_ONCE)
        found = [step(torch.randn(4, 2)).requires_grad for _ in range(4)]
    finally:
        PROMPT.requires_grad_(False)
    if fn is not BY_CODE["a name that nobody sees"]:
        assert all(found)
    elif not is_unsafe:
        assert all(found[1:])


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "attribute": (lambda h: h.prompt, lambda h, value: setattr(h, "prompt", value)),
    "entry": (lambda h: h.table["prompt"], lambda h, value: h.table.update(prompt=value)),
    "one of a list": (lambda h: h.list[0], lambda h, value: h.list.__setitem__(0, value)),
    "last of a list": (lambda h: h.log[-1], lambda h, value: h.log.append(value)),
    "class": (lambda h: Prompts.later, lambda h, value: setattr(Prompts, "later", value)),
    "module": (lambda h: MODULE.later, lambda h, value: setattr(MODULE, "later", value)),
    "another object": (lambda h: h.inner.prompt, lambda h, value: setattr(h, "inner", SimpleNamespace(prompt=value))),
}


@pytest.mark.parametrize("is_unsafe", [False, True])
@pytest.mark.parametrize("first", [2.0, torch.ones(2)], ids=["number", "tensor"])
@pytest.mark.parametrize("place", PLACES)
def test_what_trains_that_comes_later(place: str, first: Any, is_unsafe: bool) -> None:
    """Each call is differentiated from then on, until it goes."""
    (get, put), held = PLACES[place], SimpleNamespace(table={}, list=[None], log=[])
    put(held, first)

    def call(x: Tensor) -> Tensor:
        return x * get(held) if not is_unsafe or x.sum().item() < 1e9 else x

    step = graphed(call, dynamic={"x": 0}, sizes=[4], options=AT_ONCE)
    for value in (first, weight(), 3.0, weight(), torch.ones(2)):
        put(held, value)
        wants = isinstance(value, Tensor) and value.requires_grad
        assert {step(torch.randn(4, 2)).requires_grad for _ in range(12)} == {wants}


@pytest.mark.parametrize("is_computed", [False, True])
def test_an_attribute_of_a_module_that_is_not_registered(is_computed: bool) -> None:
    """One that trains by itself counts, whatever the module's mode; what is computed of its weights follows that."""
    model: Any = nn.Linear(2, 2).eval()
    model.scale = weight() * 2 if is_computed else weight()
    step = graphed(lambda x: model(x) * model.scale, dynamic={"x": 0}, sizes=[4], options=AT_ONCE)
    for _ in range(4):
        assert step(torch.randn(4, 2)).requires_grad is not is_computed


def test_an_activation_does_not_train() -> None:
    """A module without parameters, which nobody has put into eval mode, says nothing of others."""
    model, activation = nn.Linear(2, 2).eval(), nn.GELU()
    step = graphed(lambda x: activation(model(x)), dynamic={"x": 0}, sizes=[4], options=AT_ONCE)
    for _ in range(4):
        step(torch.randn(4, 2))
    assert step.stats.hits


@pytest.mark.parametrize("captures", [False, True])
def test_what_differentiates_inside_hears_that_gradients_are_off(captures: bool) -> None:
    """Nothing tells before a call that its code differentiates. Torch's error says what to do, and that is served."""

    def slope(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad((x**3).sum(1).sum(), x)
        return found

    x = torch.linspace(-1, 1, 12).view(4, 3)
    options = AT_ONCE if captures else None
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        graphed(slope, dynamic={"x": 0}, options=options)(x)
    assert "within torch.enable_grad()" in caught.value.__notes__[-1]
    step = graphed(torch.enable_grad()(slope), dynamic={"x": 0}, options=AT_ONCE)
    for number in range(4):
        assert torch.equal(step(x + number), slope(x + number))
    assert step.stats.hits
