"""What a run changed for a graph's sake is put back, and what a replay leaves out is noticed."""

import dis
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch

import graphdispatch as gd
from graphdispatch.proof.watch import bytecode

from ...behaviour.cases import Box
from ...helpers import batch, check_rows, make


def test_a_container_that_a_run_drains_is_put_back() -> None:
    """Also where another one, as empty, is in its place then."""
    held = Box(todo=[1.0, 2.0])

    def fn(x: torch.Tensor) -> torch.Tensor:
        todo, held.todo = held.todo, []
        while todo:
            todo.pop()
        return x * 2

    before = held.todo
    make(fn).prewarm(batch(4))
    assert held.todo is before
    assert before == [1.0, 2.0]


def test_what_cannot_be_put_back_is_an_error() -> None:
    """An array that a prewarm gave other memory has another length for good, and nobody learns of it elsewhere."""
    held = np.zeros(4)
    step = make(lambda x: (held.resize(8, refcheck=False), x * 2)[1])
    with pytest.raises(gd.CaptureError, match="could not be put back"):
        step.prewarm(batch(4))


TEXT = compile("last = 1", "text", "exec")


def test_a_variable_that_a_text_assigns_is_compared() -> None:
    """A capture ahead does not leave it there, and calls assign it again once somebody else has."""
    names: dict[str, Any] = {"__name__": __name__, "__file__": __file__}
    exec("", names)
    make(lambda x: (exec(TEXT, names), x * 2)[1]).prewarm(batch(4))
    assert "last" not in names
    step = make(lambda x: (exec(TEXT, names), x * 2)[1])
    check_rows(step, *[4] * 5)
    names["last"] = 0
    check_rows(step, 4)
    assert names["last"] == 1


class Keeps:
    """Keeps a number under a name that stands nowhere."""

    def __init__(self) -> None:
        self.count = 3

    def put(self, value: int) -> None:
        setattr(self, "".join(["co", "unt"]), value)


def test_an_attribute_that_only_padding_changes_is_put_back() -> None:
    """Also one whose name the code computes, by its first parameter alone."""
    held = Keeps()
    step = make(lambda x: (held.put(len(x)), x * 2)[1])
    for _ in range(3):
        step(batch(3))
        assert held.count == 3


CONTEXT: ContextVar[list[int]] = ContextVar("lengths")
HELD: dict[str, Callable[[tuple[list[int]]], Callable[[], list[int]]]] = {
    "a tuple that another attribute holds, too": lambda shared: partial(
        lambda held: held.used[0], Box(used=shared, other=shared)
    ),
    "a context variable": lambda shared: (CONTEXT.set(shared[0]), CONTEXT.get)[1],
}


@pytest.mark.parametrize("name", HELD)
def test_a_list_that_only_padding_changes_is_put_back(name: str) -> None:
    """However the code comes to it, since names tell that it may."""
    lengths: list[int] = []
    get = HELD[name]((lengths,))
    step = make(lambda x: (get().append(1) if len(x) == 4 else None, x * 2)[1])
    for _ in range(3):
        step(batch(3))
        assert lengths == []


def test_each_instruction_with_a_name_is_classified() -> None:
    """A new one of the next Python does not pass unseen."""
    real = [name for name, code in dis.opmap.items() if code in dis.hasname and code < 256]
    seen = {*bytecode._ATTRIBUTES, *bytecode._VARIABLES, "IMPORT_NAME"}
    assert {name for name in real if not name.startswith("INSTRUMENTED_")} <= seen


def test_names_that_code_assigns_are_read() -> None:
    """Of a text and of a class, too."""
    code = compile("a = 1\ndel b\nclass C:\n    c = 1", "text", "exec")
    (inner,) = (one for one in code.co_consts if isinstance(one, CodeType))
    assert {"a", "b", "C"} <= bytecode.code_reads(code).variables
    assert "c" in bytecode.code_reads(inner).variables
