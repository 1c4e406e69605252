"""Entries that were handed on, to a dispatcher or by hand: moved weights, gradients, and the whole policy is asked."""

from collections.abc import Collection

import pytest
import torch
from torch import nn

import graphdispatch as gd

KEY = gd.DispatchKey(4, 4)


def captured(model: nn.Module) -> tuple[gd.CUDAGraphEntry, gd.CudagraphDispatcher]:
    """A graph of ``model`` for four rows, and a dispatcher that has it."""
    entry = gd.CUDAGraphRegistry().capture(4, 1, model, {"input": (4, 3)})
    dispatcher = gd.CudagraphDispatcher(model)
    dispatcher.register_graph(KEY, entry)
    return entry, dispatcher


def test_moved_weights_are_not_served_by_the_old_graph() -> None:
    """The dispatcher runs eagerly with a reason, and the entry itself refuses."""
    model = nn.Linear(3, 3).eval().requires_grad_(False)
    entry, dispatcher = captured(model)
    x = torch.randn(4, 3)
    for _ in range(2):
        assert torch.equal(dispatcher.dispatch(KEY, x), model(x))
    model.weight.data = torch.randn(3, 3)
    assert torch.equal(dispatcher.dispatch(KEY, x), model(x))
    assert dispatcher.stats.graph == 1
    assert dispatcher.stats.reasons == {gd.Reason.VERIFIED_NOW: 1, gd.Reason.ADDRESS_CHANGED: 1}
    with pytest.raises(gd.ReplayError, match="moved; capture it again"):
        entry.replay({"input": x})


def test_without_guards_the_caller_answers_for_the_weights() -> None:
    """``guard_weights=False`` is said of entries as well."""
    model = nn.Linear(3, 3).eval().requires_grad_(False)
    config = gd.CUDAGraphConfig(options=gd.CUDAGraphOptions(guard_weights=False))
    entry = gd.CUDAGraphRegistry(config).capture(4, 1, model, {"input": (4, 3)})
    model.bias.data = torch.zeros(3)
    assert entry.replay({"input": torch.ones(4, 3)}).shape == (4, 3)


@pytest.mark.parametrize("by", ["input", "training"])
def test_gradients_are_not_lost(by: str) -> None:
    """A call that may be differentiated runs eagerly; the graph serves the next one as before."""
    model = nn.Linear(3, 3).train(by == "training")
    entry, dispatcher = captured(model)
    x = torch.randn(4, 3, requires_grad=by == "input")
    dispatcher.dispatch(KEY, x).sum().backward()
    assert (x.grad if by == "input" else model.weight.grad) is not None
    assert dispatcher.stats.reasons == {gd.Reason.NEEDS_GRADIENTS: 1}
    with torch.no_grad():
        for _ in range(2):  # compared, then served
            assert torch.equal(dispatcher.dispatch(KEY, x), model(x))
    assert (dispatcher.stats.graph, entry.replay_count) == (1, 1)


def test_an_entry_refuses_what_requires_a_gradient() -> None:
    """Before anything is copied, so that it can be replayed afterwards."""
    entry, _ = captured(nn.Linear(3, 3).eval())
    with pytest.raises(gd.errors.GuardError, match="input 'input' requires a gradient, which no graph gives"):
        entry.replay({"input": torch.ones(4, 3, requires_grad=True)})
    assert entry.replay({"input": torch.ones(4, 3)}).shape == (4, 3)


class NeverPrefill(gd.DispatchPolicy):
    """Says only which keys graphs are for."""

    def should_use_graph(self, key: gd.DispatchKey, graph_available: bool) -> bool:
        """Decode batches."""
        return graph_available and not key.is_prefill

    def select_mode(self, key: gd.DispatchKey, available_modes: Collection[gd.DispatchMode]) -> gd.DispatchMode:
        """The best."""
        return next(iter(available_modes))


def test_a_policy_is_asked_whether_at_all() -> None:
    """``should_use_graph`` has its say, whatever ``select_mode`` would answer."""
    dispatcher = gd.CudagraphDispatcher(lambda: "eager", NeverPrefill())
    for is_prefill in (False, True):
        graph = gd.MockCUDAGraph("graph")
        graph.capture_begin()
        graph.capture_end()
        dispatcher.register_graph(KEY._replace(is_prefill=is_prefill), graph)
    assert dispatcher.dispatch(KEY) == "graph"
    assert dispatcher.dispatch(KEY._replace(is_prefill=True)) == "eager"
    assert dispatcher.stats.reasons == {gd.Reason.POLICY: 1}
