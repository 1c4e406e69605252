"""``invalidate``, ``sleep``, ``wake`` and ``freeze``, behind each front end that has them."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch import Reason

from ..behaviour.front_ends import FRONT_ENDS
from ..helpers import AT_ONCE, check_rows, collector_off, double, make

SIZE = 4


class Model(torch.nn.Linear):
    """Keeps packed weights where no guard looks, as kernels do, beside those that are guarded."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        object.__setattr__(self, "store", {"deep": {"factor": 2.0}})

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.store["deep"]["factor"]


def ahead(served: Any) -> list[Callable[[], Any]]:
    """Everything of a front end that captures on purpose."""
    front, model, x = served.front, served.fn, torch.randn(SIZE, 3)
    ways: dict[str, list[Callable[[], Any]]] = {
        "graphed": [lambda: front.prewarm(x)],
        "adaptive_wrapper": [lambda: front.prewarm([SIZE], lambda _: x)],
        "execute_or_capture": [
            lambda: front.capture_graph(SIZE, 1, model, inputs={"input": x}),
            lambda: front.capture(SIZE, 1, model, inputs={"input": x}),
        ],
    }
    return ways.get(served.name, [])


def settle(served: Any) -> None:
    """Call a front end until its graph serves, the only one."""
    before = served.hits
    for _ in range(3):
        served.check_calls(SIZE)
    assert (len(served.front._graph_cache), served.hits > before) == (1, True)


@pytest.fixture(params=["graphed", "wrapper", "adaptive_wrapper", "execute_or_capture"])
def served(request: pytest.FixtureRequest) -> Any:
    """One module behind each front end in turn, with a graph that serves."""
    made: Any = FRONT_ENDS[request.param](Model().eval(), dynamic={"input": 0})
    settle(made)
    return made


def test_nothing_is_captured_asleep(served: Any) -> None:
    """Nothing is held: captures on purpose are refused, and calls run eagerly; awake, all is captured anew."""
    assert served.front.memory_report().total > 0
    served.front.sleep("first")
    served.front.sleep("second")  # harmless, and one wake is enough
    served.front.invalidate("weights")  # wakes nothing
    served.fn.store["deep"]["factor"] = 7.0
    served.fn.weight.data = torch.randn(3, 3)
    for capture in ahead(served):
        with pytest.raises((gd.ConfigError, gd.CaptureError), match=r"wake\(\)"):
            capture()
    for _ in range(4):
        served.check_calls(SIZE)
    asleep = served.reasons[Reason.ASLEEP]
    assert (len(served.front._graph_cache), asleep, served.front.memory_report().total) == (0, 4, 0)
    assert served.counts.eviction_reasons == {"asleep": 1}
    served.front.wake()
    settle(served)


def test_waking_awake_serves_the_present_weights(served: Any) -> None:
    """``wake`` without a ``sleep`` before it hides no change of the weights."""
    served.fn.weight = torch.nn.Parameter(torch.randn(3, 3))
    served.front.wake()
    settle(served)


def test_nothing_is_captured_frozen(served: Any) -> None:
    """Captures on purpose are refused, and a model whose weights moved runs eagerly until ``unfreeze``."""
    served.front.freeze()
    for capture in ahead(served):
        with pytest.raises((gd.ConfigError, gd.CaptureError), match=r"freeze\(\) forbids"):
            capture()
    served.check_calls(SIZE)
    assert served.reasons[Reason.FROZEN] == 0
    served.fn.weight = torch.nn.Parameter(torch.randn(3, 3))
    served.check_calls(SIZE)
    assert served.reasons[Reason.FROZEN] == 1
    served.front.unfreeze()
    settle(served)


def test_calls_of_a_frozen_or_sleeping_object_say_so() -> None:
    """A strict one raises for a call that no graph serves, and a graph that was never compared is not replayed."""
    step = make(strict=True)
    step.freeze()
    with pytest.raises(gd.errors.FallbackError, match=r"freeze\(\) forbids"):
        step(torch.randn(4, 3))
    manager = gd.CUDAGraphManager()
    manager.capture_graph(4, 1, double, {"x": (4, 3)})
    manager.freeze()
    with pytest.raises(gd.ReplayError, match=r"freeze\(\) forbids"):
        manager.replay_graph(4, 1, {"x": torch.randn(4, 3)})
    for asleep in (step, unused := make()):
        asleep.sleep()
        assert "wake()" in asleep.explain(torch.randn(4, 3))
    with pytest.raises(gd.CaptureError, match=r"nothing can be captured now: .*sleep"):
        unused.prewarm(torch.randn(4, 3))


def _large(least: int) -> list[torch.Tensor]:
    """The tensors that keep so many bytes or more each."""
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    return [one for one in tensors if one.untyped_storage().nbytes() >= least]


@pytest.mark.parametrize("how", ["sleep", "clear", "invalidate"])
def test_memory_is_given_back_at_once(how: str) -> None:
    """No cycle of objects keeps inputs, outputs or plans until Python's collector runs."""
    width = 20_011
    with collector_off():
        before = len(_large(SIZE * width * 4))
        step = gd.graphed(lambda x: x.cos() + 1, dynamic={"x": 0}, sizes=(1, SIZE), options=AT_ONCE)
        check_rows(step, SIZE, SIZE, SIZE, 1, 1, 1, SIZE, width=width)
        assert len(_large(SIZE * width * 4)) > before
        getattr(step, how)()
        if how == "invalidate":
            step.sleep()
        assert len(_large(SIZE * width * 4)) == before


@pytest.mark.parametrize("prewarms", [False, True])
def test_a_callable_that_clears_its_own_graphs_leaves_none(prewarms: bool) -> None:
    """Nobody would find the graph of a signature that was forgotten while it was captured."""

    def restless(x: torch.Tensor) -> torch.Tensor:
        step.clear()
        return x * 2

    step = make(restless, sizes=(4,), options=gd.CUDAGraphOptions(capture_after=1))
    if prewarms:
        step.prewarm(torch.ones(4, 3))
    assert check_rows(step, 4, 4, fn=double) == [Reason.CAPTURE_FAILED] * 2
    assert step.entries == []


def test_a_call_that_interrupts_the_work_on_graphs_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer, or the handler of a signal, calls with new arguments while stale graphs are released."""
    model = torch.nn.Linear(3, 3)
    step = gd.graphed(lambda x, k: model(x) * k, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    retire, x = step._graph_cache.retire, torch.ones(4, 3)
    for _ in range(3):
        step(x, 1.0)
    found = []

    def interrupted(entries: Any, reason: Any) -> Any:
        if entries:
            found.append((step(x, 2.0), step.last_decision.reason))
        return retire(entries, reason)

    model.weight.data = model.weight.data * 2
    with monkeypatch.context() as patch:
        patch.setattr(step._graph_cache, "retire", interrupted)
        assert torch.equal(step(x, 1.0), model(x))
    assert [reason for _, reason in found] == [Reason.STATE_SHARED]
    assert torch.equal(found[0][0], model(x) * 2)
    step.check_integrity()
