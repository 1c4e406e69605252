"""One capture: what it leaves, what it refuses at once, and the garbage around it."""

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason, eager_break, graphed
from graphdispatch.backends import get_backend
from graphdispatch.call.signature import ForeignSignature
from graphdispatch.call.spec import CallSpec, FlatCall
from graphdispatch.capture.piecewise import break_figures
from graphdispatch.capture.pipeline import capture_entry, verify_entry
from graphdispatch.capture.request import CaptureRequest
from graphdispatch.engines import AdaptiveCUDAGraphWrapper, BatchDescriptor, EntryState
from graphdispatch.memory.inputs import StaticInputs

from ..helpers import AT_ONCE, Spy


def request(fn: Callable[[], Any], **changes: Any) -> CaptureRequest:
    """A request for a callable without arguments."""

    backend = get_backend("cpu")
    return CaptureRequest(
        call=FlatCall(fn, CallSpec(fn, 0, ()), ()),
        values=[],
        rows=1,
        size=1,
        descriptor=BatchDescriptor(1),
        mode=CUDAGraphMode.FULL,
        key="step",
        inputs=StaticInputs((), 1),
        signature=ForeignSignature(None),
        pool=backend.make_pool(),
        backend=backend,
        options=CUDAGraphOptions(),
        **changes,
    )


def test_breaks_are_timed_by_the_clock_of_the_request() -> None:
    """Each reading is a second later than the last; a replay reads at its ends and around each of its two breaks."""
    weight, seconds = torch.ones(3), itertools.count()
    double = eager_break(lambda x: x * 2)
    step = request(lambda: double(double(weight) + 1), clock=lambda: float(next(seconds)))
    step.mode = CUDAGraphMode.PIECEWISE
    entry = capture_entry(step).entry
    assert entry is not None
    (figures,) = break_figures([entry])
    assert (figures.runs, figures.time_ms, figures.share) == (2, 2000.0, 0.4)


def test_one_execution_s_effects_are_left() -> None:
    """A capture and a verification leave one each; without ``keep_effects`` they leave none."""
    count = torch.zeros(1)
    step = request(lambda: count.add_(1) * 2)
    captured = capture_entry(step)
    assert captured.reason is Reason.CAPTURED_NOW
    assert (count.item(), captured.answer.item()) == (1, 2)
    assert captured.entry is not None
    assert captured.entry.state is EntryState.CAPTURED
    verified = verify_entry(step, captured.entry)
    assert (verified.reason, captured.entry.state) == (Reason.VERIFIED_NOW, EntryState.VERIFIED)
    assert (count.item(), verified.answer.item()) == (2, 4)
    step.keep_effects = False
    assert verify_entry(step, captured.entry).answer.item() == 6
    assert count.item() == 2


def test_a_failed_capture_has_the_answer_the_reason_and_the_error() -> None:
    """Whoever takes the answer lets go of the error, and with it of the frames in its traceback."""
    weight = torch.ones(1)
    result = capture_entry(request(lambda: weight * weight.item()))
    assert (result.entry, result.reason) == (None, Reason.CAPTURE_UNSAFE)
    assert "(while capturing 1 rows)" in result.detail
    assert result.error is not None
    assert torch.equal(result.take_answer(), weight)
    assert result.error is None


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_cache = torch.zeros(8, 3)


def _write_first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y * 2


def _write_both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y.mul_(2)
    return x + 1


def _write_state(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    _cache[4:].add_(1)
    return x + y


def _one_tensor() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 3)
    return x, x


def _two_halves() -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randn(8, 3)
    return both[:4], both[4:]


def _part_of_state() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3), _cache[:4]


# In the last three the written elements are nobody else's, so that every value of a replay agrees with eager.
ALIASES = {
    "one tensor twice": (_write_first, _one_tensor),
    "two halves, one written": (_write_first, _two_halves),
    "two halves, both written": (_write_both, _two_halves),
    "part of written state": (_write_state, _part_of_state),
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("fn", "arguments"), ALIASES.values(), ids=ALIASES.keys())
def test_a_capture_from_arguments_that_share_written_memory_is_refused(
    fn: Step, arguments: Callable[[], tuple[Any, Any]], verify: bool
) -> None:
    """A graph would write to copies, which share no memory; the call runs eagerly, once, and says why."""
    step = graphed(fn, dynamic={"x": 0, "y": 0}, sizes=(4,), options=CUDAGraphOptions(verify=verify, capture_after=1))
    x, y = arguments()
    states = [x, y, _cache]
    before = [state.clone() for state in states]
    result = step(x, y)
    after = [state.clone() for state in states]
    assert step.last_decision.reason is Reason.ALIASED_ARGUMENTS
    assert "share with each other or with its own state" in step.last_decision.detail
    assert list(step.entries) == []
    for state, value in zip(states, before, strict=True):
        state.copy_(value)
    assert torch.equal(result, fn(x, y))
    assert all(torch.equal(state, value) for state, value in zip(states, after, strict=True))


def test_arguments_that_share_memory_which_is_only_read_are_captured() -> None:
    """Copies of memory that nobody writes are as good as the memory."""
    step = graphed(lambda x, y: x + y, dynamic={"x": 0, "y": 0}, sizes=(4,), options=AT_ONCE)
    x, y = _one_tensor()
    assert torch.equal(step(x, y), x * 2)
    assert step.last_decision.reason is Reason.CAPTURED_NOW


Probe = Callable[[], bool]


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def garbage() -> Probe:
    """Makes a cycle that nothing refers to; returns a function that tells whether it is still there."""
    cycle = weakref.ref(Cycle())
    return lambda: cycle() is not None


def _prewarm_graphed(fn: Callable[..., Any], options: CUDAGraphOptions) -> None:
    step = graphed(fn, dynamic={"x": 0}, sizes=(2, 4), options=options)
    step.prewarm(torch.randn(2, 3))


def _prewarm_wrapper(fn: Callable[..., Any], options: CUDAGraphOptions) -> None:
    wrapper = AdaptiveCUDAGraphWrapper(fn, options=options)
    wrapper.prewarm([BatchDescriptor(4), BatchDescriptor(2)], lambda descriptor: torch.randn(descriptor.num_tokens, 3))


@pytest.mark.parametrize("gc_disable", [True, False])
@pytest.mark.parametrize("prewarm", [_prewarm_graphed, _prewarm_wrapper])
def test_prewarming_collects_after_the_last_capture(
    prewarm: Callable[[Callable[..., Any], CUDAGraphOptions], None], gc_disable: bool
) -> None:
    """None is collected until the last capture is done."""
    is_kept, within = Spy(), Spy()

    def step(x: torch.Tensor) -> torch.Tensor:
        within.append(garbage())
        is_kept.append(not gc.isenabled() and all(is_there() for is_there in within))
        return x * 2

    if not gc_disable:
        gc.disable()  # Python itself collects nothing meanwhile
    try:
        prewarm(step, CUDAGraphOptions(gc_disable=gc_disable))
        assert len(within) > 2
        assert all(is_kept)
        assert any(is_there() for is_there in within) is not gc_disable
    finally:
        gc.enable()
