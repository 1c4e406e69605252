"""Breaks of PIECEWISE captures: Python that runs while a graph is half-way."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphdispatch import Reason, ReplayError, eager_break
from graphdispatch.backends import get_backend

from .features import needs
from .front_end import FrontEnd, Open

ON_HOST = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="NumPy takes memory of the host alone")


@needs("pieces")
def test_break_calls_itself(opened: Open) -> None:
    """A break calls the served model that it is a part of: the inner call runs eagerly, and both are right."""

    @eager_break
    def part(h: Tensor) -> Tensor:
        return h + plain(h[:1]) if len(h) > 1 else h

    step = opened(lambda x: part(x * 2) + x, sizes=(1, 4), mode="PIECEWISE")
    plain = step.fn
    for rows in (1, 4):
        step.prepare(torch.randn(rows, 3))
    plain = step.plain
    for rows in (1, 1, 4, 4):
        step(torch.randn(rows, 3))
    hits, inside = step.hits, step.reasons[Reason.INSIDE_REPLAY]
    x = torch.randn(4, 3)
    assert torch.equal(step(x), x * 2 + (x[:1] * 2 * 2 + x[:1] * 2) + x)
    assert step.hits == hits + 1
    assert step.reasons[Reason.INSIDE_REPLAY] == inside + 1 or step.name == "entry"  # which raises instead


@needs("pieces", "padding")
@pytest.mark.parametrize("size", [lambda x: len(x[x > 0]), lambda x: len(torch.unique(x > 0))], ids=["flags", "unique"])
def test_break_computes_with_size_of_data(opened: Open, size: Callable[[Tensor], int]) -> None:
    """How many elements data chooses may follow padding, too: padded batches run eagerly."""

    @eager_break
    def part(x: Tensor) -> Tensor:
        return x * size(x)

    step = opened(lambda x: part(x * 2) + x, mode="PIECEWISE")
    step.prepare(torch.rand(4, 3))
    step.check_calls(*(torch.rand(rows, 3) - shift for shift in (0, 2, 0.5) for rows in (4, 3, 3, 2)))
    step.check_not_padded()


@needs("pieces")
def test_break_on_side_stream(opened: Open) -> None:
    """What a break writes on a stream of its own, joined before it ends, is written once for each call."""
    backend = get_backend("cpu")
    side = backend.make_stream()
    cache = torch.zeros(3)

    @eager_break
    def part(x: Tensor) -> Tensor:
        with backend.use_stream(side):
            cache.add_(1)
        backend.current_stream().wait_stream(side)
        return x + cache

    step = opened(lambda x: part(x + 1), mode="PIECEWISE")
    step.prepare(torch.randn(4, 3))
    for count in range(1, 5):
        x = torch.randn(4, 3)
        assert torch.equal(step(x), x + 1 + count)
        assert torch.equal(cache, torch.full((3,), float(count)))
    assert step.hits >= 2 if step.captures_ahead else step.hits == 2


def test_break_counts(opened: Open) -> None:
    """A break that counts in Python keeps the call eager, though it would run in each replay; it counts once a call."""
    seen: list[int] = []
    part = eager_break(lambda x: (seen.append(len(x)), x + 1)[1])
    step = opened(lambda x: part(x * 2) - 1, mode="PIECEWISE")
    step.prepare(torch.randn(4, 3))
    for count in range(1, 5):
        x = torch.randn(4, 3)
        assert torch.equal(step(x), x * 2 + 1 - 1)
        assert len(seen) == count
    step.check(Reason.STATE_REBOUND)


@needs("pieces")
def test_break_changes_state(opened: Open) -> None:
    """What a break sets is seen behind it in the same call: by eager, or it is an error. It is set once."""

    class Chosen:
        scale = 2

        def grow(self) -> None:
            self.scale += 1

    chosen = Chosen()

    @eager_break
    def choose(x: Tensor) -> Tensor:
        if x.sum() > 100:
            chosen.grow()
        return x + 1

    step = opened(lambda x: choose(x * 2) * chosen.scale, mode="PIECEWISE")
    for number in range(12):
        x = torch.rand(4, 3) + 100 * (number % 4 == 3)
        step.prepare(x)
        answer = answer_or_replay_error(step, x)
        assert answer is None or torch.equal(answer, (x * 2 + 1) * (3 if number % 4 == 3 else 2))
        assert chosen.scale == (3 if number % 4 == 3 else 2)
        chosen.scale = 2
    assert step.hits


@needs("pieces")
@pytest.mark.parametrize(
    "clamp",
    [
        lambda x: x.clamp_(-3, 3),
        lambda x: x.data.clamp_(-3, 3),
        pytest.param(lambda x: np.clip(x.numpy(), -3, 3, out=x.numpy()), marks=ON_HOST),
        lambda x: x.new_empty(0).set_(x.untyped_storage()).clamp_(-3, 3),
    ],
    ids=["in place", "data", "numpy", "storage"],
)
def test_break_writes_for_some_values(opened: Open, clamp: Callable[[Tensor], Any]) -> None:
    """A break that leaves its argument alone at the capture, and writes to it later, is an error where a graph served;
    the caller's tensor is then as it was."""
    clip = eager_break(lambda x: (clamp(x) if float(x.abs().amax()) > 3 else None, x * 1)[1])
    step = opened(lambda x: clip(x) * 2, mode="PIECEWISE")
    step.prepare(torch.rand(4, 3))
    for by in (1.0, 2.0, 1.0, 9.0, 8.0):
        x, left = torch.full((4, 3), by), torch.full((4, 3), min(by, 3.0))
        answer = answer_or_replay_error(step, x)
        assert answer is None or torch.equal(answer, left * 2)
        assert torch.equal(x, left if answer is not None else torch.full((4, 3), by))


