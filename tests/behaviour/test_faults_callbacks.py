"""Faults of the user's own code: a pad function, a break, a graph that they captured, the model itself."""

import signal
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdispatch import Reason
from graphdispatch.engines import CudagraphDispatcher, DispatchKey
from graphdispatch.errors import ReplayError
from graphdispatch.testing import MockCUDAGraph

from ..helpers import Behind, Spy, check_calls, check_rows, make, reason, scripted
from .inject import nothing_left_behind

KEY = DispatchKey(3, 3)


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


def test_a_pad_function_may_refuse_numbers() -> None:
    """A proof tries numbers that no batch held; that the function raises for them says nothing about rows."""

    def pad(padding: Tensor, real: Tensor) -> None:
        if real.abs().max() > 5:
            raise TroubleError
        padding.copy_(real[-1:].expand_as(padding))

    step = make(pad={"x": pad}, sizes=(4,))
    check_calls(step, *torch.rand(6, 3, 2).unbind())
    assert step.last_decision.reason is Reason.PADDED


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


def test_a_foreign_graph_that_stops_half_way_is_an_error() -> None:
    """What it wrote before cannot be known, so that the step is not run again; the graph is dropped."""
    written = []

    def stop() -> None:
        written.append("half")
        raise TroubleError("half-way")

    dispatcher = CudagraphDispatcher(lambda: written.append("eager"))
    dispatcher.register_graph(KEY, scripted(on_replay=stop))
    with pytest.raises(ReplayError, match=r"TroubleError: half-way; what it wrote.*not run again") as caught:
        dispatcher.dispatch(KEY)
    assert caught.value.had_effects
    assert (written, dispatcher.num_graphs) == (["half"], 0)


def test_a_foreign_graph_that_refuses_says_so_itself() -> None:
    """A ``ReplayError`` of its own tells whether anything has happened."""
    dispatcher = CudagraphDispatcher(lambda: "eager")
    dispatcher.register_graph(KEY, MockCUDAGraph())
    entry = dispatcher.get_entry(KEY)
    with pytest.raises(ReplayError, match="without a capture") as caught:
        entry.replay()
    assert not caught.value.had_effects


def test_a_packet_of_operators_is_no_state() -> None:
    """That ``torch.ops`` remembers an overload on its first use is no rebinding by the model."""
    packet = torch.ops.aten.rsub
    vars(packet).pop("Tensor", None)
    assert reason(make(lambda x: packet.Tensor(x, x)), torch.randn(4, 2)) is Reason.CAPTURED_NOW
