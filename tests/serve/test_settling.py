"""Calls with the same tensors each time: their graph is compared on another batch, and then serves without checks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from graphdispatch import Dim, Graphed, Reason, graphed
from graphdispatch.engines import EntryState
from graphdispatch.serve.hits import Hit

from ..helpers import AT_ONCE, with_options
from ..spy import Spy

ROWS = 4
ENOUGH = 12  # calls with one batch, more than are served before the comparison


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def serve(fn: Callable[..., Any], **options: Any) -> Graphed[..., Any]:
    """A served callable that captures at once."""
    return graphed(fn, dynamic={"x": 0}, sizes=(ROWS,), **with_options(options, capture_after=1))


def is_settled(step: Graphed[..., Any], rows: int = ROWS) -> bool:
    """Whether calls of so many rows are served without the slow path."""
    (group,) = step._graphs.groups.values()
    return type(group.hits[rows]) is Hit


@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
@pytest.mark.parametrize("make", [torch.randn, lambda *shape: torch.randint(0, 99, shape)])
def test_calls_that_are_all_alike_become_hits(rows: int, make: Callable[..., torch.Tensor]) -> None:
    """After some calls, be they of floats or integers, padded or not."""
    step, x = serve(lambda x: x * 2), make(rows, 3)
    for _ in range(ENOUGH):
        assert torch.equal(step(x), x * 2)
    assert is_settled(step, rows)
    assert step.stats.hits == ENOUGH - 1
    other = make(rows, 3)
    assert torch.equal(step(other), other * 2)


def test_a_value_that_the_capture_froze_is_found() -> None:
    """The comparison is a true one: a graph that is no longer what eager does goes, and calls run eagerly."""
    hidden = Spy([2.0])  # no guard looks into it
    step, x = serve(lambda x: x * hidden[0]), torch.randn(ROWS, 3)
    step(x)
    hidden[0] = 3.0
    for _ in range(ENOUGH):
        step(x)
    assert torch.equal(step(x), x * 3)
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.VERIFICATION_FAILED


def test_a_callable_that_refuses_the_other_batch_is_served_on() -> None:
    """Its error stays away from the caller, and the graph as it was."""
    fails = Spy([False])

    def picky(x: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise LookupError("another batch")
        return x * 2

    step, x = serve(picky), torch.randn(ROWS, 3)
    step(x)
    fails[0] = True  # a replay runs no Python
    for _ in range(ENOUGH):
        assert torch.equal(step(x), x * 2)
    assert step.stats.hits == ENOUGH
    assert [entry.state for entry in step.entries] == [EntryState.CAPTURED]
    with pytest.raises(LookupError):
        step(x + 1)


def test_the_comparison_leaves_no_effects() -> None:
    """State that the call writes is as after the calls of the caller alone, and so is the random generator."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.last.copy_(x.sum(0))
            return x + self.count + torch.rand_like(x)

    model, alone = Counts().eval(), Counts().eval()
    step, x = serve(model), torch.randn(ROWS, 3)
    found = []
    for fn in (alone, step):
        torch.manual_seed(0)
        found.append([fn(x) for _ in range(ENOUGH)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(model.count, alone.count)
    assert torch.equal(model.last, x.sum(0))
    assert [entry.state for entry in step.entries] == [EntryState.VERIFIED]


@pytest.mark.parametrize("x", [torch.ones(ROWS, 3, dtype=torch.int64), torch.arange(3)[None]])
def test_where_no_other_batch_can_be_made_all_stays(x: torch.Tensor) -> None:
    """Each call is served, and compared with the first."""
    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=(len(x),), options=AT_ONCE)
    for _ in range(ENOUGH):
        assert torch.equal(step(x), x * 2)
    assert [entry.state for entry in step.entries] == [EntryState.CAPTURED]
    assert step.stats.hits == ENOUGH - 1


def test_freeze_forbids_the_comparison() -> None:
    """As every other one."""
    step, x = serve(lambda x: x * 2), torch.randn(ROWS, 3)
    step(x)
    step.freeze()
    for _ in range(ENOUGH):
        step(x)
    assert [entry.state for entry in step.entries] == [EntryState.CAPTURED]
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.EXACT
    step(x + 1)
    assert step.last_decision.reason is Reason.FROZEN


@pytest.mark.parametrize("dim", [0, 1])
def test_zeros_tell_nothing_of_a_number_of_rows(dim: int) -> None:
    """A batch of zeros agrees with eager whatever branch the code takes; another batch made of it does not."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if x.shape[dim] == 3 else 1.0)

    shapes = [(2, 4), (3, 4)] if dim == 0 else [(2, 2), (2, 3)]
    dynamic = {"x": {0: "batch", 1: Dim("length", sizes=[6])}} if dim else {"x": 0}
    with torch.no_grad():
        step = graphed(fn, dynamic=dynamic, sizes=(5,), options=AT_ONCE)
        step(torch.randn(shapes[0]))
        step(torch.zeros(shapes[1]))
        for _ in range(4):
            x = torch.randn(shapes[1])
            assert torch.equal(step(x), fn(x))
