"""A table that holds attributes, members or hooks is replaced as a whole: no graph of the old one serves."""

import builtins
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphdispatch import graphed

from ..helpers import AT_ONCE


class Half:
    def factor(self) -> float:
        """A factor."""
        return 0.5


class Third:
    def factor(self) -> float:
        """Another factor."""
        return 0.25


def make() -> nn.Module:
    """A model that reads a configuration, a method of a base class, weights and hooks."""

    class Scaled(Half):
        pass

    class Config:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.config = Config(1.0)
            self.scaled = Scaled()
            self.scaled.unused = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bonus = getattr(self.linear.weight, "bonus", 1.0)
            return self.linear(x) * self.config.scale * self.scaled.factor() * bonus

    model = Model().eval()
    model.linear.weight.bonus = 2.0  # type: ignore[attr-defined]
    return model


def other_module_attributes(model: nn.Module) -> None:
    """``model.__dict__ = {...}``."""
    other = type(model.config)(3.0)
    model.__dict__ = {**model.__dict__, "config": other}


def other_object_attributes(model: nn.Module) -> None:
    """``object.__dict__ = {...}``."""
    model.config.__dict__ = {"scale": 3.0}


def other_tensor_attributes(model: nn.Module) -> None:
    """``parameter.__dict__ = {...}``."""
    model.linear.weight.__dict__ = {"bonus": 5.0}


def other_modules(model: nn.Module) -> None:
    """``model._modules = {...}``."""
    model._modules = {"linear": nn.Linear(4, 4)}


def other_parameters(model: nn.Module) -> None:
    """``module._parameters = {...}``."""
    model.linear._parameters = OrderedDict(weight=nn.Parameter(torch.ones(4, 4)), bias=None)


def other_hooks(model: nn.Module) -> None:
    """``module._forward_hooks = {...}``."""
    model.linear._forward_hooks = OrderedDict({1: lambda module, args, output: output + 1})


def hidden_method(model: nn.Module) -> None:
    """One attribute goes, and another one hides a method: as many as before."""
    del model.scaled.unused
    model.scaled.factor = lambda: 0.125


def other_bases(model: nn.Module) -> None:
    """``Class.__bases__ = (...)``."""
    type(model.scaled).__bases__ = (Third,)


@pytest.mark.parametrize(
    "swap",
    [
        other_module_attributes,
        other_object_attributes,
        other_tensor_attributes,
        other_modules,
        other_parameters,
        other_hooks,
        other_bases,
        hidden_method,
    ],
)
def test_a_replaced_table_is_seen(swap: Callable[[nn.Module], None]) -> None:
    """Be the guard native or not."""
    torch.manual_seed(0)
    model = make()
    serve = graphed(model, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    with torch.no_grad():
        for _ in range(6):
            serve(torch.randn(4, 4))
        assert serve.stats.hits == 4
        swap(model)
        x = torch.randn(4, 4)
        assert torch.equal(serve(x), model(x))
        assert serve.stats.hits == 4


def bounded(x: torch.Tensor) -> torch.Tensor:
    """Uses a builtin."""
    return x * abs(-2)


@pytest.mark.parametrize("place", [globals(), vars(builtins)], ids=["global", "builtin"])
def test_a_hidden_or_replaced_builtin_is_seen(place: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A global variable hides the builtin of its name; somebody else may replace the builtin itself."""
    serve = graphed(bounded, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    x = torch.ones(4, 1)
    for _ in range(5):
        serve(x)
    hits = serve.stats.hits
    assert hits > 0
    with monkeypatch.context() as patch:
        patch.setitem(place, "abs", lambda _: 7)
        answer = serve(x)
        assert serve.stats.hits == hits
    assert torch.equal(answer, x * 7)


class Factor(nn.Module):
    """A model with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use the number."""
        return x * self.factor


@pytest.mark.parametrize("name", ["forward", "_call_impl"])
@pytest.mark.parametrize("change", ["what it calls", "itself"])
def test_a_forward_of_an_object_is_followed(change: str, name: str) -> None:
    """``model.forward = ...``: only torch's code spells the name, and what the function reads belongs to another."""
    other, model = Factor(), Factor()

    def through(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: forward(x)

    setattr(model, name, through(other.forward))
    with torch.no_grad():
        serve = graphed(model, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
        for _ in range(4):
            serve(torch.randn(4, 4))
        assert serve.stats.hits
        if change == "itself":
            setattr(model, name, through(lambda x: x + 1))
        else:
            other.factor = 2.0
        x = torch.randn(4, 4)
        assert torch.equal(serve(x), model(x))


class Written(nn.Module):
    """A model that has a number from a text, in which a name is spelled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.text = Half(), "{0.scale}"
        self.inner.scale = 0.5  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use the number."""
        return x * float(self.text.format(self.inner))


def test_an_attribute_that_a_text_spells_is_read() -> None:
    """``"{0.scale}".format(config)``."""
    model = Written()
    with torch.no_grad():
        serve = graphed(model, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
        for _ in range(4):
            serve(torch.randn(4, 4))
        assert serve.stats.hits
        model.inner.scale = 2.0  # type: ignore[attr-defined]
        x = torch.randn(4, 4)
        assert torch.equal(serve(x), model(x))
