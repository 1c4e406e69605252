"""Faults behind every front end: eager's answer or an error that says what happened, once, and nothing half-made."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from graphdispatch import Reason
from graphdispatch.backends import get_backend
from graphdispatch.errors import ReplayError

from ..helpers import assert_same, may_capture
from .features import needs
from .front_end import FrontEnd, Open
from .inject import Faults, ambient

LATER = (3, 4) * 20
"""Calls after which a graph that failed serves again, or has been given up."""


@contextmanager
def contained(step: FrontEnd) -> Iterator[None]:
    """The block leaves the ambient state and the locks as they must be, and counts each of its calls once."""
    backend = get_backend("cpu")
    before, calls, counted = ambient(backend), step.calls, _counted(step)
    try:
        yield
    finally:
        assert ambient(backend) == before
        assert may_capture()
        assert _counted(step) - counted <= step.calls - calls


def _counted(step: FrontEnd) -> int:
    return step.hits + step.reasons.total()


class Model:
    """Counts its calls in a tensor, which its answer depends on; or writes nothing."""

    def __init__(self, *, counts: bool = True) -> None:
        self.counts, self.count = counts, torch.zeros((), dtype=torch.int64)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Not the same twice, if it counts."""
        if self.counts:
            self.count.add_(1)
        return self.answer(x)

    def answer(self, x: torch.Tensor) -> torch.Tensor:
        """What the latest step gave, or should have."""
        return ((x + 1) * 2).relu() + self.count

    def agrees(self, step: FrontEnd, *rows: int) -> None:
        """Calls whose answers and effects are eager's, each counted once."""
        for one in rows or (4,):
            x, counted, before = torch.randn(one, 3), _counted(step), int(self.count)
            with contained(step):
                got = step(x)
            assert int(self.count) == before + self.counts
            assert_same(got, self.answer(x))
            assert _counted(step) == counted + 1


@pytest.mark.parametrize("error", [ArithmeticError, torch.OutOfMemoryError, ReplayError])
@pytest.mark.parametrize("operators", [0, 1, 2])
def test_a_replay_that_stops_without_effects(
    settled: Open, faults: Faults, operators: int, error: type[Exception]
) -> None:
    """The call has eager's answer, whichever operator failed; so have the calls after it."""
    model = Model(counts=False)
    step = settled(model.step)
    faults.replays = [(operators, error("injected"))]
    hits = step.hits
    model.agrees(step)
    assert not faults.replays, "the fault was never reached"
    assert step.hits == hits
    model.agrees(step, *LATER)


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("injected"), ArithmeticError("injected")], ids=repr)
@pytest.mark.parametrize("operators", [0, 1, 2])
def test_a_replay_that_stops_behind_a_write(settled: Open, faults: Faults, operators: int, fault: Exception) -> None:
    """The step is not run again: an operator's own error is the caller's, since eager would have stopped there too, and
    for another the error says why. Later calls are right, and each writes once."""
    model = Model()
    step = settled(model.step)
    faults.replays = [(operators, fault)]
    before, hits, counted = int(model.count), step.hits, _counted(step)
    with contained(step), pytest.raises(Exception, match="injected") as caught:
        step(torch.randn(4, 3))
    if isinstance(fault, ArithmeticError):
        assert caught.value is fault
    else:
        assert isinstance(caught.value, ReplayError)
        assert caught.value.had_effects
        assert caught.value.__cause__ is fault
    assert not faults.replays
    assert int(model.count) - before in (0, 1)
    assert step.hits == hits
    assert _counted(step) <= counted + 1
    model.agrees(step, *LATER)


@pytest.mark.parametrize("error", [ArithmeticError, torch.OutOfMemoryError])
def test_a_capture_that_fails(opened: Open, faults: Faults, error: type[Exception]) -> None:
    """A call has eager's answer and effects, once; a capture ahead is refused and leaves none. Later ones succeed."""
    model = Model()
    step = opened(model.step)
    x = torch.randn(4, 3)
    # A capture ahead whose recorded run failed is made again, and watched closely.
    faults.set("begin", *((1, 2) if step.captures_ahead else (1,)), error=lambda: error("injected"))
    with contained(step):
        step.prepare(x)
    assert int(model.count) == 0
    model.agrees(step)
    assert faults.visits["begin"]
    assert step.captures == step.hits == 0
    model.agrees(step, *[4] * len(LATER))
    if step.captures_ahead:
        assert step.hits == 0
        step.renew(x)
        model.agrees(step, 4, 4, 4)
    assert step.captures == 1
    assert step.was_hit()


@needs("comparisons")
@pytest.mark.parametrize("error", [ArithmeticError("injected"), torch.OutOfMemoryError("injected"), None])
def test_a_comparison_that_fails(opened: Open, faults: Faults, error: Exception | None) -> None:
    """Whether the replay fails or gives other values: the call has eager's answer and effects, once."""
    model = Model()
    step = opened(model.step)
    step.prepare(torch.randn(4, 3))
    if not step.captures_ahead:
        model.agrees(step)
    assert step.captures == 1
    faults.replays = [(1, error)]
    model.agrees(step)
    assert not faults.replays
    assert step.hits == 0
    assert step.reasons[Reason.VERIFIED_NOW] == 0
    model.agrees(step, *[4] * len(LATER))
