"""A break that changes Python state which the graphs behind it were captured for."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import ReplayError, eager_break, graphed
from graphdispatch.state.bytecode import changed_by

NUMBERS: types.ModuleType = types.ModuleType("numbers_of_break")


def set_attribute(net: Any, value: int) -> None:
    """An attribute of the model."""
    net.limit = value


def set_entry(net: Any, value: int) -> None:
    """An entry of a dict."""
    net.table["limit"] = value


def set_slice(net: Any, value: int) -> None:
    """All entries of a list."""
    net.limits[:] = [value]


def set_by_methods(net: Any, value: int) -> None:
    """The same by methods."""
    net.limits.clear()
    net.limits.append(value)


def set_variable(net: Any, value: int) -> None:
    """A variable of a module."""
    NUMBERS.limit = value  # type: ignore[attr-defined]


CHANGES: dict[Callable[[Any, int], None], Callable[[Any], int]] = {
    set_attribute: lambda net: net.limit,
    set_entry: lambda net: net.table["limit"],
    set_slice: lambda net: net.limits[0],
    set_by_methods: lambda net: net.limits[0],
    set_variable: lambda net: NUMBERS.limit,
}


class Net(nn.Module):
    """Its break sets a number by the batch, and what follows reads it."""

    def __init__(self, change: Callable[[Any, int], None], counts: bool = False) -> None:
        super().__init__()
        self.change, self.read, self.counts = change, CHANGES[change], counts
        self.limit, self.table, self.limits = 1, {"limit": 1}, [1]
        self.register_buffer("calls", torch.zeros(1))

    @eager_break
    def choose(self, x: Tensor) -> Tensor:
        """Reads the batch, which no graph can."""
        self.change(self, 2 if x.sum() > 100 else 1)
        return x + 1

    def forward(self, x: Tensor) -> Tensor:
        """Reads what the break has set."""
        if self.counts:
            self.calls.add_(1)
        return self.choose(x * 2) * self.read(self)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(NUMBERS, "limit", 1, raising=False)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_break_changes_is_seen_behind_it(change: Callable[[Any, int], None]) -> None:
    """In the same call: it runs eagerly once more."""
    net = Net(change).eval()
    served = graphed(net, dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE")
    for number in range(24):
        x = torch.rand(4, 4) + 100 * (number % 6 == 5)
        expected = (x * 2 + 1) * (2 if number % 6 == 5 else 1)
        assert torch.equal(served(x), expected), number
        net.change(net, 1)
    assert served.stats.hits


def test_a_call_that_has_written_cannot_run_again() -> None:
    """It raises, and says what to do; the next call is answered as eager does."""
    net = Net(set_attribute, counts=True).eval()
    served = graphed(net, dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE")
    for _ in range(6):
        served(torch.rand(4, 4))
    assert served.stats.hits
    with pytest.raises(ReplayError, match="return what they need from the break"):
        served(torch.rand(4, 4) + 100)
    assert net.calls == 7
    for x in (torch.rand(4, 4) + 100, torch.rand(4, 4)):
        assert torch.equal(served(x), (x * 2 + 1) * (2 if x.sum() > 100 else 1))
    assert net.calls == 9


def test_what_code_may_change() -> None:
    """What it assigns; where it changes containers, all that it spells; never its own variables."""
    assert changed_by(set_attribute.__code__) == {"limit"}
    assert changed_by(set_variable.__code__) == {"limit"}
    assert {"table"} <= changed_by(set_entry.__code__)
    assert {"limits"} <= changed_by(set_slice.__code__) & changed_by(set_by_methods.__code__)
    assert changed_by(test_what_a_break_changes_is_seen_behind_it.__code__) == frozenset()
