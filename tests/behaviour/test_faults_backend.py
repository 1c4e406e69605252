"""Faults of the device: when a capture begins, ends or gets no memory, at replays, for good; and what they leave."""

import gc
import threading

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphdispatch import CUDAGraphOptions, Reason, graphed
from graphdispatch.backends.cpu.backend import CPUBackend
from graphdispatch.engines import CUDAGraphManager
from graphdispatch.errors import DeviceLostError, FallbackError
from graphdispatch.runtime.outputs import Outputs

from ..helpers import AT_ONCE, check_rows, collector_off, make
from .inject import Faults, nothing_left_behind


def test_a_quarantine_outlives_the_weights(faults: Faults) -> None:
    """Other weights alone get no new try, since the state may change with each call; ``invalidate`` gives one."""
    layer = torch.nn.Linear(3, 3).eval()
    step = make(layer, dynamic={"input": 0}, sizes=(3,))
    faults.set("end", 1)
    for _ in range(2):
        assert check_rows(step, 3) == [Reason.CAPTURE_FAILED]
        layer.weight = torch.nn.Parameter(torch.randn(3, 3))
    step.invalidate("other weights")
    assert check_rows(step, 3) == [Reason.CAPTURED_NOW]


def test_strict_raises_with_the_cause(faults: Faults) -> None:
    """The reason and the original exception are in the error."""
    step = make(sizes=(3,), strict=True)
    faults.set("end", 1)
    with nothing_left_behind(step), pytest.raises(FallbackError, match="ArithmeticError") as caught:
        step(torch.randn(3, 3))
    assert caught.value.reason is Reason.CAPTURE_FAILED
    assert isinstance(caught.value.__cause__.__cause__, ArithmeticError)


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
    step = make(sizes=(3,))
    check_rows(step, 3, 3, 3)
    faults.set("replay", 1, 2)
    assert check_rows(step, 3, 3) == [Reason.REPLAY_FAILED] * 2
    assert step.entries == []


def test_a_manager_runs_a_call_without_result_once(faults: Faults) -> None:
    """A capture that fails after the step has run does not run it again, whatever it returned."""
    manager = CUDAGraphManager(CUDAGraphManager().config.replace(backend="cpu", capture_sizes=(4,), options=AT_ONCE))
    state = torch.zeros(4, 2)
    faults.set("end", 1)
    manager.execute_or_capture(4, 1, lambda x: (state.add_(x), None)[1], {"x": torch.ones(4, 2)})
    assert torch.equal(state, torch.ones(4, 2))


def living() -> int:
    """Tensors and storages that Python can reach, once all garbage is collected."""
    gc.collect()
    # By type: some of torch's objects answer isinstance with a warning.
    return sum(issubclass(type(thing), (torch.Tensor, torch.UntypedStorage)) for thing in gc.get_objects())


@pytest.mark.parametrize(("point", "times"), [("end", 200), ("arena", 50), ("replay", 50)])
def test_failed_captures_leave_nothing(faults: Faults, point: str, times: int) -> None:
    """After so many failures there are as many tensors, tracked bytes and threads as after the first ten."""
    step = graphed(lambda x: x.relu() * 2, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    x, held = torch.randn(4, 2), list[tuple[int, int, int]]()
    for count in (10, times):
        for _ in range(count):
            step.clear()
            faults.set(point, 1, error=MemoryError)
            step(x)
            assert (step.last_decision.reason, step.entries) == (Reason.OUT_OF_MEMORY, [])
        held.append((living(), threading.active_count(), step.memory_bytes))
    assert held[0] == held[1]
    assert step._graph_cache.pool.nbytes == 0


def test_prewarm_goes_on_after_a_size_that_fails(faults: Faults) -> None:
    """The other sizes are captured; the collector is not left frozen."""
    step = make(sizes=(3, 5))
    faults.set("end", 1)
    with nothing_left_behind(step):
        step.prewarm(torch.randn(3, 3))
    assert [entry.size for entry in step.entries] == [3]
    assert check_rows(step, 5) == [Reason.CAPTURE_FAILED]


def test_a_recording_that_nobody_watches_may_fail(faults: Faults) -> None:
    """As that of a further size after a warm-up of its own: the reason is the error's."""
    step = make(sizes=(3, 5), options=CUDAGraphOptions(warmup_iterations=2))
    faults.set("end", 2)
    step.prewarm(torch.randn(3, 3))
    assert check_rows(step, 5, 3) == [Reason.EXACT, Reason.CAPTURE_FAILED]
    assert step.last_decision.detail.startswith("ArithmeticError: ")


class LostError(Exception):
    """Says that the device is gone."""


@pytest.mark.parametrize("point", ["begin", "end", "replay"])
def test_a_device_that_is_lost_is_an_error(faults: Faults, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be served any more, not even by eager."""
    monkeypatch.setattr(CPUBackend, "is_lost", lambda _, error: isinstance(error, LostError))
    step = make(sizes=(3,))
    faults.set(point, 1, error=LostError)
    with pytest.raises(DeviceLostError, match="restart the process"):
        step(torch.randn(3, 3))


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
