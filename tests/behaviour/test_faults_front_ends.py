"""Faults behind every front end: eager's answer or an error that says what happened, once, and nothing half-made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from graphdispatch import Reason
from graphdispatch.backends import get_backend
from graphdispatch.errors import ReplayError

from ..helpers import may_capture
from .features import needs
from .front_end import FrontEnd
from .inject import DeviceFaults, ambient

Open = Callable[..., FrontEnd]
LATER = 40
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


class Pure:
    """Writes nothing and draws nothing."""

    def answer(self, x: torch.Tensor) -> torch.Tensor:
        """Three operators."""
        return ((x + 1) * 2).relu()

    def agrees(self, step: FrontEnd, rows: int = 4) -> None:
        """One call whose answer is eager's, counted once."""
        x, counted = torch.randn(rows, 3), _counted(step)
        with contained(step):
            torch.testing.assert_close(step(x), self.answer(x), rtol=0, atol=0)
        assert _counted(step) == counted + 1


class Counting(Pure):
    """Counts its calls in a tensor, which its answer depends on."""

    def __init__(self) -> None:
        self.count = torch.zeros((), dtype=torch.int64)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Not the same twice."""
        self.count.add_(1)
        return ((x + 1) * 2).relu() + self.count

    def answer(self, x: torch.Tensor) -> torch.Tensor:
        return super().answer(x) + self.count

    def agrees(self, step: FrontEnd, rows: int = 4) -> None:
        before = int(self.count)
        x, counted = torch.randn(rows, 3), _counted(step)
        with contained(step):
            got = step(x)
        assert int(self.count) == before + 1
        torch.testing.assert_close(got, self.answer(x), rtol=0, atol=0)
        assert _counted(step) == counted + 1


@pytest.mark.parametrize("error", [ArithmeticError, torch.OutOfMemoryError])
@pytest.mark.parametrize("operators", [0, 1, 2])
def test_a_replay_that_stops_without_effects(
    settled: Open, device: DeviceFaults, operators: int, error: type[Exception]
) -> None:
    """The call has eager's answer, whichever operator failed; so have the calls after it."""
    model = Pure()
    step = settled(model.answer)
    device.replays = [(operators, error("injected"))]
    hits = step.hits
    model.agrees(step)
    assert device.is_over, "the fault was never reached"
    assert step.hits == hits
    for number in range(LATER):
        model.agrees(step, 3 + number % 2)


@pytest.mark.parametrize("operators", [0, 1, 2])
def test_a_replay_that_stops_behind_a_write(settled: Open, device: DeviceFaults, operators: int) -> None:
    """The step is not run again, and the error says why; later calls are right, and each writes once."""
    model = Counting()
    step = settled(model.step)
    fault = torch.OutOfMemoryError("injected")
    device.replays = [(operators, fault)]
    before, hits, counted = int(model.count), step.hits, _counted(step)
    with contained(step), pytest.raises(ReplayError, match="injected") as caught:
        step(torch.randn(4, 3))
    assert caught.value.had_effects
    assert caught.value.__cause__ is fault
    assert device.is_over
    assert int(model.count) - before in (0, 1)
    assert step.hits == hits
    assert _counted(step) <= counted + 1
    for number in range(LATER):
        model.agrees(step, 3 + number % 2)


@pytest.mark.parametrize("operators", [0, 2])
def test_an_error_that_eager_would_raise_there(settled: Open, device: DeviceFaults, operators: int) -> None:
    """Behind a write the operator's own error is the caller's, since eager would have stopped at the same place."""
    model = Counting()
    step = settled(model.step)
    fault = ArithmeticError("injected")
    device.replays = [(operators, fault)]
    with contained(step), pytest.raises(ArithmeticError, match="injected") as caught:
        step(torch.randn(4, 3))
    assert caught.value is fault
    for number in range(LATER):
        model.agrees(step, 3 + number % 2)


@pytest.mark.parametrize("error", [ArithmeticError, torch.OutOfMemoryError])
def test_a_capture_that_fails(opened: Open, device: DeviceFaults, error: type[Exception]) -> None:
    """A call has eager's answer and effects, once; a capture ahead is refused and leaves none. Later ones succeed."""
    model = Counting()
    step = opened(model.step)
    x = torch.randn(4, 3)
    device.captures = [error("injected")]
    with contained(step):
        step.prepare(x)
    assert int(model.count) == 0
    model.agrees(step)
    assert device.is_over
    assert step.captures == step.hits == 0
    for _ in range(LATER):
        model.agrees(step)
    if step.captures_ahead:
        assert step.hits == 0
        step.renew(x)
        for _ in range(3):
            model.agrees(step)
    assert step.captures == 1
    assert step.was_hit()


@needs("comparisons")
@pytest.mark.parametrize("error", [ArithmeticError("injected"), torch.OutOfMemoryError("injected"), None])
def test_a_comparison_that_fails(opened: Open, device: DeviceFaults, error: Exception | None) -> None:
    """Whether the replay fails or gives other values: the call has eager's answer and effects, once."""
    model = Counting()
    step = opened(model.step)
    step.prepare(torch.randn(4, 3))
    for _ in range(0 if step.captures_ahead else 1):
        model.agrees(step)
    assert step.captures == 1
    device.replays = [(1, error)]
    model.agrees(step)
    assert device.is_over
    assert step.hits == 0
    assert step.reasons[Reason.VERIFIED_NOW] == 0
    for _ in range(LATER):
        model.agrees(step)
