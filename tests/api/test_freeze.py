"""``freeze``: a server that is warm captures and compares nothing more."""

from collections.abc import Iterator

import pytest
import torch

import graphdispatch as gd
from graphdispatch import Reason
from graphdispatch.errors import CaptureError, ConfigError, FallbackError, ReplayError

from ..helpers import AT_ONCE


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def double(x: torch.Tensor) -> torch.Tensor:
    """What is served."""
    return x * 2


def test_a_prewarmed_callable_serves_every_batch_frozen() -> None:
    """The prewarm compared every number of rows and a second batch, so that nothing is left to compare."""
    step = gd.graphed(double, dynamic={"x": 0}, sizes=(1, 4, 8))
    step.prewarm(torch.zeros(1, 3))
    step.freeze()
    for rows in range(1, 9):
        x = torch.randn(rows, 3)
        assert torch.equal(step(x), x * 2)
        assert step.last_decision is not None
        assert step.last_decision.reason.is_graph


def test_what_was_not_compared_runs_eagerly() -> None:
    """A new size, a new number of rows, and a second batch of a new graph each wait for ``unfreeze``."""
    step = gd.graphed(double, dynamic={"x": 0}, sizes=(4, 8), options=AT_ONCE)
    step(torch.randn(4, 3))
    step.freeze()
    reasons = []
    for rows in (4, 3, 8):
        step(torch.randn(rows, 3))
        assert step.last_decision is not None
        reasons.append(step.last_decision.reason)
    assert reasons == [Reason.FROZEN] * 3
    assert "unfreeze()" in step.explain(torch.randn(3, 3))
    step.unfreeze()
    step(torch.randn(4, 3))
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.VERIFIED_NOW


def test_nothing_is_captured_on_purpose_either() -> None:
    """Each front end says why, and a strict one raises for a call that no graph serves."""
    step = gd.graphed(double, dynamic={"x": 0}, sizes=(4,), strict=True)
    step.freeze()
    with pytest.raises(ConfigError, match=r"freeze\(\) forbids"):
        step.prewarm(torch.randn(4, 3))
    with pytest.raises(FallbackError, match=r"freeze\(\) forbids"):
        step(torch.randn(4, 3))
    assert step.capture_size(4) is False
    manager = gd.CUDAGraphManager()
    manager.capture_graph(4, 1, double, {"x": (4, 3)})
    manager.freeze()
    with pytest.raises(CaptureError, match=r"freeze\(\) forbids"):
        manager.capture_graph(8, 1, double, {"x": (8, 3)})
    with pytest.raises(ReplayError, match=r"freeze\(\) forbids"):
        manager.replay_graph(4, 1, {"x": torch.randn(4, 3)})
    adaptive = gd.AdaptiveCUDAGraphWrapper(double)
    adaptive.freeze()
    with pytest.raises(ConfigError, match=r"freeze\(\) forbids"):
        adaptive.prewarm([4], lambda descriptor: ((torch.randn(4, 3),), {}))


def test_weights_that_move_leave_eager() -> None:
    """Frozen graphs are still guarded: a model that changed runs eagerly."""
    model = torch.nn.Linear(3, 3).eval()
    step = gd.graphed(model, dynamic={"input": 0}, sizes=(4,))
    step.prewarm(torch.randn(4, 3))
    step.freeze()
    model.weight = torch.nn.Parameter(torch.randn(3, 3))
    x = torch.randn(4, 3)
    assert torch.equal(step(x), model(x))
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.FROZEN


def test_graphs_of_another_state_are_checked_again_too() -> None:
    """``unfreeze`` lets the comparisons of ``verify_every`` come again, whatever state was present meanwhile."""
    held = {"scale": 2.0}

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * held["scale"]

    options = gd.CUDAGraphOptions(verify_every=4)
    step = gd.graphed(scaled, dynamic={"x": 0}, sizes=(4,), options=options.replace(capture_after=1))
    for scale in (2.0, 3.0):
        held["scale"] = scale
        for _ in range(3):
            step(torch.randn(4, 3))
    step.freeze()
    held["scale"] = 2.0
    step(torch.randn(4, 3))
    step.unfreeze()
    for scale in (2.0, 3.0):
        held["scale"] = scale
        before = step.stats.verifications
        for _ in range(12):
            x = torch.randn(4, 3)
            assert torch.equal(step(x), x * scale)
        assert step.stats.verifications > before, scale
    assert step.stats.captures == 2
