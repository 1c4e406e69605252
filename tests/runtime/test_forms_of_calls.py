"""Each form of a call reaches the callable as it was written, by a graph as well; arguments as Python has them."""

from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphdispatch import graphed
from graphdispatch.errors import ConfigError

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


CONSTANTS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "number of NumPy": (lambda x, v: x * v.item(), (np.float32(2), np.float32(3), np.float32("nan"))),
    "range": (lambda x, v: x * len(v), (range(2), range(3))),
    "function of torch": (lambda x, v: v(x), (torch.sin, torch.cos)),
    "function": (lambda x, v: v(x), (lambda x: x + 1, lambda x: x + 2)),
    "class": (lambda x, v: x * len(v.__name__), (int, float)),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_select_the_graph(kind: str) -> None:
    """Constants of NumPy, ranges, functions and classes: each value has its graph."""
    model, values = CONSTANTS[kind]
    served = graphed(model, dynamic={"x": 0}, sizes=[4])
    check_calls(served, *((torch.randn(4, 3), value) for value in values * 4))
    assert served.stats.hits == len(values)


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
