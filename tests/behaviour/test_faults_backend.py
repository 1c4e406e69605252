"""Faults of the device: when a capture begins, ends or gets no memory, at replays, for good; and what they leave."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphdispatch import Graphed, Reason, graphed
from graphdispatch.engines import CUDAGraphManager
from graphdispatch.errors import FallbackError
from graphdispatch.runtime.outputs import Outputs

from ..helpers import AT_ONCE, check_rows, collector_off, make
from .inject import Faults, Model, batch, nothing_left_behind

OUT_OF_MEMORY = [
    torch.OutOfMemoryError,
    MemoryError,
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
]


def agrees(model: Model, step: Graphed[..., Any], number: int, rows: int = 3) -> Reason:
    """One call whose answer and state are eager's, exactly once; the reason of its decision."""
    twin = model.copy()
    torch.manual_seed(number)
    want = twin.step(*batch(number, rows))
    torch.manual_seed(number)
    with nothing_left_behind(step):
        got = step(*batch(number, rows))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert model.same_state(twin)
    return step.last_decision.reason


def settled(kind: str, rows: int = 3) -> tuple[Model, Graphed[..., Any]]:
    """A model, and what serves it by a graph from the next call on."""
    model = Model(kind)
    step = model.serve(sizes=(3, 5))
    for number in range(3):
        agrees(model, step, number, rows)
    return model, step


@pytest.mark.parametrize("kind", ["pure", "stateful", "broken"])
@pytest.mark.parametrize("point", ["begin", "end", "arena", "replay"])
def test_a_capture_that_fails_is_contained(faults: Faults, point: str, kind: str) -> None:
    """Wherever it fails, the call has eager's answer and effects, once; the size is quarantined, others are served."""
    model = Model(kind)
    step = model.serve(sizes=(3, 5))
    faults.set(point, 1)
    reason = agrees(model, step, 0)
    assert faults.visits[point], "the fault was never reached"
    assert reason is (Reason.REPLAY_FAILED if point == "replay" else Reason.CAPTURE_FAILED)
    assert "ArithmeticError" in step.last_decision.detail
    assert step.entries == []
    assert step.memory_bytes == next(iter(step._graphs.groups.values())).inputs.nbytes
    assert agrees(model, step, 1) is reason
    reasons = [agrees(model, step, n, rows=5) for n in (2, 3, 4)]
    assert reasons == [Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.EXACT]


def test_a_quarantine_outlives_the_weights(faults: Faults) -> None:
    """Other weights alone get no new try, since the state may change with each call; ``invalidate`` gives one."""
    layer = torch.nn.Linear(3, 3).eval()
    step = make(layer, dynamic={"input": 0}, sizes=(3,))
    faults.set("end", 1)
    for _ in range(2):
        check_rows(step, 3)
        assert step.last_decision.reason is Reason.CAPTURE_FAILED
        layer.weight = torch.nn.Parameter(torch.randn(3, 3))
    step.invalidate("other weights")
    check_rows(step, 3)
    assert step.last_decision.reason is Reason.CAPTURED_NOW


def test_strict_raises_with_the_cause(faults: Faults) -> None:
    """The reason and the original exception are in the error."""
    step = Model("pure").serve(sizes=(3, 5), strict=True)
    faults.set("end", 1)
    with nothing_left_behind(step), pytest.raises(FallbackError, match="ArithmeticError") as caught:
        step(*batch(0))
    assert caught.value.reason is Reason.CAPTURE_FAILED
    assert isinstance(caught.value.__cause__.__cause__, ArithmeticError)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["torch", "python", "allocator"])
@pytest.mark.parametrize("point", ["begin", "end", "arena"])
def test_a_capture_without_memory_is_contained(faults: Faults, point: str, error: Any) -> None:
    """The call happens once and has eager's answer; the size is quarantined with the reason, and other graphs stay."""
    model, step = settled("stateful", rows=5)
    faults.set(point, 1, error=error)
    assert agrees(model, step, 3) is Reason.OUT_OF_MEMORY
    visits = faults.visits[point]
    assert agrees(model, step, 4) is Reason.OUT_OF_MEMORY
    assert faults.visits[point] == visits
    assert [entry.size for entry in step.entries] == [5]
    assert agrees(model, step, 5, rows=5) is Reason.EXACT


