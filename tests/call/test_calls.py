"""Each spelling of a call reaches the callable as it was spelt, by a graph as well."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import graphed
from graphdispatch.errors import ConfigError

from ..helpers import AT_ONCE, assert_same


def three(a: Any, b: Any, c: Any = 3) -> Any:
    """Three parameters, one with a default."""
    return a * 100 + b * 10 + c


def several(a: Any, *rest: Any, key: Any = 2) -> tuple[Any, ...]:
    """Any number of positions."""
    return a + 1, [one * 2 for one in rest], a * key


def keywords(a: Any, **rest: Any) -> tuple[Any, dict[str, Any]]:
    """Any keywords."""
    return a + 1, {name: value * 2 for name, value in rest.items()}


def by_place(a: Any, /, **rest: Any) -> Any:
    """A parameter that may share its name with a keyword."""
    return a * 2 + rest["a"]


class Hooked(nn.ReLU):
    """A module with a hook, which runs where the module itself is called and not its ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, out: out * 3)


Call = Callable[[Callable[..., Any], Tensor, Tensor], Any]
SPELLINGS: dict[str, tuple[Callable[..., Any], list[Call]]] = {
    "names": (three, [lambda f, x, y: f(x, y), lambda f, x, y: f(x, b=y), lambda f, x, y: f(b=y, a=x)]),
    "a default that is given": (three, [lambda f, x, y: f(x, c=5, b=y), lambda f, x, y: f(x, y, 5)]),
    "positions": (several, [lambda f, x, y: f(x, y, 7, key=4)]),
    "keywords": (keywords, [lambda f, x, y: f(x, z=y, b=3), lambda f, x, y: f(b=3, z=y, a=x)]),
    "one name twice": (by_place, [lambda f, x, y: f(x, a=y)]),
    "a builtin without a signature": (torch.add, [lambda f, x, y: f(x, y)]),
    "a module": (Hooked().eval(), [lambda f, x, y: f(x), lambda f, x, y: f(input=x)]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling_is_served(name: str) -> None:
    """By place, by name in any order, with a default left out or given, and where one name is there twice."""
    fn, calls = SPELLINGS[name]
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


@pytest.mark.parametrize(
    ("kwargs", "told"), [({"a": 3}, "multiple values for argument 'a'"), ({"z": 3}, "unexpected keyword argument 'z'")]
)
def test_a_wrong_call_is_the_callables_to_refuse(kwargs: dict[str, int], told: str) -> None:
    """A name given twice, or unknown, raises its own ``TypeError``."""
    step = graphed(three, dynamic={}, options=AT_ONCE)
    with pytest.raises(TypeError, match=told):
        step(torch.ones(2), 2, **kwargs)
