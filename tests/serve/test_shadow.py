"""``verify_every``: a graph that has served calls is compared with eager again, once in so many replays."""

import logging
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper
from graphdispatch.errors import ConfigError

from ..spy import Spy

HIDDEN = Spy([2.0])  # a value of Python that a graph freezes


def _hidden(x: torch.Tensor) -> torch.Tensor:
    """Reads a value that no guard compares: an element of an array."""
    return x * HIDDEN[0]


@pytest.fixture(autouse=True)
def _unchanged() -> Any:
    HIDDEN[0] = 2.0
    with torch.no_grad():
        yield


def _step(every: int | None) -> Graphed[..., Any]:
    options = CUDAGraphOptions(verify_every=every)
    return graphed(_hidden, dynamic={"x": 0}, sizes=(4,), options=options.replace(capture_after=1))


def _reason(step: Graphed[..., Any]) -> Reason:
    assert step.last_decision is not None
    return step.last_decision.reason


@pytest.mark.parametrize("rows", [4, 3])
def test_one_call_in_n_is_compared(rows: int) -> None:
    """The first two calls capture and verify; then each fourth runs eagerly beside the replay."""
    step = _step(3)
    found = []
    for _ in range(14):
        x = torch.randn(rows, 2)
        assert torch.equal(step(x), x * 2)
        found.append(_reason(step))
    hit = Reason.EXACT if rows == 4 else Reason.PADDED
    assert found[2:] == [hit, hit, hit, Reason.VERIFIED_NOW] * 3
    assert step.stats.captures == 1


def test_a_hidden_change_is_found(caplog: pytest.LogCaptureFixture) -> None:
    """The call that finds it gets eager's answer; the graph goes, and the log tells shapes and difference."""
    step = _step(3)
    for _ in range(4):
        step(torch.ones(4, 2) * torch.randn(4, 1))
    HIDDEN[0] = 5.0
    x = torch.ones(4, 2)
    with caplog.at_level(logging.WARNING, "graphdispatch"):
        answers = [step(x) for _ in range(3)]
    assert torch.equal(answers[0], x * 2)  # within the interval the frozen value still answers
    assert torch.equal(answers[1], x * 5)
    assert torch.equal(answers[2], x * 5)
    assert not step.entries
    assert "x (4, 2) torch.float32" in caplog.text
    assert "largest difference 3" in caplog.text
    assert "verification_failed" in step.explain(x) or "not what eager gives" in step.explain(x)


def test_without_it_nothing_is_compared() -> None:
    """The hidden change stays hidden, as the documents say."""
    step = _step(None)
    for _ in range(40):
        step(torch.randn(4, 2))
    HIDDEN[0] = 5.0
    assert torch.equal(step(torch.ones(4, 2)), torch.full((4, 2), 2.0))


def test_wrappers_compare_too() -> None:
    """The front end for engines goes the same way."""
    wrapper = CUDAGraphWrapper(_hidden, options=CUDAGraphOptions(verify_every=2))
    descriptor = BatchDescriptor(4)
    call = {"batch_descriptor": descriptor, "cudagraph_runtime_mode": CUDAGraphMode.FULL}
    for _ in range(11):
        x = torch.randn(4, 2)
        assert torch.equal(wrapper(x, **call), x * 2)
    stats = wrapper.get_stats()
    assert (stats.captures, stats.verifications, stats.hits) == (1, 4, 6)


def test_bad_interval() -> None:
    """An interval below one is refused by name."""
    with pytest.raises(ConfigError, match="verify_every"):
        CUDAGraphOptions(verify_every=0)
