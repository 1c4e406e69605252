"""Faults of the device, of the user's own code (a pad function, a handler of signals, the model itself), and among
threads and the collector; and what they leave."""

import gc
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphdispatch import CUDAGraphOptions, Reason, graphed
from graphdispatch.backends import base
from graphdispatch.backends.code_events import CodeListener
from graphdispatch.backends.cpu.backend import CPUBackend
from graphdispatch.backends.cpu.recorder import Recorder
from graphdispatch.engines import CUDAGraphManager
from graphdispatch.errors import FallbackError
from graphdispatch.runtime.outputs import Outputs
from graphdispatch.runtime.windows import paused_collector

from ..helpers import AT_ONCE, Behind, Spy, batch, check_rows, collector_off, make, reason
from .forks import in_child
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


def test_a_recording_that_nobody_watches_may_fail(faults: Faults) -> None:
    """As that of a further size after a warm-up of its own: the reason is the error's."""
    step = make(sizes=(3, 5), options=CUDAGraphOptions(warmup_iterations=2))
    faults.set("end", 2)
    step.prewarm(torch.randn(3, 3))
    assert check_rows(step, 5, 3) == [Reason.EXACT, Reason.CAPTURE_FAILED]
    assert step.last_decision.detail.startswith("ArithmeticError: ")


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


def test_stale_graphs_serve_nobody_while_they_are_released() -> None:
    """Between the release of one graph whose weights moved and that of the next, a call gets none of them."""
    layer = torch.nn.Linear(3, 3).eval()
    step = graphed(layer, dynamic={"input": 0}, sizes=(2, 4), options=AT_ONCE)
    for number in range(3):
        for rows in (2, 4):
            step(torch.full((rows, 3), float(number)))
    seen: list[int] = []
    record = step.stats.record_eviction

    def call_in_between(*eviction: Any) -> None:
        record(*eviction)
        check_rows(step, 2, 4)
        seen.append(1)

    step.stats.record_eviction = call_in_between
    layer.weight = torch.nn.Parameter(torch.randn(3, 3))
    step(torch.randn(2, 3))
    assert seen


def test_pauses_of_the_collector_are_of_threads() -> None:
    """It runs again when the last of them is done, and not when the first is. In a child it runs, whoever paused it:
    the threads that would end the pauses are gone."""
    paused, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        with paused_collector():
            paused.set()
            go_on.wait()

    def check() -> None:
        assert gc.isenabled()
        with paused_collector():
            assert not gc.isenabled()
        assert gc.isenabled()

    with ThreadPoolExecutor(1) as thread:
        pausing = thread.submit(pause)
        try:
            assert paused.wait(60)
            in_child(check)
            with paused_collector():
                in_child(check)
            assert not gc.isenabled()
        finally:
            go_on.set()
        pausing.result()
    assert gc.isenabled()


def test_captures_leave_the_collector_as_it_was() -> None:
    """Also one that fails: it runs again, and what the process has frozen stays frozen."""
    gc.freeze()
    try:
        gc.collect()  # some versions of Python freeze objects of their own in each collection
        before = gc.get_freeze_count()
        with suppress(KeyboardInterrupt), paused_collector():
            assert not gc.isenabled()
            raise KeyboardInterrupt
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before // 2  # some objects end meanwhile; to unfreeze would leave none
    finally:
        gc.unfreeze()


class TroubleError(Exception):
    """The user's own."""


class TimeLimit:
    """A handler of a signal that is an object."""

    def __call__(self, number: int, frame: Any) -> None:
        raise TroubleError


def out_of_time(number: int, frame: Any) -> None:
    """Another one, that is a function."""
    raise TroubleError


@pytest.mark.parametrize("handler", [out_of_time, TimeLimit(), partial(TimeLimit())], ids=["def", "object", "partial"])
@pytest.mark.parametrize("at", range(4))
def test_a_time_limit_passes_through_a_capture(handler: Any, at: int) -> None:
    """It is the caller's wherever in a capture, a comparison or a replay it comes. The call has counted once, and the
    next ones are captured and served."""
    count = torch.zeros(())
    loads = iter(range(100))

    def pad(padding: Tensor, real: Tensor) -> None:
        padding.zero_()
        if next(loads) == at:
            signal.raise_signal(signal.SIGUSR1)

    step = make(lambda x: (count.add_(1), x * 2)[1], pad={"x": pad}, sizes=[4])
    before = signal.signal(signal.SIGUSR1, handler)
    raised = 0
    try:
        for _ in range(9):
            x = torch.randn(3, 3)
            try:
                assert torch.equal(step(x), x * 2)
            except TroubleError:
                raised += 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (raised, count.item()) == (1, 9)
    assert step.stats.hits


