"""Each form of a call reaches the callable as it was written, by a graph as well; arguments and their nests as Python
has them: what no leaf of a nest holds is compared, too, or the call runs eagerly."""

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphdispatch import CUDAGraphOptions, Graphed, graphed
from graphdispatch.errors import ConfigError
from graphdispatch.runtime.constants import frozen

from ..helpers import AT_ONCE, assert_same, check_calls, make


def three(a: Any, b: Any, c: Any = 3) -> Any:
    """Three parameters, one with a default."""
    return a * 100 + b * 10 + c


def several(a: Any, *rest: Any, key: Any = 2) -> tuple[Any, ...]:
    """Any number of positions."""
    return a + 1, [one * 2 for one in rest], a * key


def keywords(a: Any, **rest: Any) -> tuple[Any, dict[str, Any]]:
    """Any keywords."""
    return a + 1, {name: value * 2 for name, value in rest.items()}


HOOKED = nn.ReLU().eval()
HOOKED.register_forward_hook(lambda module, args, out: out * 3)  # runs where the module is called, not its ``forward``
Call = Callable[[Callable[..., Any], Tensor, Tensor], Any]
FORMS: dict[str, tuple[Callable[..., Any], list[Call]]] = {
    "names": (three, [lambda f, x, y: f(x, y), lambda f, x, y: f(x, b=y), lambda f, x, y: f(b=y, a=x)]),
    "a default that is given": (three, [lambda f, x, y: f(x, c=5, b=y), lambda f, x, y: f(x, y, 5)]),
    "positions": (several, [lambda f, x, y: f(x, y, 7, key=4)]),
    "keywords": (keywords, [lambda f, x, y: f(x, z=y, b=3), lambda f, x, y: f(b=3, z=y, a=x)]),
    "one name twice": (lambda a, /, **rest: a * 2 + rest["a"], [lambda f, x, y: f(x, a=y)]),
    "a builtin without a signature": (torch.add, [lambda f, x, y: f(x, y)]),
    "a module": (HOOKED, [lambda f, x, y: f(x), lambda f, x, y: f(input=x)]),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_of_a_call_is_served(name: str) -> None:
    """By place, by name in any order, with a default left out or given, and where one name is there twice."""
    fn, calls = FORMS[name]
    step = graphed(fn, dynamic={}, options=AT_ONCE)
    for call in calls * 4:
        x, y = torch.randn(4, 3), torch.randn(4, 3)
        assert_same(call(step, x, y), call(fn, x, y))
    assert step.stats.hits >= 2 * len(calls)


NAMED: dict[str, tuple[Callable[..., Any], tuple[str, ...] | None]] = {
    "function": (three, ("a", "b", "c")),
    "partial": (partial(three, 1), ("b", "c")),
    "module": (nn.ReLU(), ("input",)),
    "compiled": (torch.compile(nn.Linear(3, 3), backend="eager"), ("input",)),
    "module in a partial": (partial(nn.ReLU()), ("input",)),
    "bound": (partial(partial(nn.Bilinear(2, 2, 2), torch.ones(1, 2))), ("input2",)),
    "positions": (lambda *args: args, ("args",)),
    "keywords": (lambda **kwargs: kwargs, None),
    "builtin": (torch.add, None),
}


@pytest.mark.parametrize("kind", NAMED)
def test_parameters_have_names(kind: str) -> None:
    """Another name is refused at once, but where any may be accepted."""
    fn, names = NAMED[kind]
    graphed(fn, dynamic=dict.fromkeys(names or ("another",), 0))
    if names is not None:
        with pytest.raises(ConfigError, match="which is no argument of"):
            graphed(fn, dynamic={"another": 0})


@pytest.mark.parametrize(("kwargs", "message"), [({"a": 3}, "multiple values .* 'a'"), ({"z": 3}, "unexpected .* 'z'")])
def test_a_wrong_call_is_the_callables_to_refuse(kwargs: dict[str, int], message: str) -> None:
    """A name given twice, or unknown, raises its own ``TypeError``."""
    step = graphed(three, dynamic={}, options=AT_ONCE)
    with pytest.raises(TypeError, match=message):
        step(torch.ones(2), 2, **kwargs)


class Pair:
    """Two tensors, registered with torch without keys."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right


pytree.register_pytree_node(Pair, lambda pair: ([pair.left, pair.right], None), lambda leaves, _: Pair(*leaves))


def _total(ids: torch.Tensor, mask: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
    ids = ids if mask is None else ids * mask
    return ids if more.get("bias") is None else ids + more["bias"]


def test_declared_arguments_may_be_left_out_or_none() -> None:
    """A call without an argument that ``dynamic`` names, or with None for it, is served: each kind by its own graph."""
    served = graphed(_total, dynamic={"ids": 0, "mask": 0, "bias": 0}, sizes=[4])
    for kind in ({}, {"mask": None}, {"bias": None}, {"bias": torch.ones(4, 3)}, {"mask": torch.zeros(4, 3)}):
        hits = served.stats.hits
        for _ in range(5):
            ids = torch.randn(4, 3)
            assert torch.equal(served(ids, **kind), _total(ids, **kind))
        assert served.stats.hits == hits + 2, kind


class Tokens(UserDict[str, torch.Tensor]):
    """What a tokenizer gives."""


def test_a_mapping_of_its_own_class_is_refused_with_a_hint() -> None:
    """What it holds is not seen; its entries as a dict are."""
    served = make(lambda batch: batch["ids"] * 2, dynamic={"batch['ids']": 0}, sizes=[4])
    batches = [Tokens(ids=torch.randn(4, 3)) for _ in range(4)]
    check_calls(served, *batches)
    assert "graphs see what a plain dict holds" in served.explain(batches[0])
    check_calls(served, *map(dict, batches))
    assert served.stats.hits == 2


def test_the_missing_entry_of_dynamic_is_named() -> None:
    """A tensor that follows the batch and is not declared is named, with the entry that lacks."""
    served = graphed(lambda ids, mask: ids * mask, dynamic={"ids": 0}, sizes=[4, 8])
    batch = torch.randn(3, 3), torch.randn(3, 3)
    check_calls(served, batch, batch, batch)
    assert "dynamic= may lack 'mask': 0" in str(served.explain(*batch))
    dims = {"ids": {0: "batch", 1: "length"}}
    report = graphed(lambda ids, kinds: ids * kinds, dynamic=dims, sizes=[(4, 16)]).prewarm(*torch.randn(2, 3, 5))
    assert "dynamic= may lack 'kinds': {0: 'batch', 1: 'length'}" in str(report)


def test_the_leaves_of_a_class_without_keys_are_numbered() -> None:
    """Those of the whole argument that holds it; another name is refused, with the names there are."""

    def fn(b: dict[str, Any]) -> Tensor:
        return b["ids"] + b["pair"].left  # type: ignore[no-any-return]

    step = make(fn, dynamic={"b[0]": 0, "b[1]": 0}, sizes=(4,))
    for rows in (3, 3, 4, 3):
        check_calls(step, {"ids": torch.randn(rows, 2), "pair": Pair(torch.randn(rows, 2), torch.ones(1))})
    assert step.stats.hits >= 1
    with pytest.raises(ConfigError, match=r"expected one of \['b', 'b\[0\]', 'b\[1\]', 'b\[2\]'\]"):
        make(fn, dynamic={"b['ids']": 0})({"ids": torch.ones(2), "pair": Pair(torch.ones(2), torch.ones(1))})


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
    for _ in range(6):
        serve(torch.randn(4, 2), make())
    return serve


def _answer(serve: Graphed, nest: Any) -> float:
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


def test_a_dataclass_of_leaves_alone_is_served() -> None:
    """Its constants are compared as those of arguments are; one with an attribute that comes later runs eagerly."""
    serve = _serve(lambda x, b: x * (1 + b.step) * getattr(b, "by", 1), lambda: Whole(X))
    assert serve.last_decision.reason.name == "EXACT"
    assert _answer(serve, Whole(X, 5)) == 6.0
    batch = Whole(X)
    batch.by = 3  # type: ignore[attr-defined]
    assert _answer(serve, batch) == 3.0


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
