"""A fault at each operator of a capture, a verification and a replay: eager's answer, or the caller's own exception."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdispatch import Graphed
from graphdispatch.errors import ReplayError

from .inject import FailAt, Model, batch, nothing_left_behind

ERRORS = {"error": ArithmeticError, "memory": torch.OutOfMemoryError, "interrupt": KeyboardInterrupt}
# Every second operator with one kind of error; the others at every eleventh, and where a break parts the graph, every
# fifth of these.
STRIDES = {"error": 2, "memory": 11, "interrupt": 11}
CALLS = {"capture": 0, "verification": 1, "replay": 2}


ENDINGS = {
    "capture": {"ArithmeticError", "saving", "noting", "warming", "capturing", "comparing", "captured_now"},
    "verification": {"ArithmeticError", "saving", "noting", "warming", "comparing", "verified_now"},
    "replay": {"ArithmeticError"},
}
"""What a sweep must have met: the call itself, each stage after it, and faults that cost nothing."""


def run(call: Callable[..., Any], number: int, mode: Any = None) -> tuple[Any, torch.Tensor]:
    """One call from a known state of the generator; its answer (or what it raised), and the state it leaves."""
    arguments = batch(number)
    torch.default_generator.manual_seed(number)
    try:
        with mode or nullcontext():
            answer = call(*arguments)
    except BaseException as error:
        answer = error
    return answer, torch.get_rng_state()


def check(model: Model, eager: Model, got: Any, rng: Tensor, want: Any, want_rng: Tensor) -> None:
    """Answer, state and generator are eager's; slot 7 is padding's."""
    torch.testing.assert_close(got, want)
    assert torch.equal(rng, want_rng)
    for mine, its in zip(model.state, eager.state, strict=True):
        torch.testing.assert_close(mine[:7], its[:7])


def compare(model: Model, step: Graphed[..., Any], number: int) -> None:
    """A call without a fault."""
    twin = model.copy()
    want = run(twin.step, number)
    check(model, twin, *run(step, number), *want)


def fault(kind: str, error: BaseException, index: int, number: int) -> tuple[int, str]:
    """Fail at operator ``index`` of call ``number``; the operators seen in it, and where it ended."""
    model = Model(kind)
    # A batch has three rows; padding goes to slot 7.
    step = model.serve(sizes=(4,), pad={"slots": 7}, padding_writes="allow")
    for earlier in range(number):
        compare(model, step, earlier)
    before, after = model.copy(), model.copy()
    want, want_rng = run(after.step, number)
    model.runs[0] = 0
    mode = FailAt(index, error)
    with nothing_left_behind(step):
        got, rng = run(step, number, mode)
    ended = step.last_decision.detail.rpartition("(while ")[2] or step.last_decision.reason.value
    if isinstance(got, BaseException):
        ended = type(got).__name__
        assert got is error or (isinstance(got, ReplayError) and got.had_effects and got.__cause__ is error)
        if model.runs[0] > 1:  # an interrupt after the eager run: its effects are there once, and no others
            assert isinstance(got, KeyboardInterrupt)
            assert model.same_state(after)
        else:
            assert Model.is_between(_real(model), _real(before), _real(after))
    else:
        check(model, after, got, rng, want, want_rng)
    for later in range(number + 1, number + 4):
        compare(model, step, later)
    return mode.seen, ended


def _real(model: Model) -> Model:
    """Without the row that padding writes."""
    model = model.copy()
    if model.state:
        model.state[0] = model.state[0][:7]
    return model


def sweep(kind: str, error: type[BaseException], call: str, stride: int) -> Counter[str]:
    """The operators of one call in turn; how the calls ended, by the first word of it."""
    ended: Counter[str] = Counter()
    for index in count(0, stride):
        seen, end = fault(kind, error("injected"), index, CALLS[call])
        if seen <= index:
            return ended
        ended[end.split()[0].rstrip(":")] += 1
    raise AssertionError


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", ["pure", "stateful", "broken"])
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_at_each_operator(kind: str, error: str, call: str) -> None:
    """Whichever operator fails, nothing is left behind, and the next calls are right."""
    stride = STRIDES[error] * (5 if kind == "broken" else 1)
    ended = sweep(kind, ERRORS[error], call, stride)
    assert set(ended) >= ENDINGS[call] if error == "error" and kind == "stateful" else ended
