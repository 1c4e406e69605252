"""Dispatchers of dispatchers: priorities, fallback chain and one view; and policies that learn behind any of them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from graphdispatch import Reason
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
from graphdispatch.errors import BackendError, ConfigError, GuardError, ReplayError

from ..helpers import scripted
from .test_dispatcher import KEY, OTHER, entry, serve

PREFILL = DispatchKey(4, 1, is_prefill=True)


class Runner:
    """An eager runner that counts its runs, and fails on request."""

    runs = 0

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error = name, error

    def __call__(self, *args: Any) -> str:
        self.runs += 1
        if self.error is not None:
            raise self.error
        return f"{self.name} eager"


def member(name: str, *keys: DispatchKey, error: Exception | None = None, **script: Any) -> CudagraphDispatcher:
    """A dispatcher with a scripted graph for each key."""
    dispatcher = CudagraphDispatcher(Runner(name, error))
    for key in keys:
        dispatcher.register_graph(key, scripted(f"{name} graph", **script))
    return dispatcher


def pair(first: CudagraphDispatcher, second: CudagraphDispatcher) -> CompositeDispatcher:
    """A composite of two members, ``first`` before ``second``, added the other way round."""
    composite = CompositeDispatcher()
    composite.add_dispatcher("second", second)
    composite.add_dispatcher("first", first, priority=1)
    return composite


def test_the_higher_priority_serves() -> None:
    """Of members with a graph for the key; those of one priority in the order in which they were added."""
    first = member("a", KEY)
    composite = pair(first, member("b", KEY))
    composite.add_dispatcher("third", member("c", KEY))
    assert composite.members == ("first", "second", "third")
    assert composite.dispatch(KEY) == "a graph"
    first.clear_cache()
    assert composite.dispatch(KEY) == "b graph"


def test_keys_that_a_member_does_not_accept_pass_it_by() -> None:
    """Members for different work see their own keys only, for graphs and for runners."""
    composite = CompositeDispatcher()
    encoder, decoder = member("encoder", KEY), member("decoder", KEY)
    composite.add_dispatcher("encoder", encoder, priority=9, accepts=lambda key: key.is_prefill)
    composite.add_dispatcher("decoder", decoder, accepts=lambda key: not key.is_prefill)
    assert composite.dispatch(KEY) == "decoder graph"
    assert composite.dispatch(PREFILL) == "encoder eager"
    alone = CompositeDispatcher()
    alone.add_dispatcher("decoder", decoder, accepts=lambda key: not key.is_prefill)
    with pytest.raises(ConfigError, match=r"no member accepts DispatchKey.*decoder"):
        alone.dispatch(PREFILL)


def test_a_graph_that_fails_leaves_the_call_to_its_own_runner() -> None:
    """The member drops it and runs the call once; later calls go to the next member's graph."""
    first, second = member("a", KEY, fail_replay_at=1), member("b", KEY)
    composite = pair(first, second)
    assert [composite.dispatch(KEY), composite.dispatch(KEY)] == ["a eager", "b graph"]
    assert (first.eager_runner.runs, second.eager_runner.runs) == (1, 0)
    assert first.stats.reasons == {Reason.REPLAY_FAILED: 1}
    assert not first.has_graph(KEY)


@pytest.mark.parametrize("error", [ValueError("bad"), ReplayError("mine"), GuardError("mine"), BackendError("mine")])
def test_errors_of_a_runner_pass_through(error: Exception) -> None:
    """What the runner raises, even an error of this library, is raised as it is, and nothing else runs."""
    first, second = member("a", error=error), member("b")
    composite = pair(first, second)
    with pytest.raises(type(error)) as caught:
        composite.dispatch(KEY)
    assert caught.value is error
    assert (first.eager_runner.runs, second.eager_runner.runs) == (1, 0)


def test_a_graph_that_its_owner_released_is_passed_over() -> None:
    """The call goes on to the next member, and the first one forgets the graph."""
    first, gone = CudagraphDispatcher(lambda x: x * 2), entry()
    first.register_graph(KEY, gone)
    composite = pair(first, member("b", KEY))
    gone.release()
    assert composite.dispatch(KEY, torch.ones(4, 3)) == "b graph"
    assert not first.has_graph(KEY)


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
            outer.add_dispatcher("other", CudagraphDispatcher(pytest.fail))  # no call of a member is tried again here
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


def half_way() -> None:
    """What a replay does that says itself that it stopped after it had changed something."""
    error = ReplayError("half-way")
    error.had_effects = True
    raise error


@pytest.mark.parametrize("fails", [half_way, lambda: torch.zeros(2) + torch.zeros(3)], ids=["its own", "another"])
def test_a_replay_that_failed_half_way_ends_the_call(behind: Behind, fails: Callable[[], Any]) -> None:
    """The error says that the call had effects, and nothing else runs. It is counted once, and no policy hears of it;
    the graph is dropped."""
    policy, runs = Notes(), list[str]()
    one, called = behind(policy, lambda: runs.append("eager"))
    one.register_graph(KEY, scripted(on_replay=fails))
    with pytest.raises(ReplayError) as caught:
        called.dispatch(KEY)
    assert caught.value.had_effects
    assert (policy.noted, runs, one.stats.reasons) == ([], [], {Reason.REPLAY_FAILED: 1})
    assert not one.has_graph(KEY)
