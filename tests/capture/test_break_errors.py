"""Breaks that raise, or that do not keep to what they did at the capture: eager's answer or an error, never another."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdispatch import CUDAGraphOptions, Graphed, Reason, eager_break, graphed
from graphdispatch.backends import get_backend
from graphdispatch.call.marks import ACTIVE
from graphdispatch.engines import BatchDescriptor, CUDAGraphWrapper
from graphdispatch.errors import ReplayError

from ..helpers import AT_ONCE
from ..pieces import ONE, PIECEWISE, agrees, host_scale, pieces
from ..spy import Spy


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    """Graphs are for inference."""
    with torch.no_grad():
        yield


# What a break must not do.


def switched(before: Callable[[Tensor], Any], after: Callable[[Tensor], Any]) -> tuple[Graphed[..., Any], Tensor]:
    """A served callable whose break does ``before`` until its argument has a negative sum, and a batch with one."""
    flip = eager_break(lambda x: before(x) if float(x.sum()) > 0 else after(x))

    def model(x: Tensor) -> Tensor:
        got = flip(x * 1)
        return x + (got[0] if isinstance(got, (tuple, list)) else got).sum()  # type: ignore[no-any-return]

    served = graphed(model, dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE", options=AT_ONCE)
    for scale in (1.0, 2.0):
        served(x=torch.full((4, 3), scale))
    agreed = torch.full((4, 3), 3.0)
    assert torch.equal(served(x=agreed), model(agreed))
    assert served.last_decision is not None
    assert served.last_decision.reason is Reason.EXACT
    return served, torch.full((4, 3), -1.0)


CHANGES = {
    "shape": (lambda x: x * 2, lambda x: x[:2] * 2, "a break must keep its shapes"),
    "dtype": (lambda x: x * 2, lambda x: (x * 2).double(), "a break must keep its shapes"),
    "structure": (lambda x: (x * 2,), lambda x: [x * 2], "another structure"),
    "value": (lambda x: (x * 2, 1), lambda x: (x * 2, 2), r"returned 2 where it returned 1"),
    "tensor to value": (lambda x: (x * 2, x + 1), lambda x: (x * 2, 2), "share memory otherwise"),
    "fresh to argument": (lambda x: x * 2, lambda x: x, "return a copy of it"),
    "argument to fresh": (lambda x: x, lambda x: x * 2, "return a copy of it"),
    "another view": (lambda x: x[:2], lambda x: x[2:], "return a copy of it"),
    "sharing": (lambda x: (x * 2, x * 3), lambda x: ((y := x * 2), y), "share memory otherwise"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_result_is_answered_eagerly(change: str) -> None:
    """Where the call has changed nothing yet, it gets eager's answer, and the graph that failed is given up."""
    before, after, message = CHANGES[change]
    served, x = switched(before, after)
    assert torch.equal(served(x=x), served.unwrap()(x=x))
    assert served.last_decision is not None
    assert served.last_decision.reason is Reason.REPLAY_FAILED
    assert message.replace("\\", "") in served.last_decision.detail
    assert served.entries == []


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_result_behind_an_effect_is_an_error(change: str) -> None:
    """Where earlier parts have written to memory that the caller sees, a second run would write twice: an error."""
    before, after, message = CHANGES[change]
    steps = torch.zeros(1)
    flip = eager_break(lambda x: before(x) if float(x.sum()) > 0 else after(x))

    def model(x: Tensor) -> Tensor:
        steps.add_(1)
        flip(x * 1)
        return x + steps

    served = graphed(model, dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE", options=AT_ONCE)
    for scale in (1.0, 2.0, 3.0):
        served(x=torch.full((4, 3), scale))
    with pytest.raises(ReplayError, match=message) as caught:
        served(x=-torch.ones(4, 3))
    assert caught.value.had_effects
    assert float(steps) == 4.0
    # The next call compares the graph with eager once more; it fits again, and serves.
    for count, reason in ((5.0, Reason.VERIFIED_NOW), (6.0, Reason.EXACT)):
        assert torch.equal(served(x=torch.ones(4, 3)), torch.ones(4, 3) + count)
        assert served.last_decision is not None
        assert served.last_decision.reason is reason


def test_a_changing_row_of_a_cache_is_not_copied_over_another() -> None:
    """A break that returns now one and now another row of a cache is refused, and the cache stays as it was."""
    cache = torch.arange(12.0).view(4, 3)
    row = eager_break(lambda x: cache[int(x[0, 0])])
    served = graphed(lambda x: row(x) + x * 0, dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE", options=AT_ONCE)
    for index in (0, 1, 2, 1, 3):
        x = torch.full((4, 3), float(index))
        assert torch.equal(served(x=x), cache[index].expand(4, 3))
    assert torch.equal(cache, torch.arange(12.0).view(4, 3))


def test_what_a_break_keeps_for_later_parts_is_refused() -> None:
    """A tensor that a break makes and does not return, and that a later part reads, would be stale: no graph."""
    mask = Spy()  # else the write itself is refused

    @eager_break
    def fill(x: Tensor) -> None:
        mask[:] = [x * 2]

    def model(x: Tensor) -> Tensor:
        fill(x + 1)
        return x + mask[0]

    served = graphed(model, dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE", options=AT_ONCE)
    x = torch.randn(4, 3)
    assert torch.equal(served(x=x), x + (x + 1) * 2)
    assert served.last_decision is not None
    assert served.last_decision.reason is Reason.CAPTURE_UNSAFE
    assert "return it from the break" in served.last_decision.detail


def test_an_unsafe_operator_between_breaks_names_its_line() -> None:
    """Marks do not allow the parts around them more than a FULL capture does."""
    served = graphed(
        lambda x: host_scale(x) + x.sum().item(), dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE", options=AT_ONCE
    )
    served(x=torch.randn(4, 3))
    assert served.last_decision is not None
    assert served.last_decision.reason is Reason.CAPTURE_UNSAFE
    assert "test_break_errors.py" in served.last_decision.detail


# Exceptions.


class Fuse:
    """A break that raises when it is told to."""

    def __init__(self) -> None:
        self.blown = False
        self.only_in_capture = False

    @eager_break
    def __call__(self, x: Tensor) -> Tensor:
        """Twice the argument."""
        if self.blown and (ACTIVE.get() is not None or not self.only_in_capture):
            raise ValueError("the fuse is blown")
        return x * 2


def test_an_exception_in_a_break_at_replay_passes_through() -> None:
    """The caller gets the break's own exception, nothing stays open, and the next call is served."""
    fuse = Fuse()
    served = pieces(lambda x: fuse(x + 1) + 1)
    fuse.blown = True
    with pytest.raises(ValueError, match="the fuse is blown"):
        served(x=torch.randn(4, 3))
    assert not get_backend("cpu").is_capturing()
    fuse.blown = False
    agrees(served)


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("raises_in", ["break", "graph", "graph with state"])
def test_what_a_call_wrote_to_its_argument_before_it_raised_stays(raises_in: str, rows: int) -> None:
    """As eagerly: the argument was written before the error, so the caller finds it written, padded or not."""
    fuse, table, steps = Fuse(), torch.randn(5, 3), torch.zeros(1)

    def with_break(x: Tensor, ids: Tensor) -> Tensor:
        return fuse(x.mul_(0.5) * 1) + table[ids]

    def with_state(x: Tensor, ids: Tensor) -> Tensor:
        steps.add_(1)
        return x.mul_(0.5) * 1 + table[ids]

    model, mode = (with_state, "FULL") if raises_in == "graph with state" else (with_break, "PIECEWISE")
    served = graphed(model, dynamic={"x": 0, "ids": 0}, sizes=(4,), mode=mode, options=AT_ONCE)
    for number in range(3):
        served(torch.randn(rows, 3), torch.full((rows,), number))
    assert served.last_decision is not None
    assert served.last_decision.reason in (Reason.EXACT, Reason.PADDED)
    x, ids = torch.randn(rows, 3), torch.full((rows,), 1 if raises_in == "break" else 5)
    halved, fuse.blown = x * 0.5, raises_in == "break"
    with pytest.raises(ValueError if raises_in == "break" else IndexError):
        served(x, ids)
    assert torch.equal(x, halved)
    fuse.blown = False
    x, ids = torch.randn(rows, 3), torch.arange(rows)
    assert torch.equal(served(x.clone(), ids), model(x, ids))


def test_rows_that_cannot_be_copied_are_no_error_of_the_call() -> None:
    """A pad function that raises at a hit: nothing ran yet, so the call is answered eagerly, and its state written
    once."""
    steps, is_broken = torch.zeros(1), Spy()

    def pad(padding: Tensor, real: Tensor) -> None:
        if is_broken:
            raise ValueError("no padding today")
        padding.zero_()

    def model(x: Tensor) -> Tensor:
        steps.add_(1)
        return x * 2

    served = graphed(model, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE, pad={"x": pad})
    for _ in range(3):
        served(torch.randn(2, 3))
    assert served.last_decision is not None
    assert served.last_decision.reason is Reason.PADDED
    is_broken.append(1)
    x = torch.randn(2, 3)
    assert torch.equal(served(x), x * 2)
    assert float(steps) == 4.0


def test_an_exception_in_a_break_at_capture_leaves_nothing_open() -> None:
    """The call gets eager's answer with a reason, no capture is open or active, and another one succeeds."""
    fuse = Fuse()
    fuse.blown = fuse.only_in_capture = True
    wrapper = CUDAGraphWrapper(lambda x: fuse(x + 1) + 1, PIECEWISE, CUDAGraphOptions(max_failures=9))
    x = torch.randn(4, 3)
    assert torch.equal(wrapper(x, batch_descriptor=ONE, cudagraph_runtime_mode=PIECEWISE), (x + 1) * 2 + 1)
    assert wrapper.get_stats().reasons[Reason.CAPTURE_FAILED] == 1
    assert ACTIVE.get() is None
    assert not get_backend("cpu").is_capturing()
    fuse.blown = False
    other = BatchDescriptor(2)
    wrapper(x, batch_descriptor=other, cudagraph_runtime_mode=PIECEWISE)
    assert wrapper.get_cached_descriptors() == [other]


def test_a_capture_after_a_failed_one_still_refuses_another() -> None:
    """A break that failed does not make the backend lose count of the captures that are open."""
    fuse = Fuse()
    fuse.blown = fuse.only_in_capture = True
    served = graphed(lambda x: fuse(x + 1), dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE", options=AT_ONCE)
    served(x=torch.randn(4, 3))
    backend = get_backend("cpu")
    with backend.begin_capture(backend.make_pool()):
        assert backend.is_capturing()
    assert not backend.is_capturing()


def test_a_model_that_catches_a_break_s_exception_gets_no_graph() -> None:
    """What the model does instead was not recorded, so that nothing of it may be served."""
    fuse = Fuse()
    fuse.blown = fuse.only_in_capture = True

    def model(x: Tensor) -> Tensor:
        try:
            return fuse(x + 1) + 1
        except ValueError:
            return (x + 1) * 2 + 1

    served = graphed(lambda x: model(x), dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE", options=AT_ONCE)
    x = torch.randn(4, 3)
    assert torch.equal(served(x=x), (x + 1) * 2 + 1)
    assert served.last_decision is not None
    assert served.last_decision.reason is Reason.CAPTURE_UNSAFE
    assert "raised and the callable went on" in served.last_decision.detail
    assert not get_backend("cpu").is_capturing()


def test_a_replay_that_fails_on_the_slow_path_gives_eagers_answer() -> None:
    """A pending entry whose break changes its result is not served; nothing was written, so the call runs eagerly."""
    rows = [3]

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        return x[:1].expand(rows[0], 2) * 2

    step = graphed(lambda x: part(x + 1).sum(0), dynamic={}, mode="PIECEWISE", options=AT_ONCE)
    x = torch.randn(3, 2)
    with torch.no_grad():
        step(x)
        assert torch.equal(step(x), step.unwrap()(x))
        rows[0] = 5
        assert torch.equal(step(x), step.unwrap()(x))
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.REPLAY_FAILED
