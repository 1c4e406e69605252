"""What a call costs that no graph serves, over a call of the plain callable, by reason: native and in Python."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Graphed, graphed
from graphdispatch.native.bound import CORE

from .timing import Effort, Row, compared, in_python, interleaved

__all__ = ["TITLE", "rows"]

TITLE = "a call that no graph serves, over eager"
_SETTLING = 3000
"""Calls before the measurement, after which nothing new is tried often."""
_AT_ONCE = CUDAGraphOptions(capture_share=None)
"""Nothing waits for a capture, so that each reason is the one that stays."""


class _Case(NamedTuple):
    """A served callable, and what makes a call of it."""

    step: Graphed[..., Tensor]
    arguments: Callable[[], tuple[Any, ...]]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    before: Callable[[], None] | None = None
    """What happens before each call, on both sides."""


def rows(effort: Effort) -> list[Row]:
    """A layer of 16 features, whose calls no graph serves for one reason each."""
    return [line for name, case in _CASES.items() for line in _compared(name, case, effort)]


def _compared(name: str, make: Callable[[], _Case], effort: Effort) -> list[Row]:
    found = []
    for kind in ["native", "Python"] if CORE is not None else ["Python"]:
        case = make()
        step = case.step if kind == "native" else in_python(case.step)
        with torch.no_grad(), case.context():
            _call(case, step, _SETTLING)
            took, base = interleaved(
                [partial(_call, case, step, 10), partial(_call, case, case.step.unwrap(), 10)], effort.turns
            )
        decision = case.step.last_decision
        assert decision is not None
        found.append(compared(f"{name} ({decision.reason.value}): {kind}", took, base, 10))
    return found


def _call(case: _Case, fn: Callable[..., Tensor], times: int) -> None:
    arguments, before = case.arguments, case.before
    for _ in range(times):
        if before is not None:
            before()
        fn(*arguments())


def _layer() -> nn.Linear:
    return nn.Linear(16, 16).requires_grad_(False)


def _batch(rows: int = 8) -> Callable[[], tuple[Any, ...]]:
    batch = (torch.randn(rows, 16),)
    return lambda: batch


def _above() -> _Case:
    return _Case(graphed(_layer(), dynamic={"input": 0}, sizes=(4,)), _batch())


def _gradients() -> _Case:
    return _Case(graphed(nn.Linear(16, 16), dynamic={"input": 0}, sizes=(8,)), _batch(), torch.enable_grad)


def _host_read() -> _Case:
    layer = _layer()

    def reads(x: Tensor) -> Tensor:
        return layer(x) if x[0, 0].item() < 1e9 else x

    return _Case(graphed(reads, dynamic={"x": 0}, sizes=(8,), options=_AT_ONCE), _batch())


def _mixes() -> _Case:
    layer = _layer()

    def mixes(x: Tensor) -> Tensor:
        answer: Tensor = layer(x) - x.mean(0)
        return answer

    return _Case(graphed(mixes, dynamic={"x": 0}, sizes=(8,), options=_AT_ONCE), _batch(5))


def _constant() -> _Case:
    layer, number, batch = _layer(), count(), torch.randn(8, 16)

    def scaled(x: Tensor, t: float) -> Tensor:
        answer: Tensor = layer(x) * t
        return answer

    return _Case(graphed(scaled, dynamic={"x": 0}, sizes=(8,)), lambda: (batch, float(next(number))))


def _state() -> _Case:
    layer = _layer()
    calls: list[int] = [0]

    def counts(x: Tensor) -> Tensor:
        calls[0] += 1
        answer: Tensor = layer(x)
        return answer

    return _Case(graphed(counts, dynamic={"x": 0}, sizes=(8,), options=_AT_ONCE), _batch())


def _asleep() -> _Case:
    step = graphed(_layer(), dynamic={"input": 0}, sizes=(8,))
    step.sleep()
    return _Case(step, _batch())


def _waits() -> _Case:
    options = CUDAGraphOptions(capture_share=1e-9)
    step = graphed(_layer(), dynamic={"input": 0}, sizes=(1, 8), options=options)
    return _Case(step, _batch())


def _guard() -> _Case:
    layer = _layer()
    weights = [nn.Parameter(torch.randn(16, 16), requires_grad=False) for _ in range(2)]
    number = count()

    def moves() -> None:
        layer.weight = weights[next(number) % 2]

    step = graphed(layer, dynamic={"input": 0}, sizes=(8,), options=CUDAGraphOptions(capture_share=1e-9))
    with torch.no_grad():
        step.prewarm(torch.randn(8, 16))
    layer.bias = nn.Parameter(torch.randn(16), requires_grad=False)
    return _Case(step, _batch(), before=moves)


_CASES: dict[str, Callable[[], _Case]] = {
    "above the largest size": _above,
    "needs gradients": _gradients,
    "reads on the host": _host_read,
    "mixes rows, padded": _mixes,
    "a constant that changes in each call": _constant,
    "Python state that changes in each call": _state,
    "asleep": _asleep,
    "waits for a capture": _waits,
    "the state differs in each call": _guard,
}
