"""What a guard compares: what the code that ran reads of modules, plain objects, hooks, and containers of all kinds."""

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphdispatch import eager_break

from ..traced import guard_of

_factor = 2.0
_weight = torch.ones(3)


def _by_helper(x: torch.Tensor) -> torch.Tensor:
    return x * _factor


@eager_break
def _by_break(x: torch.Tensor) -> torch.Tensor:
    return x * _factor


class Inner(nn.Module):
    """A part whose method, not its ``forward``, is called from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(scale=1.0, unread=1.0, deep=types.SimpleNamespace(shift=1.0))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.scale + self.config.deep.shift


class Outer(nn.Module):
    """Calls a method of a part, a property and a static method of its own, and a helper."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.state = types.SimpleNamespace(offset=torch.zeros(3), gain=1.0, power=2)

    @property
    def gain(self) -> float:
        return float(self.state.gain)

    @staticmethod
    def raised(x: torch.Tensor, power: int) -> torch.Tensor:
        return x**power

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.raised(self.inner.encode(_by_helper(x)) + self.state.offset, self.state.power) * self.gain


CODE_CHANGES: dict[str, Callable[[Outer], Any]] = {
    "object read by a part's method": lambda net: setattr(net.inner.config, "scale", 2.0),
    "object in an object": lambda net: setattr(net.inner.config.deep, "shift", 2.0),
    "tensor in an object": lambda net: setattr(net.state, "offset", torch.ones(3)),
    "read by a property": lambda net: setattr(net.state, "gain", 2.0),
    "global of a helper": lambda net: globals().__setitem__("_factor", 3.0),
    "hook": lambda net: net.inner.register_forward_hook(lambda module, args, output: output),
    "hook before": lambda net: net.register_forward_pre_hook(lambda module, args: None),
}


@pytest.mark.parametrize("change", CODE_CHANGES.values(), ids=CODE_CHANGES.keys())
def test_what_the_code_of_a_module_reads_is_compared(
    change: Callable[[Outer], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ``forward``, the methods and the helpers that it calls read, behind a decorator, too."""
    monkeypatch.setitem(globals(), "_factor", 2.0)
    net = Outer().eval()
    guard = guard_of(net)
    change(net)
    assert not guard.holds()


_table = {"scale": 2.0, "rest": [1.0]}
_alias = torch.relu
_dtype = torch.float32


class Settings:
    """A class as a place for settings."""

    shift = 1.0


class Base(nn.Module):
    """Has what its heirs read."""

    gain = 2.0
    weights = (1.0, 2.0)


class Adapted(Base):
    """Reads containers, class attributes and globals of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = {"a": 1.0, "b": 2.0}
        self.active = ["a"]
        self.nested = {"a": [[torch.ones(3)]]}
        self.heads = (nn.Linear(3, 3),)
        self.cache = types.SimpleNamespace(parts={"k": torch.ones(3)}, head=nn.Linear(3, 3), unread=0.0)
        self.log: list[int] = []
        self.power = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.active:
            x = x * self.scaling[name] + self.nested[name][0][0] + self.heads[0](x) + self.cache.head(x)
        x = _alias(x).to(_dtype) * self.gain * self.weights[0] * _table["scale"] + Settings.shift
        return x**self.power + self.cache.parts["k"]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.cache.factor


def module_global(name: str, value: Any) -> Callable[[Any], None]:
    """Rebind a global of this file."""
    return lambda _: globals().__setitem__(name, value)


HELD: dict[str, Callable[[Adapted], Any]] = {
    "entry of a dict": lambda net: net.scaling.__setitem__("a", 4.0),
    "list rebound": lambda net: setattr(net, "active", ["b"]),
    "entry of a list": lambda net: net.active.append("b"),
    "tensor deep in containers": lambda net: net.nested["a"][0].__setitem__(0, torch.zeros(3)),
    "layer in a tuple moved": lambda net: setattr(net.heads[0].weight, "data", torch.zeros(3, 3)),
    "dict on an object": lambda net: net.cache.parts.__setitem__("k", torch.zeros(3)),
    "layer on an object": lambda net: setattr(net.cache, "head", nn.Linear(3, 3)),
    "layer on an object moved": lambda net: setattr(net.cache.head.weight, "data", torch.zeros(3, 3)),
    "entry of a global dict": lambda _: _table.__setitem__("scale", 3.0),
    "global function": module_global("_alias", torch.tanh),
    "global type of data": module_global("_dtype", torch.float64),
    "class as settings": lambda _: setattr(Settings, "shift", 2.0),
    "class attribute": lambda _: setattr(Base, "gain", 3.0),
    "tuple of the class": lambda _: setattr(Base, "weights", (3.0, 2.0)),
    "another type of number": lambda net: setattr(net, "power", 2.0),
    "another type of entry": lambda net: net.scaling.__setitem__("a", 1),
}


@pytest.fixture
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_alias", "_dtype"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setitem(_table, "scale", 2.0)
    monkeypatch.setattr(Settings, "shift", 1.0)
    monkeypatch.setattr(Base, "gain", 2.0)
    monkeypatch.setattr(Base, "weights", (1.0, 2.0))


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("change", HELD.values(), ids=HELD.keys())
@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: lambda x: net(x)], ids=["module", "closure"])
def test_whatever_a_module_reads_is_compared(
    wrap: Callable[[Adapted], Callable[..., Any]], change: Callable[[Adapted], Any]
) -> None:
    """In containers, on objects and classes, in globals; of numbers the type, too."""
    net = Adapted().eval().requires_grad_(False)
    guard = guard_of(wrap(net))
    change(net)
    assert not guard.holds()


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.log.append(1),
        lambda net: setattr(net.cache, "unread", 1.0),
        lambda net: net.scaling.__setitem__("a", 1.0),
        lambda net: setattr(net, "power", 2),
        lambda net: net.nested["a"][0][0].add_(1),
        lambda _: _table["rest"].append,
    ],
    ids=["list that is not read", "attribute that is not read", "equal entry", "equal number", "written", "nothing"],
)
def test_what_changes_nothing_for_a_module_is_left_alone(change: Callable[[Adapted], Any]) -> None:
    """Other containers and attributes, and constants that are set to what they are."""
    net = Adapted().eval()
    guard = guard_of(net)
    change(net)
    assert guard.holds()


