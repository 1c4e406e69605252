"""Calls as flat lists: every spelling of a call is one list, and comes back as it was spelt."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from graphdispatch.call.spec import CallSpec, FlatCall, Leaves, parameter_names


class Pair(NamedTuple):
    """A nest with names."""

    left: Any
    right: Any


def three(a: Any, b: Any, c: Any = 3) -> tuple[Any, ...]:
    """Three parameters, one with a default."""
    return a, b, c


def form(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[tuple[str, ...], list[Any]]:
    """The names and values of a call."""
    made = CallSpec(fn, len(args), tuple(kwargs))
    return made.names, made.values(args, kwargs)


def again(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Take a call apart and make it from its leaves."""
    made = CallSpec(fn, len(args), tuple(kwargs))
    values = made.values(args, kwargs)
    caller = FlatCall(fn, made, values)
    leaves = caller.flatten(values)
    assert leaves is not None
    return caller(leaves)


def several(a: Any, *rest: Any, key: Any = None) -> tuple[Any, ...]:
    """Any number of positions."""
    return a, rest, key


def keywords(a: Any, **rest: Any) -> tuple[Any, dict[str, Any]]:
    """Any keywords."""
    return a, rest


def by_place(a: Any, /, **rest: Any) -> tuple[Any, dict[str, Any]]:
    """A parameter that may share its name with a keyword."""
    return a, rest


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "names", "values", "answer"),
    [
        (three, (1, 2), {}, ("a", "b"), [1, 2], (1, 2, 3)),
        (three, (1,), {"b": 2}, ("a", "b"), [1, 2], (1, 2, 3)),
        (three, (), {"b": 2, "a": 1}, ("a", "b"), [1, 2], (1, 2, 3)),
        (three, (1,), {"c": 5, "b": 2}, ("a", "b", "c"), [1, 2, 5], (1, 2, 5)),  # a default left out is no argument
        (several, (1, 2, 3), {"key": 4}, ("a", "key", "rest[0]", "rest[1]"), [1, 4, 2, 3], (1, (2, 3), 4)),
        (keywords, (1,), {"z": 2, "b": 3}, ("a", "b", "z"), [1, 3, 2], (1, {"z": 2, "b": 3})),
        (keywords, (), {"b": 3, "z": 2, "a": 1}, ("a", "b", "z"), [1, 3, 2], (1, {"z": 2, "b": 3})),
        (max, (1, 2), {}, ("arg0", "arg1"), [1, 2], 2),  # a builtin without a signature
    ],
)
def test_spellings_are_one_form(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], values: list[Any], answer: Any
) -> None:
    """In the order of the callable's parameters, by their names; and each call reaches the callable as it was spelt."""
    assert form(fn, *args, **kwargs) == (names, values)
    assert again(fn, *args, **kwargs) == answer


def test_names_that_meet_are_told_apart() -> None:
    """A keyword of the same name as a parameter by position goes to ``**kwargs``."""
    assert len(set(form(by_place, 1, a=2)[0])) == 2
    assert again(by_place, 1, a=2) == (1, {"a": 2})


def test_a_module_is_called_itself() -> None:
    """By the parameters of its ``forward``, so that hooks run."""
    model, seen = nn.Linear(2, 2), list[int]()
    model.register_forward_hook(lambda *_: seen.append(1))
    again(model, torch.ones(1, 2))
    assert seen == [1]


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (three, ("a", "b", "c")),
        (partial(three, 1), ("b", "c")),
        (nn.ReLU(), ("input",)),
        (torch.compile(nn.Linear(3, 3), backend="eager"), ("input",)),
        (partial(nn.ReLU()), ("input",)),
        (partial(partial(nn.Bilinear(2, 2, 2), torch.ones(1, 2))), ("input2",)),
        (lambda *args: args, ("args",)),
        (lambda **kwargs: kwargs, None),
        (torch.add, None),
    ],
    ids=[
        "function",
        "partial",
        "module",
        "compiled module",
        "partial of a module",
        "bound",
        "positions",
        "keywords",
        "builtin",
    ],
)
def test_parameter_names(fn: Callable[..., Any], names: tuple[str, ...] | None) -> None:
    """None where any name may be accepted."""
    assert parameter_names(fn) == names


