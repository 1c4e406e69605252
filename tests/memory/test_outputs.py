"""Outputs: which dimensions follow the batch, and who owns what is handed out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphdispatch import Reason, graphed
from graphdispatch.engines import OutputView
from graphdispatch.errors import CaptureError, StaleOutputError
from graphdispatch.memory.outputs import OutputRule, check_values, learn_output_rule
from graphdispatch.sizes import ROWS

from ..helpers import AT_ONCE, assert_served, batch, make


@pytest.mark.parametrize(
    ("first", "second", "follows"),
    [
        ((3, 5), (4, 5), ((0, 1),)),
        ((5, 3), (5, 4), ((1, 1),)),
        ((6, 5), (8, 5), ((0, 2),)),
        ((3, 3), (4, 4), ((0, 1), (1, 1))),
        ((3, 9), (4, 12), ((0, 1), (1, 3))),
        ((3, 4), (3, 4), ()),
        ((), (), ()),
    ],
)
def test_rule_from_two_sizes(first: tuple[int, ...], second: tuple[int, ...], follows: tuple[Any, ...]) -> None:
    """From the shapes for 3 and 4 rows follow the dimensions of the batch and their factors."""
    rule = learn_output_rule([ROWS], torch.zeros(first), 3, [(ROWS, 4, torch.zeros(second))])
    assert rule == OutputRule((tuple((dim, factor, ROWS) for dim, factor in follows),))


@pytest.mark.parametrize(("first", "second"), [((4, 5), (5, 5)), ((3,), (3, 1)), ((3, 3), (4, 5)), ((9,), (16,))])
def test_unknown_rule_is_refused(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    """Rows plus one, another number of dimensions, squares: no rule, and the reason says so."""
    with pytest.raises(CaptureError, match="cut only along dimensions that are a fixed multiple") as caught:
        learn_output_rule([ROWS], torch.zeros(first), 3, [(ROWS, 4, torch.zeros(second))])
    assert caught.value.reason is Reason.OUTPUT_ROWS_UNKNOWN


@pytest.mark.parametrize("others", [lambda h: (h, h.mean(-1)), lambda h: h.flatten(), lambda h: h.flatten(1).t()])
def test_a_flag_that_changes_the_outputs(others: Any) -> None:
    """Each state of the callable has a rule of its own: one output more, or rows along another dimension."""
    flags = {"others": False}
    step = make(lambda x: others(x * 2) if flags["others"] else x * 2)
    for flags["others"] in (False, True, False):
        for rows in (4, 4, 4, 3, 3):
            step(batch(rows))
        assert_served(step, batch(3))


def test_a_view_is_stale_after_a_replay() -> None:
    """It says so itself, and in the error; what no graph made is good for ever."""
    step = make(outputs="view")
    *_, stale, fresh = [step(batch(4)) for _ in range(5)]
    with pytest.raises(StaleOutputError, match="read it before the next call, or use outputs='clone'"):
        stale.get()
    assert (repr(stale), repr(fresh)) == ("<OutputView stale>", "<OutputView fresh>")
    eager = step(batch(5))
    assert (eager.is_stale, eager.get().shape, repr(eager)) == (False, (5, 3), "<OutputView fresh>")


class Held(list[Any]):
    """A list of a class of its own, as no graph gives."""


@pytest.mark.parametrize("kind", [list, Held, SimpleNamespace])
def test_a_view_of_an_eager_step_is_stale_where_it_is_an_argument(kind: type) -> None:
    """It may lie in a graph's memory, where each step is given what the last one gave; so may what an object holds."""

    def fn(x: torch.Tensor, flag: Any = None) -> Any:
        return (kind(x=x) if kind is SimpleNamespace else kind([x])) if flag else x * 2

    step = make(fn, sizes=(4,), outputs="view")
    fed_back = [step(batch(4)) for _ in range(4)][-1].get()
    want = fed_back.clone()
    eager = step(fed_back, flag=object())
    assert step.last_decision.reason is Reason.UNGUARDED_ARGUMENT
    held = eager.get()
    assert torch.equal(held.x if kind is SimpleNamespace else held[0], want)
    step(batch(4))
    assert eager.is_stale


@pytest.mark.parametrize("outputs", ["clone", "view", "static"])
@pytest.mark.parametrize("dim", [0, 1])
def test_an_expanded_output_is_handed_out(outputs: str, dim: int) -> None:
    """Its elements share memory, so that torch writes to none of it as a whole."""

    def repeat(x: torch.Tensor) -> torch.Tensor:
        return (x * 2)[:, :1].expand(-1, 3) if dim else (x * 2).sum(1).expand(5, -1).t()

    step = graphed(repeat, dynamic={"x": 0}, sizes=[4], outputs=outputs, options=AT_ONCE)
    for rows in (4, 3, 4, 3, 3):
        x = torch.randn(rows, 3)
        got = step(x)
        assert torch.equal(got.get() if isinstance(got, OutputView) else got, repeat(x))
    assert step.stats.hits == 3


@pytest.mark.parametrize(
    ("eager", "graph"),
    [
        (3, 4),
        (3, 3.0),
        (0.0, -0.0),
        (object(), object()),
        ([1], [1, 1]),
        ([1], (1,)),
        (torch.ones(1), 1),
        ({"a": [torch.ones(1)]}, {"b": [torch.ones(1)]}),
    ],
)
def test_changed_values_are_refused(eager: Any, graph: Any) -> None:
    """What is no tensor must be the same constant in eager and graph, in the same structure."""
    with pytest.raises(CaptureError) as caught:
        check_values(eager, graph)
    assert caught.value.reason is Reason.OUTPUT_UNSUPPORTED
    assert "\n" not in str(caught.value)
    shared = object()
    check_values((1, "a", None, shared, float("nan")), (1, "a", None, shared, float("nan")))


@pytest.mark.parametrize("of", [lambda layer: layer.weight, lambda layer: layer.weight[0]], ids=["weight", "view"])
def test_an_output_that_requires_a_gradient_is_named(of: Any) -> None:
    """A parameter does so even under ``no_grad``, which is no remedy then; to detach it is one."""
    layer, x = torch.nn.Linear(3, 3).eval(), batch(4)
    step = make(lambda x: (layer(x), of(layer)))
    with torch.no_grad():
        for _ in range(3):
            step(x)
        assert step.last_decision.reason is Reason.NEEDS_GRADIENTS
        assert "a parameter or a view of one" in step.explain(x)
    detached = make(lambda x: (layer(x), of(layer).detach()))
    for _ in range(3):
        detached(batch(4))
    assert_served(detached, x)
