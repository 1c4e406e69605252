"""Guards: what they notice of weights, modules and variables, and when two callables are one."""

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from graphdispatch import eager_break, graphed
from graphdispatch.state.callables import same_callable
from graphdispatch.state.guards import StateGuard, wants_gradient
from graphdispatch.state.objects import same_objects
from graphdispatch.state.reads import StateReads

from ..traced import guard_of

_table = torch.ones(3)
_factor = 2.0


class Net(nn.Module):
    """Two layers, a buffer, a tensor that is neither, and what else may hang on a module."""

    slope = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.register_buffer("offset", torch.zeros(3))
        self.loose = torch.ones(3)
        self.caches = [torch.zeros(3)]
        self.unregistered = [nn.Linear(3, 3).eval().requires_grad_(False)]
        self.activation: Callable[..., Any] = torch.relu
        self._private = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x) * self.loose + self.offset + self.caches[0] * self.slope * self._private
        return self.unregistered[0](self.activation(x))


class Runner:
    """A plain object that holds tensors, is callable and has methods."""

    def __init__(self) -> None:
        self.weight = torch.ones(3)
        self.last = torch.ones(3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.scaled(x) for _ in range(2)])

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def first(net: Net) -> Any:
    """The first layer."""
    return net.layers[0]


def assign(name: str, value: Callable[[], Any]) -> Callable[[Net], None]:
    """Set an attribute of the first layer."""
    return lambda net: setattr(first(net), name, value())


CHANGES: dict[str, Callable[[Net], Any]] = {
    "data assigned": lambda net: setattr(first(net).weight, "data", torch.ones(3, 3)),
    "parameter replaced": assign("weight", lambda: nn.Parameter(torch.ones(3, 3))),
    "parameter removed": assign("bias", lambda: None),
    "loaded by assignment": lambda net: net.load_state_dict(Net().state_dict(), assign=True),
    "submodule replaced": lambda net: setattr(net, "layers", nn.Sequential(nn.Linear(3, 3))),
    "submodule added": lambda net: net.layers.append(nn.ReLU()),
    "submodule removed": lambda net: net.layers.__delitem__(1),
    "buffer replaced": lambda net: setattr(net, "offset", torch.ones(3)),
    "buffer added": lambda net: net.register_buffer("more", torch.ones(3)),
    "loose tensor replaced": lambda net: setattr(net, "loose", torch.zeros(3)),
    "loose tensor moved": lambda net: setattr(net.loose, "data", torch.zeros(3)),
    "entry of a list replaced": lambda net: net.caches.__setitem__(0, torch.zeros(3)),
    "list replaced": lambda net: setattr(net, "caches", list(net.caches)),
    "layer in a list moved": lambda net: setattr(net.unregistered[0].weight, "data", torch.zeros(3, 3)),
    "function replaced": lambda net: setattr(net, "activation", torch.tanh),
    "private number changed": lambda net: setattr(net, "_private", 2.0),
    "number of the class shadowed": lambda net: setattr(net, "slope", 2.0),
    "converted": lambda net: net.double(),
    "trained": lambda net: net.train(),
    "inner module trained": lambda net: net.layers[1].train(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: net,
        lambda net: net.forward,
        lambda net: partial(net),
        lambda net: partial(lambda model, x: model(x), net),
        lambda net: lambda x: net(x),
        lambda net: lambda x, model=net: model(x),
    ],
    ids=["module", "method", "partial", "partial argument", "closure", "default"],
)
def test_a_changed_module_is_noticed(wrap: Callable[[Net], Callable[..., Any]], change: Callable[[Net], Any]) -> None:
    """However a callable reaches the module, and whatever of it moved or was replaced."""
    net = Net().eval()
    guard = guard_of(wrap(net))
    change(net)
    assert not guard.holds()


@pytest.mark.parametrize(
    "change",
    [
        lambda net: first(net).weight.data.fill_(5),
        lambda net: net.load_state_dict(Net().state_dict()),
        lambda net: net.offset.add_(1),
        lambda net: net.eval(),
    ],
    ids=["filled", "loaded", "buffer written", "eval again"],
)
def test_writing_in_place_is_no_change(change: Callable[[Net], Any]) -> None:
    """A graph reads the same memory, so it sees the new values."""
    net = Net().eval()
    guard = guard_of(net)
    change(net)
    assert guard.holds()


def test_a_closure_variable_is_compared() -> None:
    """A tensor or a constant that is rebound is noticed."""
    weight, factor = torch.ones(3), 2.0

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * weight * factor

    guard = guard_of(fn)
    weight = torch.zeros(3)
    assert not guard.holds()
    guard = guard_of(fn)
    factor = 3.0
    assert not guard.holds()