def test_a_wrong_call_is_the_callables_to_refuse() -> None:
    """A name given twice, or unknown, raises its own ``TypeError``."""
    with pytest.raises(TypeError, match="multiple values for argument 'a'"):
        again(three, 1, 2, a=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        again(three, 1, 2, z=3)


def test_a_call_of_known_arguments_may_be_spelt_in_any_way() -> None:
    """Their names say which is which; a call with others, or too few, is no call of them."""
    spec = CallSpec.by_names(("a", "b", "c"), 1, ("c", "b"))
    assert spec is not None
    assert spec.values((1,), {"c": 3, "b": 2}) == [1, 2, 3]
    assert CallSpec.by_names(("a", "b", "c"), 3, ()).order is None  # type: ignore[union-attr]
    assert CallSpec.by_names(("a", "b", "c"), 2, ("b",)) is None
    assert CallSpec.by_names(("a", "b"), 3, ()) is None


def test_the_callers_own_containers_are_passed_on() -> None:
    """A call from the leaves of a call gets its very dicts and lists; one from other values gets new ones."""
    given = {"x": 1, "y": [2]}
    made = CallSpec(three, 1, ())
    caller = FlatCall(lambda a: a, made, [given])
    leaves = caller.flatten([given])
    assert leaves is not None
    assert caller(leaves) is given
    fresh = caller([3, 4])
    assert (fresh, given) == ({"x": 3, "y": [4]}, {"x": 1, "y": [2]})


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        (lambda d: None, True),
        (lambda d: d.update(z=1), False),
        (lambda d: d.pop("x"), False),
        (lambda d: d.update(x=d["x"] + 1), False),
        (lambda d: d["y"].append(None), False),
    ],
    ids=["nothing", "put in", "taken out", "replaced", "appended"],
)
def test_leaves_notice_changed_containers(change: Callable[[dict[str, Any]], Any], fits: bool) -> None:
    """Whatever a call does to the dicts and lists that it was given."""
    given = {"x": torch.ones(1), "y": [torch.ones(1)]}
    leaves = FlatCall(three, CallSpec(three, 1, ()), [given]).flatten([given])
    assert isinstance(leaves, Leaves)
    change(given)
    assert leaves.still_fit() is fits


def test_nests_are_flattened_with_paths() -> None:
    """Each leaf has a path that reads like Python, and the argument it belongs to."""
    values: list[Any] = [{"ids": 1, "more": [2, (3, None)]}, Pair(4, OrderedDict(x=5))]
    caller = FlatCall(three, CallSpec(three, 2, ()), values)
    assert [(leaf.path, leaf.argument) for leaf in caller.leaves] == [
        ("a['ids']", "a"), ("a['more'][0]", "a"), ("a['more'][1][0]", "a"), ("a['more'][1][1]", "a"),
        ("b.left", "b"), ("b.right['x']", "b"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "argument",
    [[1, 2], (1, [2, 3]), {"x": 1, "y": {"z": (2,)}}, Pair(1, Pair(2, 3)), OrderedDict(b=1, a=2), [], {}, None],
    ids=repr,
)
def test_nests_come_back(argument: Any) -> None:
    """With their structure and types; an empty one too."""
    taken = again(lambda x, y: x, argument, 5)
    assert taken == argument
    assert type(taken) is type(argument)


@pytest.mark.parametrize(
    "other",
    [[1], [1, 2, 3], (1, 2), {"a": 1, "b": 2}, [1, [2]], 7],
    ids=["short", "long", "tuple", "dict", "deep", "leaf"],
)
def test_another_structure_does_not_flatten(other: Any) -> None:
    """A call whose containers are others is told apart."""
    made = CallSpec(three, 1, ())
    caller = FlatCall(three, made, [[1, 2]])
    assert caller.flatten([[8, 9]]) == [8, 9]
    assert caller.flatten([other]) is None


def test_a_leaf_is_not_a_container() -> None:
    """Where a tensor was, a list of one tensor is another call.

    A call of leaves alone is not looked into; there the signature tells, which compares every leaf.
    """
    caller = FlatCall(three, CallSpec(three, 2, ()), [torch.ones(1), [1]])
    assert not caller.is_flat
    assert caller.flatten([[torch.ones(1)], [1]]) is None
    assert FlatCall(three, CallSpec(three, 1, ()), [torch.ones(1)]).is_flat