def test_a_method_of_a_module_is_followed_from_it() -> None:
    """What a method reads is compared where the method is what is called."""
    net = Adapted().eval()
    net.cache.factor = 1.0
    guard = guard_of(net.step)
    net.cache.factor = 2.0
    assert not guard.holds()


def test_each_of_many_constants_is_compared() -> None:
    """A table of thousands is compared as a small one is."""
    vocabulary = {f"token {number}": number for number in range(5000)}
    guard = guard_of(lambda x: x * vocabulary["token 1"])
    vocabulary["token 1"] = 7
    assert not guard.holds()


def test_of_many_tensors_those_in_use_are_compared() -> None:
    """A table of 20,000 tensors of which a run uses one costs the comparison of one address."""
    table = {number: torch.ones(3) for number in range(20_000)}
    guard = guard_of(lambda x: x * table[1])
    assert len(guard) == 1
    table[2].data = torch.zeros(3)
    assert guard.holds()
    table[1].data = torch.zeros(3)
    assert not guard.holds()


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "data", p.data.t()),
        lambda p: setattr(p, "data", p.data[:2]),
        lambda p: p.t_(),
        lambda p: p.resize_(2, 3),
        lambda p: p.as_strided_((3, 2), (3, 1)),
    ],
    ids=["transposed", "cut", "transposed in place", "resized", "strided"],
)
def test_a_weight_that_is_cut_or_transposed_where_it_lies(change: Callable[[nn.Parameter], Any]) -> None:
    """Its address stays the same, and what it holds does not."""
    layer = nn.Linear(3, 3).requires_grad_(False)
    guard = guard_of(layer)
    change(layer.weight)
    assert not guard.holds()


def test_what_the_code_of_a_module_does_not_read_is_left_alone() -> None:
    """Other attributes of the same objects may change with each call."""
    net = Outer().eval()
    guard = guard_of(net)
    net.inner.config.unread = 2.0
    assert guard.holds()


def test_what_a_break_of_a_module_reads_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs eagerly."""
    monkeypatch.setitem(globals(), "_factor", 2.0)

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _by_break(x)

    guard = guard_of(Broken().eval(), skips_breaks=True)
    globals()["_factor"] = 3.0
    assert guard.holds()


def test_hooks_elsewhere_are_no_change() -> None:
    """A hook on another module, or one that is removed again, leaves a callable as it was."""
    net, other = nn.Linear(3, 3).eval(), nn.Linear(3, 3)
    guard = guard_of(net)
    other.register_forward_hook(lambda module, args, output: output)
    net.register_forward_hook(lambda module, args, output: output).remove()
    assert guard.holds()
    assert guard.holds()


def test_a_hook_that_is_removed_is_noticed() -> None:
    """One that was there at the capture; another in its place is noticed as well."""
    net = nn.Linear(3, 3).eval()
    handle = net.register_forward_hook(lambda module, args, output: output)
    guard = guard_of(net)
    handle.remove()
    assert not guard.holds()
    net.register_forward_hook(lambda module, args, output: output)
    assert not guard.holds()


def test_a_hook_for_all_modules_is_noticed() -> None:
    """``register_module_forward_hook`` reaches every module there is."""
    guard = guard_of(nn.Linear(3, 3).eval())
    with nn.modules.module.register_module_forward_hook(lambda module, args, output: output):
        assert not guard.holds()


def test_keys_of_a_dict_are_compared() -> None:
    """The same tensor under another key."""
    table = {"a": _weight}
    guard = guard_of(lambda x: x * table["a"])
    table["b"] = table.pop("a")
    assert not guard.holds()


def test_entries_of_a_deque_are_compared() -> None:
    """As those of a list."""
    recent = deque([_weight], maxlen=1)
    guard = guard_of(lambda x: x * recent[0])
    recent.append(torch.zeros(3))
    assert not guard.holds()
