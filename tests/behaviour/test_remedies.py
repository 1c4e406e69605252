"""Every remedy that a reason prints is right to follow: without it calls run eagerly for that reason, with it a graph
serves them, with eager's answers."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphdispatch import Graphed, Pad, Reason, eager_break, graphed

from ..helpers import assert_same, make, reason
from ..runtime.test_capture_share import settled

CASES: list[Any] = []
"""Each makes a served callable and the arguments of a call, with the remedy or without."""
Made = tuple[Graphed[..., Any], tuple[Any, ...]]


def remedy(why: Reason, name: str) -> Callable[[Callable[[bool], Made]], Callable[[bool], Made]]:
    """A case of a reason; ``name`` is the remedy in short."""

    def note(case: Callable[[bool], Made]) -> Callable[[bool], Made]:
        CASES.append(pytest.param(why, case, id=f"{why.value}: {name}"))
        return case

    return note


ROWS = torch.ones(3, 2)
ELSEWHERE = {
    Reason.CONSTANT_CHANGES: "tests/runtime/test_why_no_graph.py",
    Reason.NOT_INITIALIZED: "tests/engines/test_key_dispatcher.py",
    Reason.NO_GAIN: "tests/proof/check/test_gain.py",
    Reason.QUERY_LEN_NOT_CAPTURED: "tests/engines/test_key_dispatcher.py",
}
"""The tests that follow the other remedies."""


@remedy(Reason.ASLEEP, "wake()")
def _(is_followed: bool) -> Made:
    step = make()
    step.sleep()
    if is_followed:
        step.wake()
    return step, (ROWS,)


@remedy(Reason.FROZEN, "unfreeze()")
def _(is_followed: bool) -> Made:
    step = make()
    step.freeze()
    if is_followed:
        step.unfreeze()
    return step, (ROWS,)


@remedy(Reason.FROZEN, "prewarm under the same modes")
def _(is_followed: bool) -> Made:
    step = make()
    with torch.inference_mode(not is_followed):
        step.prewarm(torch.randn(3, 2))
    step.freeze()
    return step, (ROWS,)


@remedy(Reason.FIRST_SIGHTING, "it comes again")
def _(is_followed: bool) -> Made:
    step = make(capture_after=2)
    for _ in range(2 * is_followed):
        step(ROWS)
    return step, (ROWS,)


@remedy(Reason.CAPTURE_WAITS, "prewarm()")
def _(is_followed: bool) -> Made:
    step = settled()
    if is_followed:
        step.prewarm(torch.randn(3, 3))
    return step, (torch.ones(3, 3),)


@remedy(Reason.CAPTURE_WAITS, "capture_share")
def _(is_followed: bool) -> Made:
    return settled(capture_share=4.0 if is_followed else 0.1), (torch.ones(3, 3),)


@remedy(Reason.CACHE_FULL, "max_cached_graphs")
def _(is_followed: bool) -> Made:
    step = make(max_cached_graphs=1 + is_followed, capture_after=2)
    for rows in (1, 1, 1, *(3, 1) * 4, 3):
        step(ROWS[:rows])
    return step, ()


@remedy(Reason.CACHE_FULL, "memory_budget_bytes")
def _(is_followed: bool) -> Made:
    step = make(lambda x: x @ torch.ones(2, 64), memory_budget_bytes=2**20 if is_followed else 64)
    step(ROWS)
    return step, (ROWS,)


@remedy(Reason.ABOVE_LARGEST_SIZE, "a larger size in sizes=")
def _(is_followed: bool) -> Made:
    return make(sizes=(2, 4) if is_followed else (1, 2)), (ROWS,)


@remedy(Reason.ABOVE_LARGEST_SIZE, "max_size= where none are given")
def _(is_followed: bool) -> Made:
    return graphed(lambda x: x * 2, dynamic={"x": 0}, max_size=4 if is_followed else 2), (ROWS,)


class Mode(TorchDispatchMode):
    """Sees each operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@remedy(Reason.MODE_ACTIVE, "call outside of it")
def _(is_followed: bool) -> Made:
    step = make()
    for _ in range(3):
        step(ROWS)
    with nullcontext() if is_followed else Mode():
        step(ROWS)
        assert step.last_decision.reason.is_graph is is_followed
        return step, ()


