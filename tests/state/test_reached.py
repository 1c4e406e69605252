"""State that code reaches by unusual ways: through files in memory, threads, loggers, getters and enumerations."""

import copy
import enum
import io
import logging
import random
import threading
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphdispatch import Reason, graphed

from ..helpers import AT_ONCE

Program = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], object]]
"""A callable, and what changes the state that it reads."""

CONFIG = SimpleNamespace(scale=2.0)


def _lines() -> Program:
    """Each call takes the next line."""
    lines = io.StringIO("".join(f"{number}\n" for number in range(1, 99)))
    return lambda x: x * float(next(lines)), lambda: None


def _memory() -> Program:
    """The bytes lie in a file in memory."""
    memory = io.BytesIO(b"\2").getbuffer()
    return lambda x: x * float(memory[0]), lambda: memory.__setitem__(0, 5)


def _logger() -> Program:
    """An attribute that somebody put on a logger."""
    logger = logging.getLogger("graphdispatch.test_reached")
    vars(logger)["scale"] = 2.0
    return lambda x: x * logger.scale, lambda: vars(logger).update(scale=5.0)  # type: ignore[attr-defined]


def _getter() -> Program:
    """The name is kept by the getter, and the object is a global."""
    getter = attrgetter("scale")
    CONFIG.scale = 2.0
    return lambda x: x * getter(CONFIG), lambda: setattr(CONFIG, "scale", 5.0)


def _member() -> Program:
    """The member is found by its value."""

    class Kind(enum.Enum):
        ONE = 1

    Kind.ONE.scale = 2.0  # type: ignore[attr-defined]
    key = SimpleNamespace(value=1)
    return lambda x: x * Kind(key.value).scale, lambda: setattr(Kind.ONE, "scale", 5.0)  # type: ignore[attr-defined]


def _condition() -> Program:
    """An attribute that comes to an object of the standard library."""
    condition = threading.Condition()
    return lambda x: x * getattr(condition, "k", 2.0), lambda: setattr(condition, "k", 5.0)


@pytest.mark.parametrize(
    "program", [_lines, _memory, _logger, _getter, _member, _condition], ids=lambda one: one.__name__
)
def test_what_changes_is_seen(program: Callable[[], Program]) -> None:
    """Each answer is that of a twin which is called eagerly as often."""
    (fn, change), (twin, change_twin) = program(), program()
    step = graphed(fn, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for number in range(8):
        x = torch.randn(4, 3)
        assert torch.equal(step(x), twin(x)), step.last_decision
        if number == 3:
            change()
            change_twin()


def test_attributes_of_a_thread_are_put_back() -> None:
    """A prewarm leaves none of its runs' effects there."""
    thread: Any = threading.Thread()
    thread.count = 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        thread.count += 1
        return x * 2

    step = graphed(fn, dynamic={"x": 0}, sizes=(4,))
    step.prewarm(torch.ones(4, 3))
    step(torch.ones(4, 3))
    assert thread.count == 1


class Holder:
    """Holds what it never uses."""

    def __init__(self) -> None:
        self.scale, self.state = 2.0, 3.0
        self.event, self.random, self.thread = threading.Event(), random.Random(0), threading.Thread()


@pytest.mark.parametrize(
    "fn",
    [
        lambda h, x: x * vars(h)["scale"],
        lambda h, x: x * copy.copy(h).scale,
        lambda h, x: x * h.state,
        lambda h, x: x * vars(h)["scale"] * (torch.ops.aten.add.Tensor.name() == "aten::add.Tensor"),
    ],
    ids=["as a whole", "copied", "an attribute that a generator has, too", "a private name of torch that threads have"],
)
def test_what_is_not_used_is_no_obstacle(fn: Callable[[Holder, torch.Tensor], torch.Tensor]) -> None:
    """An event, a generator and a thread beside what is read: others set the one and draw from the other."""
    holder = Holder()
    step = graphed(lambda x: fn(holder, x), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for _ in range(6):
        x = torch.randn(4, 3)
        assert torch.equal(step(x), fn(holder, x))
        holder.random.random()
    assert step.last_decision.reason is Reason.EXACT, step.last_decision


def test_a_generator_of_the_system_is_refused() -> None:
    """It has no state to compare, which is a reason and no error."""
    generator = random.SystemRandom()
    step = graphed(lambda x: x * (0 * generator.random() + 2), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(step(x), x * 2)
    assert step.last_decision.reason is Reason.STATE_UNSEEN
