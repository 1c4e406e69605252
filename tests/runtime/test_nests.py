"""Nests of arguments: what no leaf holds is compared, too, or the call runs eagerly."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphdispatch import CUDAGraphOptions, Graphed, graphed
from graphdispatch.runtime.constants import frozen

OPTIONS = CUDAGraphOptions(capture_share=None)
X = torch.ones(4, 2)


@dataclass
class Batch:
    """A batch of which one field is no part of the nest."""

    x: Tensor
    step: int = 0


@dataclass
class Whole:
    """A batch all of whose fields are leaves."""

    x: Tensor
    step: int = 0


class Kind(IntEnum):
    """Numbers that are equal to others."""

    A = 1


class Scaled:
    """A node whose structure is an object."""

    def __init__(self, x: Tensor, by: Any) -> None:
        self.x, self.by = x, by


pytree.register_dataclass(Batch, field_names=["x"], drop_field_names=["step"])
pytree.register_dataclass(Whole)
pytree.register_pytree_node(Scaled, lambda node: ([node.x], node.by), lambda x, by: Scaled(*x, by))


def _serve(fn: Callable[..., Any], make: Callable[[], Any], **options: Any) -> Graphed:
    serve = graphed(fn, dynamic={"x": 0}, options=OPTIONS, **options)
    with torch.no_grad():
        for _ in range(6):
            serve(torch.randn(4, 2), make())
    return serve


def _answer(serve: Graphed, nest: Any) -> float:
    with torch.no_grad():
        return float(serve(X, nest)[0, 0])


@pytest.mark.parametrize(
    ("fn", "nest", "other"),
    [
        (lambda x, d: x * (2 if next(iter(d)) is True else 3), {1: X}, {True: X}),
        (lambda x, d: x * (2 if type(next(iter(d))) is float else 3), {1: X}, {1.0: X}),
        (lambda x, r: x * (2 if r.stop == 3 else 3), range(0, 3, 2), range(0, 4, 2)),
        (lambda x, s: x * (2 if type(s[0]) is int else 3), torch.Size([1]), torch.Size([Kind.A])),
        (lambda x, n: x * (2 if n.by == 1 else 3), Scaled(X, 1), Scaled(X, 2)),
        (lambda x, n: x * (2 if n.by[0] is True else 3), Scaled(X, [1]), Scaled(X, [True])),
    ],
    ids=["key true", "key float", "range", "size", "context", "context in a list"],
)
def test_what_is_equal_and_looks_different_has_another_graph(fn: Callable[..., Any], nest: Any, other: Any) -> None:
    """1 is not True, and two ranges of equal numbers may end elsewhere."""
    serve = _serve(fn, lambda: nest)
    assert serve.last_decision.reason.name == "EXACT"
    assert _answer(serve, other) == float(fn(X, other)[0, 0]) != _answer(serve, nest)


def test_a_list_that_is_the_structure_of_a_node_may_change() -> None:
    """It is the node's own, and not kept."""
    node = Scaled(X, [1])
    serve = _serve(lambda x, n: x * n.by[0], lambda: node)
    assert serve.last_decision.reason.name == "EXACT"
    node.by[0] = 5
    assert _answer(serve, node) == 5.0


def _ordered() -> OrderedDict[str, Tensor]:
    made = OrderedDict(a=X)
    made.by = 1  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    "make", [lambda: Batch(X), _ordered, lambda: Scaled(X, object())], ids=["dropped field", "attribute", "object"]
)
def test_a_node_that_holds_more_than_its_leaves_is_refused(make: Callable[[], Any]) -> None:
    """A field, an attribute or an object of which no leaf tells."""
    serve = _serve(lambda x, nest: x * 1, make)
    assert serve.last_decision.reason.name == "UNGUARDED_ARGUMENT"
    assert "with more than its pytree holds" in serve.last_decision.detail


def test_an_attribute_that_comes_later_is_seen() -> None:
    """The call runs eagerly from then on."""
    serve = _serve(lambda x, b: x * getattr(b, "by", 1), lambda: Whole(X))
    assert serve.last_decision.reason.name == "EXACT"
    batch = Whole(X)
    batch.by = 3  # type: ignore[attr-defined]
    assert _answer(serve, batch) == 3.0


def test_a_dataclass_of_leaves_alone_is_served() -> None:
    """Its constants are compared as those of arguments are."""
    serve = _serve(lambda x, b: x * (1 + b.step), lambda: Whole(X))
    assert serve.last_decision.reason.name == "EXACT"
    assert _answer(serve, Whole(X, 5)) == 6.0


@pytest.mark.parametrize(
    "change",
    [
        lambda nest: nest.__setitem__("b", nest.pop("a")),
        lambda nest: nest.__setitem__("b", ()),
        lambda nest: nest["more"].append([]),
        lambda nest: nest.__setitem__("more", {}),
    ],
    ids=["other key", "empty entry", "empty list", "other container"],
)
def test_a_container_that_the_call_changes_without_a_leaf_is_refused(change: Callable[[Any], Any]) -> None:
    """The leaves are the same objects in the same order, and a replay would leave the container as it was."""

    def fn(x: Tensor, nest: dict[str, Any]) -> Tensor:
        change(nest)
        return x * 1

    serve = _serve(fn, lambda: {"a": X, "more": []})
    assert serve.last_decision.reason.name == "STATE_REBOUND"


def test_what_is_frozen_keeps_nothing_of_a_container() -> None:
    """It is equal to that of the container as it was."""
    held = [1, {"a": (2.0, None)}]
    before = frozen(held)
    assert before == frozen([1, {"a": (2.0, None)}])
    held[0] = True
    assert before != frozen(held)