@remedy(Reason.NEEDS_GRADIENTS, "eval()")
def _(is_followed: bool) -> Made:
    step = make(torch.nn.Linear(2, 2).train(not is_followed), dynamic={"input": 0})
    with torch.enable_grad():
        for _ in range(4):
            step(ROWS)
    return step, ()


@remedy(Reason.NEEDS_GRADIENTS, "torch.no_grad()")
def _(is_followed: bool) -> Made:
    step = make(torch.nn.Linear(2, 2), dynamic={"input": 0})
    with torch.set_grad_enabled(not is_followed):
        for _ in range(4):
            step(ROWS)
    return step, ()


@remedy(Reason.UNGUARDED_ARGUMENT, "static=")
def _(is_followed: bool) -> Made:
    settings = object()
    step = make(lambda x, settings: x * 3, static=["settings"] if is_followed else [])
    return step, (ROWS, settings)


@remedy(Reason.ROWS_DISAGREE, "leave the one that broadcasts out of dynamic")
def _(is_followed: bool) -> Made:
    step = make(lambda x, y: x * y, dynamic={"x": 0} if is_followed else {"x": 0, "y": 0})
    return step, (ROWS, torch.ones(1, 2))


@remedy(Reason.ALIASED_ARGUMENTS, "pass a copy")
def _(is_followed: bool) -> Made:
    memory = torch.ones(3, 2)
    step = make(lambda x, y: x.mul_(1) + y, dynamic={"x": 0, "y": 0})
    step(ROWS.clone(), ROWS.clone())
    return step, (memory, memory.clone() if is_followed else memory)


@remedy(Reason.STATE_TOO_LARGE, "state_limit_bytes")
def _(is_followed: bool) -> Made:
    state = torch.zeros(64)
    step = make(lambda x: x + state.mul_(1)[0], state_limit_bytes=1024 if is_followed else 8)
    return step, (ROWS,)


@remedy(Reason.STATE_REBOUND, "keep it in tensors")
def _(is_followed: bool) -> Made:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count: Any = torch.zeros(()) if is_followed else 0

        def forward(self, x: Tensor) -> Tensor:
            if is_followed:
                self.count.mul_(1)
            else:
                self.count += 1
            return x * 2

    return make(Counter()), (ROWS,)


@remedy(Reason.STATE_UNSEEN, "draw with torch")
def _(is_followed: bool) -> Made:
    def fn(x: Tensor) -> Tensor:
        drawn = torch.rand(()) if is_followed else random.random()
        return x + 0 * drawn

    return make(fn), (ROWS,)


@remedy(Reason.PADDING_WRITES_STATE, "a pad rule to scratch rows, and padding_writes='allow'")
def _(is_followed: bool) -> Made:
    cache = torch.zeros(9, 2)

    def write(x: Tensor, slots: Tensor) -> Tensor:
        cache[slots] = x
        return cache[slots] * 2

    given: dict[str, Any] = {"pad": {"slots": Pad.value(8)}, "padding_writes": "allow"} if is_followed else {}
    step = make(write, dynamic={"x": 0, "slots": 0}, **given)
    return step, (ROWS, torch.tensor([1, 2, 3]))


@remedy(Reason.ROWS_MIX, "a size for it")
def _(is_followed: bool) -> Made:
    return make(lambda x: x - x.mean(0), sizes=(3, 4) if is_followed else (4,)), (ROWS,)


@remedy(Reason.PATH_CHANGES, "a size for it")
def _(is_followed: bool) -> Made:
    return make(lambda x: x * 2 if len(x) > 3 else x * 3, sizes=(3, 4) if is_followed else (4,)), (ROWS,)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    """A script, through which nobody follows rows."""
    return x * 2


@remedy(Reason.PADDING_UNPROVEN, "rows='independent'")
def _(is_followed: bool) -> Made:
    step = make(lambda x: scripted(x) + 1, rows="independent" if is_followed else "proven", sizes=(4,))
    return step, (ROWS,)


@remedy(Reason.PADDING_UNPROVEN, "rows='independent' where a break reads on the host")
def _(is_followed: bool) -> Made:
    class Model(torch.nn.Module):
        def choose(self, x: Tensor) -> Tensor:
            return x * 2 if float(x[0, 0]) > -9 else x

        def forward(self, x: Tensor) -> Tensor:
            return self.choose(x + 1) * 3

    model = Model()
    eager_break(model, "choose")
    step = make(model, mode="PIECEWISE", rows="independent" if is_followed else "proven", sizes=(4,))
    if not is_followed:
        step.prewarm(ROWS)
        assert "rows='independent' in the options" in step.explain(ROWS)
    return step, (ROWS,)


