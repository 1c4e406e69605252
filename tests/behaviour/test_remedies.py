"""Every remedy that a reason prints is right to follow: without it calls run eagerly for that reason, with it a graph
serves them, with eager's answers."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphdispatch import Pad, Reason, eager_break, graphed

from ..helpers import assert_same, make, reason
from ..runtime.test_capture_share import settled
from .cases import Box

ROWS = torch.ones(3, 2)
BOTH = {"x": 0, "y": 0}


class Case(NamedTuple):
    """A served callable with the remedy or without, the arguments of its calls, and what is around these."""

    make: Callable[[bool], Any]
    args: tuple[Any, ...] = (ROWS,)
    around: Callable[[bool], AbstractContextManager[Any]] = lambda _: nullcontext()
    says: str = ""
    """What ``explain`` says without the remedy."""


def after(step: Any, *calls: str | Tensor) -> Any:
    """The step behind calls of these methods, and with these batches."""
    for call in calls:
        getattr(step, call)() if isinstance(call, str) else step(call)
    return step


class Mode(TorchDispatchMode):
    """Sees each operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Chooses(nn.Module):
    """Reads a number on the host in one method."""

    def __init__(self, number: Callable[[Tensor], Tensor], *, breaks: bool) -> None:
        super().__init__()
        self.number = number
        if breaks:
            eager_break(self, "choose")

    def choose(self, x: Tensor) -> Tensor:
        return x * 2 if float(self.number(x)) > -9 else x

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(x + 1) * 3


