"""The capturer by itself: one request in, eager's answer and an entry or a reason out."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason, eager_break
from graphdispatch.backends import get_backend
from graphdispatch.call.signature import ForeignSignature
from graphdispatch.call.spec import CallSpec, FlatCall
from graphdispatch.capture.capturer import capture_entry, verify_entry, warm_up
from graphdispatch.capture.piecewise import break_figures
from graphdispatch.capture.request import CaptureRequest
from graphdispatch.engines import BatchDescriptor, EntryState
from graphdispatch.memory.inputs import StaticInputs


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


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


def test_the_capture_time_is_taken_from_the_clock_of_the_request() -> None:
    """In milliseconds, from the first warm-up to the finished graph; the process's clock is not read."""
    times = iter([10.0, 10.25])
    weight = torch.ones(3)
    result = capture_entry(request(lambda: weight * 2, clock=lambda: next(times)))
    assert result.entry is not None
    assert result.entry.capture_time_ms == 250.0
    assert list(times) == []


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
    """A warm-up leaves none, a capture and a verification one each; without ``keep_effects`` they leave none."""
    count = torch.zeros(1)
    step = request(lambda: count.add_(1) * 2)
    warm_up(step)
    assert count.item() == 0
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