@pytest.mark.parametrize(("name", "value"), [("_table", torch.zeros(3)), ("_factor", 3.0)])
def test_a_global_variable_is_compared(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """As a captured one, if the callable itself reads it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * _table * _factor

    guard = guard_of(fn)
    monkeypatch.setitem(globals(), name, value)
    assert not guard.holds()


REACHES: dict[str, Callable[[Runner], Any]] = {
    "object": lambda r: r,
    "method": lambda r: r.step,
    "partial of object": lambda r: partial(r),
    "partial of method": lambda r: partial(r.step),
    "partial argument": lambda r: partial(lambda runner, x: runner.step(x), r),
    "closure": lambda r: lambda x: r.step(x),
    "default": lambda r: lambda x, runner=r: runner(x),
    "decorated": lambda r: torch.no_grad()(r.step),
    "inner function": lambda r: (lambda inner: lambda x: inner(x) + 1)(lambda x: r.step(x)),
    "attribute of an object": lambda r: (lambda engine: lambda x: engine.runner.step(x))(
        types.SimpleNamespace(runner=r)
    ),
    "list": lambda r: lambda x, runners=[r]: [each.step(x) for each in runners],
    "graphed": lambda r: graphed(r.step, dynamic={"x": 0}),
}


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())
@pytest.mark.parametrize(
    "change",
    [lambda r: setattr(r, "weight", torch.zeros(3)), lambda r: setattr(r.weight, "data", torch.zeros(3))],
    ids=["replaced", "moved"],
)
def test_tensors_of_a_plain_object_are_compared(reach: Callable[[Runner], Any], change: Callable[[Any], None]) -> None:
    """An engine's runner that is no module holds tensors too, which methods read that the callable calls."""
    runner = Runner()
    guard = guard_of(reach(runner))
    change(runner)
    assert not guard.holds()


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())
def test_tensors_that_are_not_read_are_left_alone(reach: Callable[[Runner], Any]) -> None:
    """An object that keeps its last result does not make its graphs stale with each call."""
    runner = Runner()
    fn = reach(runner)
    fn(torch.ones(2, 3))  # the first call of a graphed callable reads more
    guard = guard_of(fn)
    runner.last = torch.zeros(3)
    assert guard.holds()


@dataclass(slots=True)
class Slotted:
    """An object without a dict, with a number of its class and one that a property reads."""

    weight: torch.Tensor
    _scale: float = 1.0
    slope: ClassVar[float] = 1.0

    @property
    def scale(self) -> float:
        return self._scale

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.scale * self.slope


