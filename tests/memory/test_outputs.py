"""Outputs: which dimensions follow the batch, and who owns what is handed out."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from graphdispatch import Reason, graphed
from graphdispatch.backends import Pool, get_backend
from graphdispatch.engines import OutputView
from graphdispatch.errors import CaptureError, StaleOutputError
from graphdispatch.memory.outputs import OutputRule, Outputs, check_values, learn_output_rule
from graphdispatch.sizes import ROWS

from ..helpers import AT_ONCE


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture
def pool() -> Pool:
    """An empty pool of the CPU backend."""
    return get_backend("cpu").make_pool()


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


def test_rules_of_a_nest() -> None:
    """Each tensor of a nest has its own rule, in order."""
    three = {"a": torch.zeros(3), "b": [torch.zeros(7), torch.zeros(6)]}
    four = {"a": torch.zeros(4), "b": [torch.zeros(7), torch.zeros(8)]}
    rule = learn_output_rule([ROWS], three, 3, [(ROWS, 4, four)])
    assert rule == OutputRule((((0, 1, ROWS),), (), ((0, 2, ROWS),)))


def _outputs(tree: Any, follows: Any, pool: Pool, mode: Any = "clone") -> Outputs:
    return Outputs(tree, OutputRule(follows), [True] * len(follows), mode, pool)


@pytest.mark.parametrize("mode", ["clone", "static", "foreign"])
def test_who_owns_what_is_handed_out(pool: Pool, mode: str) -> None:
    """Every dimension that follows the batch is cut, by its factor; copies are the caller's, a cache is itself."""
    tensor = torch.arange(32.0).reshape(4, 8)
    rule = OutputRule((((0, 1, ROWS), (1, 2, ROWS)) if mode != "foreign" else (),))
    outputs = Outputs(tensor, rule, [mode != "foreign"], "static" if mode == "static" else "clone", pool)
    taken, expected = outputs.taker(3)(None), tensor if mode == "foreign" else tensor[:3, :6]
    assert torch.equal(taken, expected)
    assert (taken.data_ptr() == tensor.data_ptr()) is (mode != "clone")


TREES: list[Any] = [
    (torch.ones(4), torch.zeros(4)),
    [torch.ones(4), {"a": torch.zeros(4), "b": None}],
    Pair(torch.ones(4), (torch.zeros(4), 3)),
    OrderedDict(a=torch.ones(4), b="name"),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_structure_is_the_callables(pool: Pool, tree: Any) -> None:
    """What is handed out has the types, keys and constants of what the callable returned."""
    count = sum(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(tree))
    taken = _outputs(tree, (((0, 1, ROWS),),) * count, pool).taker(4)(None)
    assert type(taken) is type(tree)
    assert repr(taken) == repr(tree)


def test_view_is_stale_after_a_replay(pool: Pool) -> None:
    """A handle is good until the pool's next generation."""
    view = _outputs(torch.ones(4), (((0, 1, ROWS),),), pool, "view").taker(2)(None)
    assert torch.equal(view.get(), torch.ones(2))
    pool.generation += 1
    with pytest.raises(StaleOutputError, match="read it before the next call, or use outputs='clone'"):
        view.get()
    assert repr(view) == "<OutputView stale>"
    eager = OutputView(3, None)
    assert (eager.is_stale, eager.get(), repr(eager)) == (False, 3, "<OutputView fresh>")


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
