"""Objects among outputs: made anew around a graph's results, or handed out themselves where they were there before."""

import re
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from graphdispatch import graphed
from graphdispatch.engines import OutputView

from ..helpers import AT_ONCE


@dataclass
class Answer:
    x: torch.Tensor
    number: int = 3
    more: Any = None


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    name: str = "a"


class Batch(UserDict[str, Any]):
    pass


class List(list[Any]):
    """A user's list."""


class Table(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("read-only")


def make_nest(x: torch.Tensor) -> Any:
    """Objects in objects in containers."""
    return [Answer(x + 1, more=[Slotted(x * 2), {"inner": (Answer(x, 7),)}]), "text"]


MAKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": lambda x: Answer(x + 1),
    "nest": make_nest,
    "user's dict": lambda x: Batch(q=x * 3, size=2),
    "dict": lambda x: Table(a=x + 2),
    "shape": lambda x: (x + 1, x.shape[1:], {"of": x.shape}),
    "named tuple": lambda x: (Pair(x * 2), 3),
    "ordered dict": lambda x: OrderedDict(b=x + 1, a="name"),
    "distribution": lambda x: torch.distributions.Normal(x, x.exp(), validate_args=False),
}


SHAPED = ("shape", "distribution")
"""Those that hold the number of rows, and so are served without a batch dimension."""


def same(a: Any, b: Any) -> bool:
    """Whether two answers have the same classes and the same values to any depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (dict, MappingProxyType)):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Slotted):
        return same(a.x, b.x) and a.name == b.name
    return same(vars(a), vars(b)) if hasattr(a, "__dict__") else bool(a == b)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("outputs", ["clone", "view", "static"])
def test_objects_are_made_anew(kind: str, outputs: str) -> None:
    """A hit gives an object of the same class, whose tensors are this call's, in every way to hand out outputs."""
    make = MAKERS[kind]
    step = graphed(make, dynamic={"x": 0} if kind not in SHAPED else {}, max_size=4, outputs=outputs)
    answers: list[Any] = []
    for index in range(6):
        x = torch.full((4, 2), float(index))
        got = step(x)
        got = got.get() if isinstance(got, OutputView) else got
        assert same(got, make(x))
        assert all(got is not answer for answer in answers)
        answers.append(got)
    assert step.stats.hits == 3


def test_padded_objects_are_cut() -> None:
    """Tensors in an object follow the batch as others do."""
    step = graphed(make_nest, dynamic={"x": 0}, sizes=(4,))
    for rows in (4, 3, 2, 3, 2, 4):
        x = torch.randn(rows, 2)
        assert same(step(x), make_nest(x))
    assert step.stats.captures == 1
    assert step.stats.hits


def test_an_object_from_before_is_itself() -> None:
    """What the callable holds or was given stays that very object."""
    held = Answer(torch.ones(2), 5)

    def step(x: torch.Tensor, other: Any) -> Any:
        return Answer(x + 1, more=held), held, other

    other = SimpleNamespace(a=1)
    serve = graphed(step, dynamic={"x": 0}, static=("other",), max_size=2)
    for index in range(5):
        made, same_held, same_other = serve(torch.full((2, 2), float(index)), other)
        assert same_held is held
        assert made.more is held
        assert same_other is other
        assert torch.equal(made.x, torch.full((2, 2), index + 1.0))
    assert serve.stats.hits


