"""What a guard follows: the code of modules, plain objects, hooks, and containers of all kinds."""

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphdispatch.capture.breaks import eager_break
from graphdispatch.capture.guards import StateGuard

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
    guard = StateGuard(net)
    assert guard.holds()
    change(net)
    assert not guard.holds()


def test_what_the_code_of_a_module_does_not_read_is_left_alone() -> None:
    """Other attributes of the same objects may change with each call."""
    net = Outer().eval()
    guard = StateGuard(net)
    net.inner.config.unread = 2.0
    assert guard.holds()


def test_what_a_break_of_a_module_reads_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs eagerly."""
    monkeypatch.setitem(globals(), "_factor", 2.0)

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _by_break(x)

    guard = StateGuard(Broken().eval())
    globals()["_factor"] = 3.0
    assert guard.holds()


def test_hooks_elsewhere_are_no_change() -> None:
    """A hook on another module, or one that is removed again, leaves a callable as it was."""
    net, other = nn.Linear(3, 3).eval(), nn.Linear(3, 3)
    guard = StateGuard(net)
    other.register_forward_hook(lambda module, args, output: output)
    net.register_forward_hook(lambda module, args, output: output).remove()
    assert guard.holds()
    assert guard.holds()


def test_a_hook_that_is_removed_is_noticed() -> None:
    """One that was there at the capture; another in its place is noticed as well."""
    net = nn.Linear(3, 3).eval()
    handle = net.register_forward_hook(lambda module, args, output: output)
    guard = StateGuard(net)
    assert guard.holds()
    handle.remove()
    assert not guard.holds()
    net.register_forward_hook(lambda module, args, output: output)
    assert not guard.holds()


def test_a_hook_for_all_modules_is_noticed() -> None:
    """``register_module_forward_hook`` reaches every module there is."""
    guard = StateGuard(nn.Linear(3, 3).eval())
    with nn.modules.module.register_module_forward_hook(lambda module, args, output: output):
        assert not guard.holds()


def test_keys_of_a_dict_are_compared() -> None:
    """The same tensor under another key."""
    table = {"a": _weight}
    guard = StateGuard(lambda x: x * table["a"])
    table["b"] = table.pop("a")
    assert not guard.holds()


def test_entries_of_a_deque_are_compared() -> None:
    """As those of a list."""
    recent = deque([_weight], maxlen=1)
    guard = StateGuard(lambda x: x * recent[0])
    assert guard.holds()
    recent.append(torch.zeros(3))
    assert not guard.holds()
