"""Outputs: which dimensions follow the batch, who owns what is returned, and which objects are made anew."""

import re
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from graphdispatch import Reason, graphed
from graphdispatch.engines import OutputView
from graphdispatch.errors import CaptureError, StaleOutputError
from graphdispatch.proof.check.outputs import check_values, learn_output_rule
from graphdispatch.runtime.outputs import OutputRule
from graphdispatch.sizes import ROWS, axes_of, pack

from ..helpers import AT_ONCE, assert_served, batch, check_rows, make


@pytest.mark.parametrize(
    ("first", "second", "follows"),
    [
        ((5, 3), (5, 4), ((1, 1),)),
        ((6, 5), (8, 5), ((0, 2),)),
        ((3, 9), (4, 12), ((0, 1), (1, 3))),
        ((3, 4), (3, 4), ()),
        ((), (), ()),
    ],
)
def test_rule_from_two_sizes(first: tuple[int, ...], second: tuple[int, ...], follows: tuple[Any, ...]) -> None:
    """From the shapes for 3 and 4 rows follow the dimensions of the batch and their factors."""
    rule = learn_output_rule([ROWS], torch.zeros(first), 3, [(4, torch.zeros(second))])
    assert rule == OutputRule((tuple((dim, factor, ROWS) for dim, factor in follows),))


