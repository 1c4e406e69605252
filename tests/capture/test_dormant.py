"""Tensors of zeros and flags that hide what padding does: a later write to them must not let real rows mix."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import graphdispatch as gd
from graphdispatch import Reason


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Gate(nn.Module):
    """Something that mixes rows as soon as its buffer says so."""

    def __init__(self, fn: Callable[[Tensor, Tensor], Tensor], gate: Tensor) -> None:
        super().__init__()
        self.fn = fn
        self.register_buffer("gate", gate)
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, self.gate)


def _written(x: Tensor, gate: Tensor, kept: Tensor) -> Tensor:
    kept.add_(gate * x.sum(0))
    return x + kept


GATES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "gate": (lambda x, a: x + a * x.mean(0), torch.zeros(4)),
    "number": (lambda x, a: x + a * x.amax(0), torch.tensor(0.0)),
    "double": (lambda x, a: x + (a * x.amin(0)).float(), torch.tensor(0.0, dtype=torch.float64)),
    "half": (lambda x, a: x + a * x.std(0, unbiased=False), torch.zeros(4, dtype=torch.bfloat16)),
    "view": (lambda x, a: x + a[0].view(-1).expand(4) * x.mean(0), torch.zeros(2, 1)),
    "flag": (lambda x, a: torch.where(a, x.softmax(0), x), torch.tensor(False)),
    "flag_on": (lambda x, a: torch.where(a, x, x.softmax(0)), torch.tensor(True)),
    "flag_as_number": (lambda x, a: x + a.float() * x.mean(0), torch.tensor(False)),
    "integer": (lambda x, a: x + a * x.mean(0), torch.tensor(0)),
    "product": (lambda x, a: x + x.mean(0) @ a, torch.zeros(4, 4)),
}


def _turned(gate: Tensor) -> Tensor:
    return ~gate if gate.dtype is torch.bool else gate + 1


@pytest.mark.parametrize("rows", [3, 4], ids=["padded-first", "full-first"])
@pytest.mark.parametrize("name", GATES)
def test_a_buffer_of_zeros_hides_nothing(name: str, rows: int) -> None:
    """Padded batches run eagerly, before and after the buffer is written; full ones are served."""
    fn, gate = GATES[name]
    model = Gate(fn, gate.clone())
    step = gd.graphed(model, dynamic={"x": 0}, sizes=[4])
    for one in (rows, rows, rows, 3, 4, 3):
        step(torch.randn(one, 4))
    assert step.last_decision.reason is Reason.VERIFICATION_FAILED
    assert "tensor of shape" in step.last_decision.explain()
    assert torch.equal(model.gate, gate)
    model.gate.copy_(_turned(gate))
    for one in (3, 4, 2):
        x = torch.randn(one, 4)
        assert torch.allclose(step(x), model(x)), step.last_decision
    assert step.stats.hits > 0


@pytest.mark.parametrize("rows", [3, 4], ids=["padded-first", "full-first"])
@pytest.mark.parametrize("name", GATES)
def test_an_argument_of_zeros_hides_nothing(name: str, rows: int) -> None:
    """An argument without rows may hold other numbers in the next call."""
    fn, gate = GATES[name]
    step = gd.graphed(lambda x, a: fn(x, a), dynamic={"x": 0}, sizes=[4])
    for one in (rows, rows, rows, 3, 4, 3):
        step(torch.randn(one, 4), gate.clone())
    assert step.last_decision.reason is Reason.VERIFICATION_FAILED
    assert "argument 'a' holds other values" in step.last_decision.explain()
    for one in (3, 4, 2):
        x = torch.randn(one, 4)
        assert torch.allclose(step(x, _turned(gate)), fn(x, _turned(gate))), step.last_decision


@pytest.mark.parametrize("rows", [3, 4], ids=["padded-first", "full-first"])
def test_what_is_written_shows_it(rows: int) -> None:
    """Rows that would mix in state alone are found in the state."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rate", torch.zeros(()))
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.add_(self.rate * x.sum(0))
            return x * 2

    model, eager = Mean(), Mean()
    step = gd.graphed(model, dynamic={"x": 0}, sizes=[4])
    for one in (rows, rows, rows, 3, 4, 3):
        step(torch.rand(one, 4))
    assert torch.equal(model.mean, eager.mean)
    for one in (model, eager):
        one.rate.fill_(1)
    for rows in (3, 2, 3):
        x = torch.rand(rows, 4) + 1
        assert torch.equal(step(x), eager(x))
        assert torch.allclose(model.mean, eager.mean), step.last_decision


def test_rows_apart_are_served() -> None:
    """Layers with zero biases, zero statistics, integer buffers and a state of zeros are served padded, as ever."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4).eval()
            self.layer.bias.zero_()
            self.register_buffer("places", torch.zeros(4, dtype=torch.long))
            self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
            self.register_buffer("steps", torch.zeros(()))
            self.kinds = nn.Embedding(1, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.steps.add_(1)
            y = self.norm(self.layer(x)) + self.kinds(self.places[0])
            return y.masked_fill(~self.mask, -1.0)[:, self.places]

    model = Plain()
    step = gd.graphed(model, dynamic={"x": 0}, sizes=[4])
    calls = 0
    for rows in (3, 3, 4, 3, 3):
        x = torch.randn(rows, 4)
        got, calls = step(x), calls + 1
        assert int(model.steps) == calls
        want = model(x)
        calls += 1
        assert torch.allclose(got, want)
    assert step.last_decision.reason is Reason.PADDED
    assert not bool(model.norm.running_mean.any())
    assert not bool(model.layer.bias.any())


def test_generators_and_python_state_stay() -> None:
    """The runs draw no numbers of the caller's and leave no trace in Python."""
    model = Gate(lambda x, a: x + a + torch.rand(4), torch.zeros(4))
    step = gd.graphed(model, dynamic={"x": 0}, sizes=[4])
    x = torch.zeros(3, 4)
    torch.manual_seed(5)
    got = [step(x) for _ in range(5)]
    torch.manual_seed(5)
    assert all(torch.equal(one, model(x)) for one in got)
    assert step.last_decision.reason is Reason.PADDED