@pytest.mark.parametrize("at", [0, 1, 4], ids=["capture", "verification", "hit"])
def test_a_pad_function_that_raises(at: int) -> None:
    """Eager needs no padding, so that the call has its answer; what the function left half done is padded anew."""
    errors = Spy()

    def pad(padding: Tensor, real: Tensor) -> None:
        padding.fill_(1e30)
        if errors:
            raise errors.pop()
        padding.zero_()

    step = make(pad={"x": pad}, sizes=(4,))
    for number in range(50):  # a size that failed is tried again
        x = torch.randn(3, 2)
        errors[:] = [TroubleError()] * (number == at)
        with nothing_left_behind(step):
            assert torch.equal(step(x), x * 2)
    assert step.stats.reasons[Reason.CAPTURE_FAILED] >= (at < 4)
    assert not step.entries[0].inputs.views(4)[0][3].any()


@pytest.mark.parametrize("is_prewarm", [False, True], ids=["call", "prewarm"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (CPUBackend, "make_pool"),
        (CPUBackend, "begin_capture"),
        (Recorder, "pause"),
        (CodeListener, "end"),
        (torch.utils._python_dispatch, "_pop_mode"),
        (base, "listen_as_before"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_interrupt_between_two_steps_leaves_nothing(
    owner: Any, name: str, is_prewarm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when one of the steps of a capture is done, and what that has begun or ended is not known yet."""
    work = getattr(owner, name)

    def stopped(*args: Any) -> Any:
        monkeypatch.undo()
        work(*args)
        raise KeyboardInterrupt

    step = make(sizes=(4,))
    with nothing_left_behind(step):
        monkeypatch.setattr(owner, name, stopped)
        with suppress(KeyboardInterrupt, RuntimeError):  # torch's own steps then fail
            (step.prewarm if is_prewarm else step)(batch(4))
    monkeypatch.undo()
    check_rows(step, 4, 4, 4)
    step.prewarm(batch(4))
    check_rows(step, 4)
    assert step.last_decision.reason is Reason.EXACT


def stop_behind_copies(operator: Any, result: Any) -> Any:
    """Raises behind the first copy, as an interrupt may."""
    if "copy_" in str(operator):
        raise KeyboardInterrupt
    return result


def test_rows_of_a_copy_that_failed_are_no_padding() -> None:
    """An interrupted batch leaves its rows in the buffer; the next, smaller one is padded over them."""
    step = make(lambda x: x + 1, sizes=(8,))
    check_rows(step, 3, 8, 3, 8, 2, width=2)
    with pytest.raises(KeyboardInterrupt), Behind(stop_behind_copies):
        step.entries[0].replay_call([torch.full((6, 2), 7.0)], 6)
    assert bool((step.entries[0].inputs.views(8)[0][:6] == 7).all())
    check_rows(step, 2, width=2)
    assert step.last_decision.reason is Reason.PADDED
    assert torch.equal(step.entries[0].inputs.views(8)[0][2:], torch.zeros(6, 2))


@pytest.mark.parametrize("number", [0, 1])
def test_a_model_that_raises_is_decided_and_counted(number: int) -> None:
    """While its graph is captured or compared: the exception is its own, and the decision says that the call raised."""
    errors = Spy()

    def model(x: Tensor) -> Tensor:
        if errors:
            raise errors[0]
        return x * 2

    step = make(model, sizes=(4,))
    check_rows(step, *[4] * number)
    errors.append(TroubleError("mine"))
    with nothing_left_behind(step), pytest.raises(TroubleError, match="mine"):
        step(torch.randn(4, 3))
    assert step.last_decision.reason is Reason.CALL_RAISED
    assert (step.stats.calls, step.stats.reasons[Reason.CALL_RAISED]) == (number + 1, 1)
    assert step.stats.capture_failures == 0


def test_a_packet_of_operators_is_no_state() -> None:
    """That ``torch.ops`` remembers an overload on its first use is no rebinding by the model."""
    packet = torch.ops.aten.rsub
    vars(packet).pop("Tensor", None)
    assert reason(make(lambda x: packet.Tensor(x, x)), torch.randn(4, 2)) is Reason.CAPTURED_NOW