@pytest.mark.parametrize(("first", "second"), [((4, 5), (5, 5)), ((3,), (3, 1)), ((3, 3), (4, 5)), ((9,), (16,))])
def test_unknown_rule_is_refused(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    """Rows plus one, another number of dimensions, squares: no rule, and the reason says so."""
    with pytest.raises(CaptureError, match="cut only along dimensions that are a fixed multiple") as caught:
        learn_output_rule([ROWS], torch.zeros(first), 3, [(4, torch.zeros(second))])
    assert caught.value.reason is Reason.OUTPUT_ROWS_UNKNOWN


def test_rule_of_several_dimensions() -> None:
    """One run of another batch tells by their factors which one each dimension follows, unless both fit."""
    b, s = axes = axes_of(["b", "s"])
    rows, other = pack(axes, (4, 6)), pack(axes, (7, 11))
    rule = learn_output_rule(axes, torch.zeros(8, 6, 3), rows, [(other, torch.zeros(14, 11, 3))])
    assert rule == OutputRule((((0, 2, b), (1, 1, s)),))
    for first, second in (((24,), (77,)), ((12,), (14,))):
        with pytest.raises(CaptureError, match="a fixed multiple"):
            learn_output_rule(axes, torch.zeros(first), rows, [(other, torch.zeros(second))])
    with pytest.raises(CaptureError, match="a fixed multiple"):
        learn_output_rule(axes, torch.zeros(12), rows, [(pack(axes, (8, 12)), torch.zeros(24))])


def test_nothing_is_padded_where_no_other_batch_ran() -> None:
    """Nothing tells then which dimensions of an output follow the batch; full batches are served."""
    step = make(lambda x: torch.linalg.qr(x).R @ x.mT, sizes=[2], rows="independent")
    check_rows(step, 2, 2, 2, 2)
    assert_served(step, batch(2))
    step(batch(1))
    assert step.last_decision.reason is Reason.OUTPUT_ROWS_UNKNOWN


@pytest.mark.parametrize("others", [lambda h: (h, h.mean(-1)), lambda h: h.flatten(), lambda h: h.flatten(1).t()])
def test_a_flag_that_changes_the_outputs(others: Any) -> None:
    """Each state of the callable has a rule of its own: one output more, or rows along another dimension."""
    flags = {"others": False}
    step = make(lambda x: others(x * 2) if flags["others"] else x * 2)
    for flags["others"] in (False, True, False):
        check_rows(step, 4, 4, 4, 3, 3)
        assert_served(step, batch(3))


def test_a_view_is_stale_after_a_replay() -> None:
    """It says so itself, and in the error, whether a graph made it or an eager step."""
    step = make(outputs="view")
    *_, stale, fresh = [step(batch(4)) for _ in range(5)]
    with pytest.raises(StaleOutputError, match="read it before the next call, or use outputs='clone'"):
        stale.get()
    assert (repr(stale), repr(fresh)) == ("<OutputView stale>", "<OutputView fresh>")
    eager = step(batch(5))
    assert (eager.is_stale, eager.get().shape, repr(eager)) == (False, (5, 3), "<OutputView fresh>")
    step(batch(4))
    assert eager.is_stale


def value_of(answer: Any) -> Any:
    """What was returned, which may be a view."""
    return answer.get() if isinstance(answer, OutputView) else answer


@pytest.mark.parametrize("outputs", ["clone", "view", "static"])
@pytest.mark.parametrize("dim", [0, 1])
def test_an_expanded_output_is_returned(outputs: str, dim: int) -> None:
    """Its elements share memory, so that torch writes to none of it as a whole."""

    def repeat(x: torch.Tensor) -> torch.Tensor:
        return (x * 2)[:, :1].expand(-1, 3) if dim else (x * 2).sum(1).expand(5, -1).t()

    step = graphed(repeat, dynamic={"x": 0}, sizes=[4], outputs=outputs, options=AT_ONCE)
    for rows in (4, 3, 4, 3, 3):
        x = torch.randn(rows, 3)
        assert torch.equal(value_of(step(x)), repeat(x))
    assert step.stats.hits == 3


@pytest.mark.parametrize("outputs", ["view", "static"])
def test_an_answer_is_given_back_beside_an_argument_that_is_written(outputs: str) -> None:
    """It lies in the graph's memory, and what is written does not."""
    step = make(lambda x, n: (n.add_(1), x * 2)[1], dynamic={"x": 0, "n": 0}, sizes=(4,), outputs=outputs)
    x, n = torch.ones(4, 3), torch.zeros(4)
    for turn in range(6):
        x = value_of(step(x, n))
        assert bool((x == 2 ** (turn + 1)).all())
        assert bool((n == turn + 1).all())
    assert step.stats.hits == 4


ONE = torch.ones(1)


def test_a_dimension_follows_what_explains_each_of_its_sizes() -> None:
    """Its size may be a multiple of another length by chance."""
    axes = axes_of(["batch", "seq"])
    (rows, tree), *others = ((pack(axes, shape), torch.empty(shape)) for shape in ((4, 16), (3, 16), (4, 13)))
    rule = learn_output_rule(axes, tree, rows, others)
    assert rule.follows == (((0, 1, axes[0]), (1, 1, axes[1])),)


CHANGED = [(3, 4), (3, 3.0), (0.0, -0.0), (object(), object()), ([1], [1, 1]), (ONE, 1), ({"a": [ONE]}, {"b": [ONE]})]


@pytest.mark.parametrize(("eager", "graph"), CHANGED)
def test_changed_values_are_refused(eager: Any, graph: Any) -> None:
    """What is no tensor must be the same constant in eager and graph, in the same structure."""
    with pytest.raises(CaptureError) as caught:
        check_values(eager, graph)
    assert caught.value.reason is Reason.OUTPUT_UNSUPPORTED
    assert "\n" not in str(caught.value)
    assert "None instead of None" not in str(caught.value)
    shared = object()
    check_values((1, "a", None, shared, float("nan")), (1, "a", None, shared, float("nan")))


@pytest.mark.parametrize("of", [lambda layer: layer.weight, lambda layer: layer.weight[0]], ids=["weight", "view"])
def test_an_output_that_requires_a_gradient_is_named(of: Any) -> None:
    """A parameter does so even under ``no_grad``, which is no remedy then; to detach it is one."""
    layer, x = torch.nn.Linear(3, 3).eval(), batch(4)
    step = make(lambda x: (layer(x), of(layer)))
    for _ in range(3):
        step(x)
    assert step.last_decision.reason is Reason.NEEDS_GRADIENTS
    assert "a parameter or a view of one" in step.explain(x)
    detached = make(lambda x: (layer(x), of(layer).detach()))
    check_rows(detached, *[4] * 3)
    assert_served(detached, x)


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
    """A user's dict."""


MAKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": lambda x: Answer(x + 1),
    "nest": lambda x: [Answer(x + 1, more=[Answer(x * 2), {"inner": (Answer(x, 7),)}]), "text"],
    "user's dict": lambda x: Batch(q=x * 3, size=2),
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
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return same(vars(a), vars(b)) if hasattr(a, "__dict__") else bool(a == b)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("outputs", ["clone", "view", "static"])
def test_objects_are_made_anew(kind: str, outputs: str) -> None:
    """A hit gives an object of the same class, whose tensors are this call's and cut to its rows, in every way to hand
    out outputs."""
    make = MAKERS[kind]
    step = graphed(make, dynamic={"x": 0} if kind not in SHAPED else {}, max_size=4, outputs=outputs)
    answers: list[Any] = []
    for index in range(10):
        x = torch.full((3 if index > 5 and kind not in SHAPED else 4, 2), float(index))
        got = value_of(step(x))
        assert same(got, make(x))
        assert all(got is not answer for answer in answers)
        answers.append(got)
    assert step.stats.hits == (6 if kind not in SHAPED else 7)


def test_an_object_from_before_is_itself() -> None:
    """What the callable holds or was given stays that very object."""
    held, other = Answer(torch.ones(2), 5), SimpleNamespace(a=1)
    serve = make(lambda x, other: (Answer(x + 1, more=held), held, other), static="other")
    for index in range(5):
        made, same_held, same_other = serve(torch.full((2, 2), float(index)), other)
        assert same_held is held
        assert made.more is held
        assert same_other is other
        assert torch.equal(made.x, torch.full((2, 2), index + 1.0))
    assert serve.stats.hits


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "one object twice": (lambda x: (one := Answer(x + 1), one), "Answer .* and another one in the graph"),
    "a list of its own kind": (lambda x: List([x]), "List in eager and another one"),
    "a dict of its own kind": (lambda x: Table(a=x + 2), "Table .* and another one"),
    "slots": (lambda x: Slotted(x * 2), "Slotted .* and another one"),
    "a namespace": (lambda x: SimpleNamespace(a=x * 2), "SimpleNamespace in eager and another one"),
    "a mapping": (lambda x: MappingProxyType({"k": x * 1}), "a mappingproxy .* in eager and another one"),
    "an iterator": (lambda x: (x, iter([x])), "a list_iterator in eager"),
    "a module": (lambda x: (x, torch.nn.ReLU()), "ReLU in eager and another one"),
    "a count of rows": (lambda x: Answer(x, x.shape[0]), "is 3 in eager and 4 in the graph"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_objects_stay_eager(kind: str) -> None:
    """What cannot be made anew is refused, with what to do instead; the answers are eager's."""
    make, message = REFUSED[kind]
    step = graphed(make, dynamic={"x": 0}, sizes=(4,))
    for _ in range(3):
        step(torch.ones(3, 2))
    decision = step.last_decision
    assert decision.reason == "output_unsupported"
    assert "register_pytree_node" in decision.detail
    assert re.search(message, decision.detail)
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
        assert check_rows(step, *[rows] * 5)[-1].is_graph is (rows == 1), step.last_decision.explain()
    assert "return one tensor for all rows" in step.explain(torch.randn(4, 3))
