"""Whether two arguments are one object, which code may find out without an ``is`` of its own."""

import operator
from collections.abc import Callable
from functools import partial
from operator import is_, is_not
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from graphdispatch import Reason

from ...behaviour.cases import Box
from ...helpers import assert_same, batch, check_calls, make


class Giving(Box):
    """Gives what it is given."""

    @staticmethod
    def given(value: Any) -> Any:
        return value


def pick(_: type, value: Any) -> Any:
    """Give the last."""
    return value


_id, _same, _held = id, partial(is_), Giving(same=is_)
ALIKE: dict[str, Callable[[Any, Any], bool]] = {
    "is": lambda x, y: x is y,
    "is, of what a call with a type gives": lambda x, y: pick(type(x), y) is x,
    "is, of what a method of a type gives": lambda x, y: type(_held).given(y) is x,
    "is_": lambda x, y: is_(x, y),
    "is_not": lambda x, y: not is_not(x, y),
    "is_ of the module": lambda x, y: operator.is_(x, y),
    "is_ in an attribute": lambda x, y: _held.same(x, y),
    "is_ in a partial": lambda x, y: _same(x, y),
    "is_ mapped": lambda x, y: all(map(is_, [x], [y])),
    "id": lambda x, y: id(x) == id(y),
    "id under another name": lambda x, y: _id(x) == _id(y),
    "object's hash": lambda x, y: object.__hash__(x) == object.__hash__(y),
    "object's comparison": lambda x, y: object.__eq__(x, y) is True,
    "object's text": lambda x, y: object.__repr__(x) == object.__repr__(y),
    "key": lambda x, y: y in {x: 1},
    "weak key": lambda x, y: y in WeakIdKeyDictionary({x: 1}),
    "tuples": lambda x, y: (x,) == (y,),
    "dicts": lambda x, y: {1: x} == {1: y},
    "in": lambda x, y: y in [x],
    "contains": lambda x, y: operator.contains([x], y),
    "count": lambda x, y: (x,).count(y) == 1,
}


UNSEEN = ("is_ in an attribute", "is_ in a partial", "id under another name")
"""Where a compiled function tells objects from one another under a name that is not its own."""


@pytest.mark.parametrize("name", ALIKE)
def test_one_argument_in_two_places(name: str) -> None:
    """Graphs serve calls with two tensors, or are refused; one with a single tensor has eager's answer, and then two
    again."""
    alike = ALIKE[name]

    def fn(x: Tensor, y: Tensor) -> Tensor:
        try:
            is_one = alike(x, y)
        except RuntimeError:  # which of the numbers shall decide, torch says
            is_one = False
        return x * 2 if is_one else y * 3

    step = make(fn, dynamic={"x": 0, "y": 0})
    for _ in range(5):
        check_calls(step, (batch(4), batch(4)))
    found = step.last_decision.reason
    assert found is Reason.STATE_UNSEEN if name in UNSEEN else found.is_graph
    x = batch(4)
    for _ in range(2):
        assert_same(step(x, x), x * 2)
    check_calls(step, (batch(4), batch(4)))


def test_numbers_that_are_compared_are_no_objects() -> None:
    """Comparing what the call made needs no look at the arguments: hits stay plain."""
    step = make(lambda x, y: torch.where(x * 1 == y * 1, x, y), dynamic={"x": 0, "y": 0})
    for _ in range(5):
        check_calls(step, (batch(4), batch(4)))
    assert step.last_decision.reason.is_graph
    assert all(entry.licence.metadata is None for entry in step.entries)