@pytest.mark.parametrize(
    "change",
    [
        lambda s: setattr(s, "weight", torch.ones(3)),
        lambda s: setattr(s, "_scale", 2.0),
        lambda s: setattr(type(s), "slope", 2.0),
    ],
    ids=["slot", "by way of a property", "of the class"],
)
def test_whatever_holds_an_attribute(change: Callable[[Slotted], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots, properties and classes are read like the dict of an object."""
    monkeypatch.setattr(Slotted, "slope", 1.0)
    slotted = Slotted(torch.ones(3))
    guard = guard_of(slotted.step)
    change(slotted)
    assert not guard.holds()


def test_an_equal_constant_is_no_change() -> None:
    """A number that is set again to what it was makes no graph stale; another sign of zero does."""
    options = types.SimpleNamespace(scale=0.5)
    guard = guard_of(lambda x: x * options.scale)
    options.scale = float("0.5")
    assert guard.holds()
    options.scale = 0.0
    guard = guard_of(lambda x: x * options.scale)
    options.scale = -0.0
    assert not guard.holds()


def test_what_a_break_reads_is_left_alone() -> None:
    """It runs eagerly in each replay."""
    factor = 2.0
    part = eager_break(lambda x: x * factor)
    guard = guard_of(lambda x: part(x), skips_breaks=True)
    factor = 3.0
    assert guard.holds()


def test_an_empty_closure_is_held() -> None:
    """A variable that is not assigned yet does not disturb, and is noticed once it is."""
    weight = torch.ones(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * weight if len(x) < 9 else x * later

    guard = guard_of(fn)
    later = weight
    assert not guard.holds()


@pytest.mark.parametrize("fn", [torch.relu, len, types.SimpleNamespace(a=1)], ids=["builtin", "len", "no callable"])
def test_what_has_no_state_always_holds(fn: Any) -> None:
    """Nothing to compare is no error."""
    guard = StateGuard(fn)
    assert (guard.holds(), len(guard)) == (True, 0)


def test_tied_tensors_are_compared_once() -> None:
    """A parameter under two names is one tensor."""
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    assert len(StateGuard(net)) == 1


@pytest.mark.parametrize(
    ("prepare", "trainable"),
    [
        (lambda net: net.train(), True),
        (lambda net: net.eval(), False),
        (lambda net: net.train().requires_grad_(False), False),
    ],
    ids=["train", "eval", "frozen"],
)
def test_a_module_in_training_needs_gradients(prepare: Callable[[Net], Any], trainable: bool) -> None:
    """Only parameters that require a gradient, of a module in training mode; looked up anew each time."""
    net = Net()
    guard = StateGuard(net)
    prepare(net)
    assert guard.trainable is trainable


def test_a_captured_leaf_needs_gradients() -> None:
    """A tensor without a module has no evaluation mode to say otherwise."""
    weight = torch.ones(3, requires_grad=True)
    assert StateGuard(lambda x: x * weight).trainable


@pytest.mark.parametrize("wants", [True, False])
def test_a_gradient_is_seen_in_objects(wants: bool) -> None:
    """An argument that is an object may hold a tensor that requires one."""
    batch = types.SimpleNamespace(parts=[torch.ones(3, requires_grad=wants)], name="x")
    assert wants_gradient(batch) is wants
    assert wants_gradient(batch.parts[0]) is wants
    assert not any(map(wants_gradient, (1, "x", None, print)))


def test_modules_are_found_once() -> None:
    """However many ways lead to one."""
    net = Net()
    modules = [*net.modules(), *net.unregistered]
    for fn in (partial(lambda x, a, b: a(b(x)), a=net, b=net), net.forward):
        assert sorted(map(id, StateReads(fn, None).modules)) == sorted(map(id, modules))
    assert StateReads(torch.relu, None).modules == []


def of_scale(scale: Any) -> Callable[[Any], Any]:
    """A lambda that captured ``scale``."""
    return lambda x: x * scale


def with_default(scale: Any) -> Callable[..., Any]:
    """A lambda whose defaults hold ``scale``."""
    return lambda x, *, by=scale: x * by


def counting(scale: Any) -> Callable[[Any], Any]:
    """A function that assigns a variable of this one."""

    def count(x: Any) -> Any:
        nonlocal scale
        scale = scale + 1
        return x * scale

    return count


def of_module(name: str) -> Callable[[Any], Any]:
    """The same code over the variables of another module."""
    return types.FunctionType(add.__code__, {"name": name})


def named(scale: float) -> Callable[[Any], Any]:
    """A function with an attribute."""
    fn: Any = of_scale(_weight)
    fn.scale = scale
    return fn  # type: ignore[no-any-return]


def add(a: Any, b: Any) -> Any:
    """Two arguments for partials."""
    return a + b


_weight, _other = torch.ones(3), torch.ones(3)
_runner = Runner()
PAIRS: dict[str, tuple[Any, Any, bool]] = {
    "one object": (add, add, True),
    "one lambda written twice over one object": (of_scale(_weight), of_scale(_weight), True),
    "another captured object": (of_scale(_weight), of_scale(_other), False),
    "one default": (with_default(_weight), with_default(_weight), True),
    "another default": (with_default(_weight), with_default(_other), False),
    "other code": (lambda x: x, lambda x: x, False),
    "other variables of the same value, which it assigns": (counting(_weight), counting(_weight), False),
    "other globals": (of_module("one"), of_module("other"), False),
    "another attribute": (named(2), named(3), False),
    "one attribute": (named(2), named(2), True),
    "bound methods": (_runner.step, _runner.step, True),
    "methods of two objects": (_runner.step, Runner().step, False),
    "two methods of one object": (_runner.step, _runner.__call__, False),
    "partials": (partial(add, _weight), partial(add, _weight), True),
    "partials of another argument": (partial(add, _weight), partial(add, _other), False),
    "partials of more arguments": (partial(add, _weight), partial(add, _weight, _weight), False),
    "partials by keyword": (partial(add, b=_weight), partial(add, b=_weight), True),
    "partials by another keyword": (partial(add, b=_weight), partial(add, a=_weight), False),
    "partials of other functions": (partial(of_scale, _weight), partial(with_default, _weight), False),
    "equal objects": (Runner(), Runner(), False),
    "function and its partial": (add, partial(add), False),
}


@pytest.mark.parametrize(("a", "b", "same"), PAIRS.values(), ids=PAIRS.keys())
def test_same_callable(a: Any, b: Any, same: bool) -> None:
    """Two callables are one if they are one piece of code over the same objects; the order does not matter."""
    assert same_callable(a, b) is same
    assert same_callable(b, a) is same


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ([1, "a", None, 2.5], [1, "a", None, 2.5], True),
        ([1], [1, 1], False),
        ([1], [True], False),
        ([_weight], [_weight], True),
        ([_weight], [_other], False),
        ([[1]], [[1]], False),
    ],
)
def test_same_objects(before: list[Any], after: list[Any], same: bool) -> None:
    """Constants by value and type, everything else by identity."""
    assert same_objects(before, after) is same