def answer_or_replay_error(step: FrontEnd, x: Tensor) -> Tensor | None:
    """The answer of a call; None where a graph was half-way through it, so that nobody may run its breaks again."""
    try:
        return step(x)  # type: ignore[no-any-return]
    except ReplayError as error:
        if not error.had_effects:
            raise
        return None


class Notes:
    """An object that a call makes."""

    count = 0


@eager_break
def notes_in_list(x: Tensor, seen: list[int]) -> Tensor:
    """Appends to the list for some values."""
    if float(x.max()) > 10:
        seen.append(1)
    return x * (1 + len(seen))


@eager_break
def notes_in_instance(x: Tensor, notes: Notes) -> Tensor:
    """Counts in the instance for some values."""
    if float(x.max()) > 10:
        notes.count += 1
    return x * (1 + notes.count)


def notes_in_closure(x: Tensor) -> Tensor:
    """Has a break of its own, which appends to a list of the call."""
    seen: list[int] = []
    part = eager_break(lambda x: (seen.append(1) if float(x.max()) > 10 else None, x * (1 + len(seen)))[1])
    return part(x)


@needs("pieces")
@pytest.mark.parametrize(
    "noting",
    [
        lambda x: notes_in_list(x, []),
        lambda x: notes_in_list(x, seen=[]),
        lambda x: notes_in_instance(x, Notes()),
        notes_in_closure,
    ],
    ids=["list", "named", "instance", "closure"],
)
def test_break_changes_object_of_the_call(opened: Open, noting: Callable[[Tensor], Tensor]) -> None:
    """A break that changes, for some values, an object that the call has made: no later call finds the change."""
    step = opened(lambda x: noting(x) + x, mode="PIECEWISE")
    step.prepare(torch.rand(4, 3))
    for by in (1.0, 2.0, 3.0, 20.0, 20.0, 1.0):
        x = torch.full((4, 3), by)
        answer = answer_or_replay_error(step, x)
        assert answer is None or torch.equal(answer, x * (3 if by > 10 else 2))
    assert step.hits


def test_break_changes_object_of_each_call(opened: Open) -> None:
    """A break that always changes an object that the call has made keeps the call eager: later parts may read it."""

    def counts(x: Tensor) -> Tensor:
        seen = [1.0]
        part = eager_break(lambda x: (seen.append(float(x[0, 0])), x + 1)[1])
        return part(x * 2) * seen[-1]

    step = opened(counts, mode="PIECEWISE")
    step.prepare(torch.rand(4, 3))
    for _ in range(3):
        x = torch.rand(4, 3)
        assert torch.equal(step(x), (x * 2 + 1) * (x * 2)[0, 0])
    step.check(Reason.STATE_REBOUND)
