"""What copies and pickles of single objects keep, share, and refuse."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch import CUDAGraphMode, Reason
from graphdispatch.backends import get_backend
from graphdispatch.engines import BatchDescriptor, DispatchKey, DispatchMode

from ..helpers import AT_ONCE

HOW: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}


@pytest.fixture(params=HOW)
def copied(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Each way of making a copy."""
    return HOW[request.param]


@pytest.fixture(params=["deepcopy", "pickle"])
def cloned(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Each way of copying what it holds, too."""
    return HOW[request.param]


class Model(torch.nn.Module):
    """A module that holds a served callable around its own method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.step = gd.graphed(self.run, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        return self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """By a graph."""
        return self.step(x)


def serve(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Call it until a graph serves."""
    for rows in (3, 3, 3):
        step(torch.randn(rows, 3))


def test_a_module_that_holds_its_own_step(cloned: Callable[[Any], Any]) -> None:
    """The step of the copy runs the copy's method on the copy's weights, from whichever end they are copied."""
    model = Model().eval()
    serve(model)
    other = cloned(model)
    assert other.step.unwrap().__self__ is other
    step = cloned(model.step)
    assert step.unwrap().__self__.step is step
    other.layer.weight.zero_()
    serve(other)
    x = torch.randn(3, 3)
    assert torch.equal(other(x), other.run(x))
    assert torch.equal(model(x), model.run(x))
    assert (other.step.stats.hits, model.step.stats.hits) == (2, 2)


def test_options_are_kept(copied: Callable[[Any], Any]) -> None:
    """A copy has the options and the mode of now, and no graphs."""
    manager = gd.CUDAGraphManager()
    manager.mode = CUDAGraphMode.NONE
    assert copied(manager).mode is CUDAGraphMode.NONE
    model = torch.nn.Linear(3, 3).eval()
    wrapper = copied(gd.AdaptiveCUDAGraphWrapper(model, min_replays_to_keep=5))
    wrapper(torch.ones(3, 3), batch_descriptor=BatchDescriptor(3), cudagraph_runtime_mode=CUDAGraphMode.FULL)
    assert len(wrapper.get_cached_descriptors()) == 1
    step = gd.graphed(model, dynamic={"input": 0}, pad={"input": 7}, sizes=(3, 5), outputs="view")
    other = copied(step)
    assert other.sizes == (3, 5)
    assert other.entries == []
    assert other.stats.calls == 0
    assert isinstance(other(torch.randn(3, 3)), gd.OutputView)


def test_dispatchers_keep_their_settings(copied: Callable[[Any], Any]) -> None:
    """Policy and forbidden modes, as they are now; the graphs stay where they are."""
    dispatcher = gd.CudagraphDispatcher(torch.nn.Linear(3, 3).eval(), max_cached_graphs=7)
    dispatcher.policy = gd.DefaultDispatchPolicy(3, 9)
    dispatcher.disable_mode(DispatchMode.PIECEWISE)
    dispatcher.register_graph(DispatchKey(3, 3), gd.MockCUDAGraph())
    other = copied(dispatcher)
    assert isinstance(other.policy, gd.DefaultDispatchPolicy)
    assert other.policy.min_tokens_for_graph == 3
    assert DispatchMode.PIECEWISE not in other.enabled_modes
    assert (other.max_cached_graphs, other.num_graphs) == (7, 0)


def test_a_composite_has_its_members(cloned: Callable[[Any], Any]) -> None:
    """Copied, and in the same order."""
    composite = gd.CompositeDispatcher()
    composite.add_dispatcher("a", gd.CudagraphDispatcher(torch.nn.Linear(3, 3).eval()))
    composite.add_dispatcher("b", gd.CudagraphDispatcher(torch.nn.Linear(3, 3).eval()), priority=1)
    other = cloned(composite)
    assert list(other.members) == ["b", "a"]
    assert other.dispatch(DispatchKey(3, 3), torch.ones(3, 3)).shape == (3, 3)
    assert composite.stats.total == 0


def test_counters_are_a_snapshot(copied: Callable[[Any], Any]) -> None:
    """What counts keeps its figures, and counts by itself from then on."""
    stats, dispatched = gd.CUDAGraphStats(), gd.DispatchStats()
    stats.record_eager(Reason.POLICY, 3)
    dispatched.record(DispatchMode.EAGER, Reason.POLICY, 5)
    others = copied(stats), copied(dispatched)
    stats.record_eager(Reason.POLICY, 3)
    dispatched.record(DispatchMode.EAGER, Reason.POLICY, 5)
    assert [other.to_dict()["reasons"] for other in others] == [{Reason.POLICY.value: 1}] * 2
    others[0].record_eager(Reason.POLICY)
    assert (stats.misses, others[0].misses) == (2, 2)


def test_views_are_copied_with_their_values() -> None:
    """A copy of a handle has tensors of its own; a stale one cannot be copied."""
    step = gd.graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=(4,), outputs="view", options=AT_ONCE)
    serve(step)
    view = step(torch.ones(3, 3))
    kept = copy.deepcopy(view)
    step(torch.zeros(3, 3))
    assert torch.equal(kept.get(), torch.full((3, 3), 2.0))
    with pytest.raises(gd.StaleOutputError):
        copy.deepcopy(view)


def test_graphs_and_memory_are_not_copied(copied: Callable[[Any], Any]) -> None:
    """An entry, a graph and the result of a step under way say so in one line."""
    step = gd.graphed(torch.nn.Linear(3, 3).eval(), dynamic={"input": 0}, sizes=(4,), options=AT_ONCE)
    serve(step)
    entry = step.entries[0]
    streams = gd.StreamDispatcher(torch.nn.Linear(3, 3).eval(), 1)
    result = streams.submit(DispatchKey(3, 3), torch.ones(3, 3))
    for thing in (entry, entry.graph, result, streams.workers[0], streams.workers[0].stream):
        with pytest.raises(gd.errors.CopyError, match=type(thing).__name__) as caught:
            copied(thing)
        assert "\n" not in str(caught.value)
    streams.close()


def test_pools_and_backends_are_shared() -> None:
    """Copies of what was given a pool use it, too; a pool cannot go to another process, a backend can."""
    backend = get_backend("cpu")
    pool = backend.make_pool()
    wrapper = gd.CUDAGraphWrapper(torch.nn.Linear(3, 3).eval(), backend=backend, pool=pool)
    assert copy.deepcopy({"a": wrapper, "pool": pool})["pool"] is pool
    assert pickle.loads(pickle.dumps(backend)) is backend
    with pytest.raises(gd.errors.CopyError, match="Pool"):
        pickle.dumps(wrapper)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):  # pickle's own error
        pickle.dumps(gd.graphed(lambda x: x, dynamic={"x": 0}))
