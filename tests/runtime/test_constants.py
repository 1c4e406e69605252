"""A constant that is another one in nearly every call is named, with what to do about it."""

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.errors import FallbackError

from .test_capture_share import settled


class Step(torch.nn.Module):
    """A step of a diffusion: its time is a number, or a tensor."""

    def forward(self, x: torch.Tensor, *, t: float | torch.Tensor, others: tuple[int, ...] = ()) -> torch.Tensor:
        """The next sample."""
        return x * t + sum(others)


def make(**settings: object) -> Graphed[..., torch.Tensor]:
    """The step, which keeps four signatures."""
    options = CUDAGraphOptions(max_signatures=4)
    return graphed(Step(), dynamic={"x": 0}, sizes=(4,), **{"options": options, **settings})


def run(step: Graphed[..., torch.Tensor], count: int) -> list[Reason]:
    """The reason of each of so many calls, each at a time of its own."""
    reasons = []
    for number in range(count):
        step(torch.ones(4, 2), t=number / 100)
        assert step.last_decision is not None
        reasons.append(step.last_decision.reason)
    return reasons


def test_the_argument_and_its_values_are_named() -> None:
    """By the decision of each call from the second on, by ``explain``, ``health`` and the report."""
    step = make()
    assert run(step, 30) == [Reason.FIRST_SIGHTING] * 4 + [Reason.CONSTANT_CHANGES] * 26
    said = "argument 't' had at least 30 values, and each needs a graph of its own; pass it as a tensor"
    assert step.last_decision is not None
    assert step.last_decision.detail.startswith(said)
    assert said in str(step.health())
    assert said in str(step.report())
    assert "argument 't' had at least 31 values" in step.explain(torch.ones(4, 2), t=5.0)
    few = make()
    run(few, 2)
    assert "argument 't' had at least 2 values" in few.last_decision.explain()  # type: ignore[union-attr]
    assert "argument 't' had at least 2 values" in str(few.health())


def test_a_constant_whose_capture_waits_is_named() -> None:
    """It has other values than the calls that have graphs."""
    step = settled(fn=lambda x, by=1.0: x * by)
    step.prewarm(torch.randn(3, 3), 1.0)
    for _ in range(3):
        step(torch.randn(3, 3), 2.0)
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.CAPTURE_WAITS
    assert "argument 'by' had at least 2 values" in step.last_decision.detail


def test_its_remedies_are_right() -> None:
    """A tensor is one graph for all values; values that come again are served where there is room for their graphs."""
    step = make()
    for number in range(10):
        answer = step(torch.ones(4, 2), t=torch.tensor(number / 100))
        torch.testing.assert_close(answer, torch.full((4, 2), number / 100))
    assert step.stats.hits == 7
    roomy = make(options=CUDAGraphOptions(max_signatures=32, capture_after=1))
    for _ in range(3):
        reasons = run(roomy, 10)
    assert reasons == [Reason.EXACT] * 10


def test_strict_raises_beyond_the_signatures_that_are_kept() -> None:
    """The message names the argument; up to there graphs may still come."""
    step = make(strict=True)
    run(step, 4)
    with pytest.raises(FallbackError, match=r"argument 't' had at least 5 values.* pass it as a tensor"):
        run(step, 30)


def test_calls_that_differ_in_more_are_no_change_of_a_constant() -> None:
    """In the type of a tensor, in its shape, or in their structure."""
    step = make()
    for number, dtype in enumerate((torch.float32, torch.float64, torch.float16) * 4):
        step(torch.ones(4, 2 + number, dtype=dtype), t=number / 100)
    assert step.stats.reasons == {Reason.FIRST_SIGHTING: 12}
    step = make()
    for number in range(12):
        step(torch.ones(4, 2), t=number / 100, others=(1,) * number)
    assert step.stats.reasons == {Reason.FIRST_SIGHTING: 12}


def test_the_values_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come."""
    monkeypatch.setattr("graphdispatch.runtime.group._MOST_CONSTANTS", 8)
    step = make()
    run(step, 30)
    assert len(step._route.constants["t"]) <= 9