@pytest.mark.parametrize("outputs", ["static", "view"])
def test_no_memory_for_the_outputs_that_callers_hold(outputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison saves them from its replay; without memory for that the call has eager's answer."""

    def fail(self: Outputs, size: int) -> list[Tensor]:
        raise torch.OutOfMemoryError

    step = make(lambda x: x * 2, sizes=(3,), outputs=outputs)
    step(torch.randn(3, 2))
    monkeypatch.setattr(Outputs, "lent", fail)
    x = torch.randn(3, 2)
    answer = step(x)
    assert torch.equal(answer.get() if outputs == "view" else answer, x * 2)
    assert step.last_decision.reason is Reason.OUT_OF_MEMORY


def test_a_replay_that_fails_twice_is_given_up(faults: Faults) -> None:
    """Its comparison with eager fails as well: the graph is released, and the size quarantined."""
    model, step = settled("pure")
    faults.set("replay", 1, 2)
    assert [agrees(model, step, number) for number in (3, 4)] == [Reason.REPLAY_FAILED] * 2
    assert step.entries == []


def test_a_manager_runs_a_call_without_result_once(faults: Faults) -> None:
    """A capture that fails after the step has run does not run it again, whatever it returned."""
    manager = CUDAGraphManager(CUDAGraphManager().config.replace(backend="cpu", capture_sizes=(4,), options=AT_ONCE))
    state = torch.zeros(4, 2)
    faults.set("end", 1)
    manager.execute_or_capture(4, 1, lambda x: (state.add_(x), None)[1], {"x": torch.ones(4, 2)})
    assert torch.equal(state, torch.ones(4, 2))


def test_prewarm_goes_on_after_a_size_that_fails(faults: Faults) -> None:
    """The other sizes are captured; the collector is not left frozen."""
    model = Model("pure")
    step = model.serve(sizes=(3, 5))
    faults.set("end", 1)
    with nothing_left_behind(step):
        step.prewarm(*batch(0))
    assert [entry.size for entry in step.entries] == [3]
    assert agrees(model, step, 1, rows=5) is Reason.CAPTURE_FAILED


def living() -> int:
    """Tensors and storages that Python can reach, once all garbage is collected."""
    gc.collect()
    # By type: some of torch's objects answer isinstance with a warning.
    return sum(issubclass(type(thing), (torch.Tensor, torch.UntypedStorage)) for thing in gc.get_objects())


def leaves_nothing(step: Graphed[..., Any], fail: Callable[[int], None], times: int) -> None:
    """After so many failures there are as many tensors, tracked bytes and threads as after the first ten."""
    for number in range(10):
        fail(number)
    before = living(), threading.active_count(), step.memory_bytes
    for number in range(times):
        fail(number)
    assert (living(), threading.active_count(), step.memory_bytes) == before


@pytest.mark.parametrize(("point", "times"), [("end", 200), ("arena", 50), ("replay", 50)])
def test_failed_captures_leave_nothing(faults: Faults, point: str, times: int) -> None:
    """Hundreds of them."""
    step = graphed(lambda x: x.relu() * 2, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    x = torch.randn(4, 2)

    def fail(_: int) -> None:
        step.clear()
        faults.set(point, 1, error=MemoryError)
        step(x)
        assert step.last_decision.reason is Reason.OUT_OF_MEMORY
        assert step.entries == []

    leaves_nothing(step, fail, times)
    assert step._graph_cache.pool.nbytes == 0


def test_failed_replays_leave_nothing(faults: Faults) -> None:
    """A replay that fails and is compared and serves again, many times."""
    step = graphed(lambda x: x.relu() * 2, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)

    def fail(number: int) -> None:
        faults.set("replay", 1)
        step(torch.full((4, 2), float(number)))
        assert step.last_decision.reason is Reason.VERIFIED_NOW
        step(torch.ones(4, 2))
        assert step.last_decision.reason is Reason.EXACT

    for number in range(3):
        step(torch.full((4, 2), float(number)))
    leaves_nothing(step, fail, 100)


def test_a_failed_call_holds_no_batch(faults: Faults) -> None:
    """What is kept of a failure is text: the batch and the traceback go with the call, without the collector's help."""
    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=(2, 4), options=AT_ONCE)
    step(torch.randn(2, 2))  # torch imports more on its first use, and keeps the frames that led to it
    with collector_off():
        faults.set("end", 1)
        x = torch.randn(4, 2)
        storage = StorageWeakRef(x.untyped_storage())
        step(x)
        assert step.last_decision.reason is Reason.CAPTURE_FAILED
        del x
        assert storage.expired()
