"""A policy that learns hears how long steps took, and acts on it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from graphdispatch import Reason, ReplayError
from graphdispatch.backends import get_backend
from graphdispatch.engines import (
    CompositeDispatcher,
    CudagraphDispatcher,
    DefaultDispatchPolicy,
    DispatchKey,
    DispatchMode,
    DispatchPolicy,
    StreamDispatcher,
)

from ..helpers import scripted
from .test_dispatcher import KEY, OTHER, entry, serve


class Notes(DefaultDispatchPolicy):
    """Learns nothing, and notes what it hears."""

    learns = True

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[DispatchMode] = []

    def record(self, key: DispatchKey, mode: DispatchMode, latency: float) -> None:
        """Note it."""
        self.noted.append(mode)


Behind = Callable[[DispatchPolicy, Callable[..., Any]], tuple[CudagraphDispatcher, Any]]


@pytest.fixture(params=["plain", "streams", "composite", "streams in composite", "composite in composite"])
def behind(request: pytest.FixtureRequest) -> Iterator[Behind]:
    """Makes a dispatcher with that policy, and what calls go to."""
    stack = ExitStack()

    def make(policy: DispatchPolicy, runner: Callable[..., Any]) -> tuple[CudagraphDispatcher, Any]:
        one = CudagraphDispatcher(runner, policy)
        if "streams" in request.param:
            one = StreamDispatcher(runner, 2, policy=policy, backend=get_backend("cpu"))
            stack.callback(one.close)
        called: Any = one
        for _ in range(request.param.count("composite")):
            outer = CompositeDispatcher()
            outer.add_dispatcher("member", called)
            called = outer
        return one, called

    with stack:
        yield make


def test_a_policy_learns_behind_every_dispatcher(behind: Behind) -> None:
    """It hears of graphs and eager steps, once each; a comparison takes longer than either, and is not."""
    policy = Notes()
    one, called = behind(policy, lambda x: x * 2)
    one.register_graph(KEY, entry())
    serve(called, KEY, 4)
    for _ in range(2):
        called.dispatch(OTHER, torch.randn(8, 3))
    assert one.stats.reasons == {Reason.VERIFIED_NOW: 1, Reason.ABOVE_LARGEST_SIZE: 2}
    assert called.stats.total == 6
    assert policy.noted == [DispatchMode.CUDAGRAPH] * 3 + [DispatchMode.EAGER] * 2


def test_no_policy_hears_of_a_step_that_raised(behind: Behind) -> None:
    """It is counted all the same, once; ``policy`` may be replaced at any time."""

    def positive(x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] < 0:
            raise ValueError("no")
        return x

    policy = Notes()
    one, called = behind(DefaultDispatchPolicy(), positive)
    one.policy = policy
    with pytest.raises(ValueError, match="no"):
        called.dispatch(KEY, -torch.ones(4, 3))
    assert policy.noted == []
    assert one.stats.reasons == {Reason.NOT_CAPTURED: 1}
    called.dispatch(KEY, torch.ones(4, 3))
    assert policy.noted == [DispatchMode.EAGER]


def test_a_replay_that_failed_half_way_is_counted_once_and_no_policy_hears_of_it(behind: Behind) -> None:
    """The error says that the call had effects, and nothing else runs."""
    policy = Notes()
    one, called = behind(policy, lambda: "eager")
    one.register_graph(KEY, scripted(on_replay=lambda: torch.zeros(2) + torch.zeros(3)))
    with pytest.raises(ReplayError, match="failed to replay"):
        called.dispatch(KEY)
    assert (policy.noted, one.stats.reasons) == ([], {Reason.REPLAY_FAILED: 1})