class Distributed(nn.Module):
    """Makes a distribution, which checks its arguments."""

    def output_distribution(self, x: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(x, x.exp())

    def forward(self, x: Tensor) -> Tensor:
        return self.output_distribution(x).stddev


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    """A script, through which nobody follows rows."""
    return x * 2


def count(held: Any, x: Tensor) -> Tensor:
    """Count in a tensor, or in Python."""
    if isinstance(held.count, Tensor):
        held.count.mul_(1)
    else:
        held.count += 1
    return x * 2


def prewarmed_in(mode: Any) -> Any:
    """A step that is frozen behind a prewarm in some mode."""
    step = make()
    with mode:
        step.prewarm(torch.randn(3, 2))
    return after(step, "freeze")


def written_slots(done: bool) -> Any:
    """A cache whose last row is scratch."""
    cache = torch.zeros(9, 2)
    given: dict[str, Any] = {"pad": {"y": Pad.value(8)}, "padding_writes": "allow"} if done else {}
    return make(lambda x, y: (cache.__setitem__(y, x), cache[y] * 2)[1], dynamic=BOTH, **given)


def with_state(done: bool) -> Any:
    """State that is larger than what may be saved, or not."""
    state = torch.zeros(64)
    return make(lambda x: x + state.mul_(1)[0], state_limit_bytes=1024 if done else 8)


def unchecked(done: bool) -> Any:
    """Distributions check their arguments, or not."""
    torch.distributions.Distribution.set_default_validate_args(not done)
    return make(Distributed())


CASES: dict[tuple[Reason, str], Case] = {
    (Reason.ASLEEP, "wake()"): Case(lambda done: after(make(), "sleep", *["wake"] * done)),
    (Reason.FROZEN, "unfreeze()"): Case(lambda done: after(make(), "freeze", *["unfreeze"] * done)),
    (Reason.FROZEN, "prewarm under the same modes"): Case(lambda done: prewarmed_in(torch.inference_mode(not done))),
    (Reason.FIRST_SIGHTING, "it comes again"): Case(lambda done: after(make(capture_after=2), *[ROWS] * 2 * done)),
    (Reason.CAPTURE_WAITS, "prewarm()"): Case(
        lambda done: (step := settled(), step.prewarm(torch.randn(3, 3)) if done else None)[0], (torch.ones(3, 3),)
    ),
    (Reason.CAPTURE_WAITS, "capture_share"): Case(
        lambda done: settled(capture_share=4.0 if done else 0.1), (torch.ones(3, 3),)
    ),
    (Reason.CACHE_FULL, "max_cached_graphs"): Case(
        lambda done: after(
            make(max_cached_graphs=1 + done, capture_after=2), *(ROWS[:rows] for rows in (1, 1, 1, *(3, 1) * 4))
        )
    ),
    (Reason.CACHE_FULL, "memory_budget_bytes"): Case(
        lambda done: make(lambda x: x @ torch.ones(2, 64), memory_budget_bytes=2**20 if done else 64)
    ),
    (Reason.ABOVE_LARGEST_SIZE, "a larger size in sizes="): Case(lambda done: make(sizes=(2, 4) if done else (1, 2))),
    (Reason.ABOVE_LARGEST_SIZE, "max_size= where none are given"): Case(
        lambda done: graphed(lambda x: x * 2, dynamic={"x": 0}, max_size=4 if done else 2)
    ),
    (Reason.MODE_ACTIVE, "call outside of it"): Case(
        lambda _: after(make(), *[ROWS] * 3), around=lambda done: nullcontext() if done else Mode()
    ),
    (Reason.NEEDS_GRADIENTS, "eval()"): Case(
        lambda done: make(nn.Linear(2, 2).train(not done), dynamic={"input": 0}), around=lambda _: torch.enable_grad()
    ),
    (Reason.NEEDS_GRADIENTS, "torch.no_grad()"): Case(
        lambda _: make(nn.Linear(2, 2), dynamic={"input": 0}), around=lambda done: torch.set_grad_enabled(not done)
    ),
    (Reason.UNGUARDED_ARGUMENT, "static="): Case(
        lambda done: make(lambda x, settings: x * 3, static=["settings"] if done else []), (ROWS, object())
    ),
    (Reason.ROWS_DISAGREE, "leave the one that broadcasts out of dynamic"): Case(
        lambda done: make(lambda x, y: x * y, dynamic={"x": 0} if done else BOTH), (ROWS, torch.ones(1, 2))
    ),
    (Reason.STATE_TOO_LARGE, "state_limit_bytes"): Case(with_state),
    (Reason.STATE_REBOUND, "keep it in tensors"): Case(
        lambda done: (lambda held: make(lambda x: count(held, x)))(Box(count=torch.zeros(()) if done else 0))
    ),
    (Reason.STATE_UNSEEN, "draw with torch"): Case(
        lambda done: make(lambda x: x + 0 * (torch.rand(()) if done else random.random()))
    ),
    (Reason.PADDING_WRITES_STATE, "a pad rule to scratch rows, and padding_writes='allow'"): Case(
        written_slots, (ROWS, torch.tensor([1, 2, 3]))
    ),
    (Reason.ROWS_MIX, "a size for it"): Case(
        lambda done: make(lambda x: x - x.mean(0), sizes=(3, 4) if done else (4,))
    ),
    (Reason.PATH_CHANGES, "a size for it"): Case(
        lambda done: make(lambda x: x * 2 if len(x) > 3 else x * 3, sizes=(3, 4) if done else (4,))
    ),
    (Reason.PADDING_UNPROVEN, "rows='independent'"): Case(
        lambda done: make(lambda x: scripted(x) + 1, rows="independent" if done else "proven", sizes=(4,))
    ),
    (Reason.PADDING_UNPROVEN, "rows='independent' where a break reads on the host"): Case(
        lambda done: make(
            Chooses(lambda x: x[0, 0], breaks=True),
            mode="PIECEWISE",
            rows="independent" if done else "proven",
            sizes=(4,),
        ),
        says="rows='independent' in the options",
    ),
    (Reason.PADDING_UNPROVEN, "draw outside of the callable"): Case(
        lambda done: make(lambda x, y: x + (y if done else torch.rand_like(x)), dynamic=BOTH, sizes=(4,)),
        (ROWS, torch.rand(3, 2)),
    ),
    (Reason.CAPTURE_FAILED, "pad="): Case(
        lambda done: make(lambda x, y: x.gather(1, (y - 1)[:, None]), dynamic=BOTH, pad={"y": int(done)}, sizes=(4,)),
        (ROWS, torch.tensor([1, 2, 1])),
    ),
    (Reason.OUTPUT_UNSUPPORTED, "return tensors"): Case(lambda done: make(lambda x: x * 2 if done else iter([x * 2]))),
    (Reason.OUTPUT_ROWS_UNKNOWN, "cut it outside"): Case(
        lambda done: make(lambda x: x * 2 if done else (x * 2).repeat(2, 1)[: len(x) + 1], sizes=(4,))
    ),
    (Reason.CAPTURE_UNSAFE, "torch.where"): Case(
        lambda done: make(
            (lambda x: torch.where(x.sum(1, keepdim=True) > 0, x * 2, x))
            if done
            else (lambda x: x * 2 if x.sum() > 0 else x)
        )
    ),
    (Reason.CAPTURE_UNSAFE, "eager_break, mode PIECEWISE"): Case(
        lambda done: make(Chooses(torch.sum, breaks=done), sizes=(3,), **({"mode": "PIECEWISE"} if done else {}))
    ),
    (Reason.CAPTURE_UNSAFE, "checks of torch.distributions"): Case(
        unchecked, says="torch.distributions.Distribution.set_default_validate_args(False)"
    ),
}
ELSEWHERE = {
    Reason.ALIASED_ARGUMENTS: "tests/behaviour/test_footguns_arguments.py",
    Reason.CONSTANT_CHANGES: "tests/runtime/test_why_no_graph.py",
    Reason.NOT_INITIALIZED: "tests/engines/test_key_dispatcher.py",
    Reason.NO_GAIN: "tests/proof/check/test_gain.py",
    Reason.QUERY_LEN_NOT_CAPTURED: "tests/engines/test_key_dispatcher.py",
}
"""The tests that follow the other remedies."""


@pytest.fixture(autouse=True)
def checks_distributions() -> Iterator[None]:
    """As by default."""
    yield
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.mark.parametrize(("why", "name"), CASES)
def test_a_remedy_is_right(why: Reason, name: str) -> None:
    """Without it calls run eagerly for the reason; with it a graph serves, with eager's answer."""
    case = CASES[why, name]
    for is_followed in (False, True):
        step = case.make(is_followed)
        with case.around(is_followed):
            reasons = [reason(step, *case.args) for _ in range(4)]
            if is_followed:
                assert reasons[-1].is_graph, step.last_decision.explain()
                assert_same(step(*case.args), step.unwrap()(*case.args))
            else:
                assert why in reasons, step.last_decision.explain()
                assert case.says in step.explain(*case.args)


def test_each_remedy_has_a_case() -> None:
    """Every reason that prints what to do has one here, or in the file that is named."""
    followed = {why for why, _ in CASES} | ELSEWHERE.keys()
    assert {why for why in Reason if why.remedy} <= followed