@remedy(Reason.PADDING_UNPROVEN, "draw outside of the callable")
def _(is_followed: bool) -> Made:
    if is_followed:
        return make(lambda x, noise: x + noise, dynamic={"x": 0, "noise": 0}, sizes=(4,)), (ROWS, torch.rand(3, 2))
    return make(lambda x: x + torch.rand_like(x), sizes=(4,)), (ROWS,)


@remedy(Reason.CAPTURE_FAILED, "pad=")
def _(is_followed: bool) -> Made:
    dynamic, pad = {"x": 0, "length": 0}, {"length": int(is_followed)}
    step = make(lambda x, length: x.gather(1, (length - 1)[:, None]), dynamic=dynamic, pad=pad, sizes=(4,))
    return step, (ROWS, torch.tensor([1, 2, 1]))


@remedy(Reason.OUTPUT_UNSUPPORTED, "return tensors")
def _(is_followed: bool) -> Made:
    return make(lambda x: x * 2 if is_followed else iter([x * 2])), (ROWS,)


@remedy(Reason.OUTPUT_ROWS_UNKNOWN, "cut it outside")
def _(is_followed: bool) -> Made:
    return make(lambda x: (x * 2) if is_followed else (x * 2).repeat(2, 1)[: len(x) + 1], sizes=(4,)), (ROWS,)


@remedy(Reason.CAPTURE_UNSAFE, "torch.where")
def _(is_followed: bool) -> Made:
    def fn(x: Tensor) -> Tensor:
        if is_followed:
            return torch.where(x.sum(1, keepdim=True) > 0, x * 2, x)
        return x * 2 if x.sum() > 0 else x

    return make(fn), (ROWS,)


@remedy(Reason.CAPTURE_UNSAFE, "eager_break, mode PIECEWISE")
def _(is_followed: bool) -> Made:
    class Model(torch.nn.Module):
        def choose(self, x: Tensor) -> Tensor:
            return x * 2 if float(x.sum()) > 0 else x

        def forward(self, x: Tensor) -> Tensor:
            return self.choose(x + 1) * 3

    model = Model()
    if is_followed:
        eager_break(model, "choose")
    return make(model, sizes=(3,), **({"mode": "PIECEWISE"} if is_followed else {})), (ROWS,)


@remedy(Reason.CAPTURE_UNSAFE, "checks of torch.distributions")
def _(is_followed: bool) -> Made:
    class Network(torch.nn.Module):
        def output_distribution(self, x: Tensor) -> torch.distributions.Normal:
            return torch.distributions.Normal(x, x.exp())

        def forward(self, x: Tensor) -> Tensor:
            return self.output_distribution(x).stddev

    torch.distributions.Distribution.set_default_validate_args(not is_followed)
    step = make(Network())
    if not is_followed:
        step(ROWS)
        assert "torch.distributions.Distribution.set_default_validate_args(False)" in step.explain(ROWS)
    return step, (ROWS,)


@pytest.fixture(autouse=True)
def checks_distributions() -> Any:
    """As by default."""
    yield
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.mark.parametrize(("why", "case"), CASES)
def test_a_remedy_is_right(why: Reason, case: Callable[[bool], Made]) -> None:
    """Without it calls run eagerly for the reason; with it a graph serves, with eager's answer."""
    for is_followed in (False, True):
        step, args = case(is_followed)
        reasons = []
        for _ in range(4 if args else 0):
            reasons.append(reason(step, *args))
            if not is_followed and reasons[-1] is why:
                break
        if is_followed:
            assert step.last_decision.reason.is_graph, step.last_decision.explain()
            if args:
                assert_same(step(*args), step.unwrap()(*args))
        else:
            assert step.last_decision.reason is why, (reasons, step.last_decision.explain())


def test_each_remedy_has_a_case() -> None:
    """Every reason that prints what to do has one here, or in the file that is named."""
    followed = {case.values[0] for case in CASES} | ELSEWHERE.keys()
    assert {why for why in Reason if why.remedy} <= followed