def shared(x: torch.Tensor) -> Any:
    """One object, returned twice."""
    answer = Answer(x + 1)
    return answer, answer


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "one object twice": (shared, "Answer .* and another one in the graph"),
    "a list of its own kind": (lambda x: List([x]), "List in eager and another one"),
    "a mapping": (lambda x: MappingProxyType({"k": x * 1}), "a mappingproxy .* in eager and another one"),
    "an iterator": (lambda x: (x, iter([x])), "a list_iterator in eager"),
    "a module": (lambda x: (x, torch.nn.ReLU()), "ReLU in eager and another one"),
    "a count of rows": (lambda x: Answer(x, x.shape[0]), "is 3 in eager and 4 in the graph"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_objects_stay_eager(kind: str) -> None:
    """What cannot be made anew is refused, with what to do instead; the answers are eager's."""
    make, told = REFUSED[kind]
    step = graphed(make, dynamic={"x": 0}, sizes=(4,))
    for _ in range(3):
        step(torch.ones(3, 2))
    decision = step.last_decision
    assert decision is not None
    assert decision.reason == "output_unsupported"
    assert "register_pytree_node" in decision.detail
    assert re.search(told, decision.detail)
    assert step.stats.hits == 0


async def _coroutine(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _generator(x: torch.Tensor) -> Any:
    yield x * 2


async def _async_generator(x: torch.Tensor) -> Any:
    yield x * 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fn", [_coroutine, _generator, _async_generator])
def test_code_that_runs_after_the_call_is_refused_at_once(fn: Callable[..., Any]) -> None:
    """No other run makes a coroutine that nobody awaits; the caller's own gives eager's answer."""
    step = graphed(fn, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    x = torch.randn(4, 2)
    for _ in range(3):
        made = step(x)
        if fn is _generator:
            (answer,) = made
        else:
            with pytest.raises(StopIteration) as done:
                (made if fn is _coroutine else made.__anext__()).send(None)
            answer = done.value.value
        assert torch.equal(answer, x * 2)
    assert step.last_decision is not None
    assert step.last_decision.reason == "output_unsupported"
    assert "await and yield" in step.last_decision.detail


def test_attributes_of_an_output_are_no_result() -> None:
    """A replay would not set them. What the compiler notes on a tensor counts for nothing, as do those of a buffer."""

    def fn(x: torch.Tensor, name: str) -> torch.Tensor:
        y: Any = x * 2
        setattr(y, name, 3)
        return y  # type: ignore[no-any-return]

    for name, hits in (("scale", 0), ("_dynamo_note", 3)):
        step = graphed(fn, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
        for _ in range(5):
            y: Any = step(torch.randn(4, 2), name)
            assert hits or y.scale == 3
        assert step.stats.hits == hits
    buffer: Any = torch.zeros(4, 2)
    buffer.scale = 3
    kept: Any = graphed(lambda x: buffer.copy_(x), dynamic={}, options=AT_ONCE)
    for _ in range(5):
        assert kept(torch.randn(4, 2)).scale == 3
    assert kept.stats.hits == 3


class Ordered(OrderedDict[str, Any]):
    """An ordered dict of a class of its own."""


def last_first(x: torch.Tensor) -> Ordered:
    """Two entries, whose order was changed."""
    made = Ordered(a=x + 1, b=x * 2)
    made.move_to_end("a")
    return made


def test_an_ordered_dict_keeps_its_order() -> None:
    """It lists its keys itself, beside those of the dict that it is."""
    step, x = graphed(last_first, dynamic={"x": 0}, sizes=[2], options=AT_ONCE), torch.randn(2, 3)
    for _ in range(5):
        got = step(x)
        assert type(got) is Ordered
        assert list(got) == ["b", "a"]
        assert torch.equal(got["a"], x + 1)
    assert step.last_decision.reason.is_graph


class Pair(NamedTuple):
    """A named tuple."""

    y: torch.Tensor


class Noted(Pair):
    """One that takes attributes."""


@pytest.mark.parametrize("kind", [Noted, OrderedDict])
def test_attributes_that_torch_would_leave_out_are_refused(kind: Any) -> None:
    """They would be gone in a hit."""

    def fn(x: torch.Tensor) -> Any:
        made = kind(y=x * 2)
        made.extra = x + 1
        return made

    step, x = graphed(fn, dynamic={"x": 0}, sizes=[2], options=AT_ONCE), torch.randn(2, 3)
    for _ in range(5):
        assert torch.equal(step(x).extra, x + 1)
    assert "extra" in step.explain(x)


def test_outputs_whose_number_follows_the_batch() -> None:
    """A graph of one row serves that row; larger ones are refused in words."""
    step = graphed(lambda x: x.unbind(0), dynamic={"x": 0}, sizes=[1, 4], options=AT_ONCE)
    for rows in (1, 4):
        for _ in range(5):
            x = torch.randn(rows, 3)
            assert all(map(torch.equal, step(x), x))
        assert step.last_decision.reason.is_graph is (rows == 1), step.last_decision.explain()
    assert "return one tensor for all rows" in step.explain(torch.randn(4, 3))
