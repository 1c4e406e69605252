"""``StaticInputs``: what the buffers hold after any sequence of batches; padding that a callable takes."""

import copy
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import graphdispatch as gd
from graphdispatch import Graphed, Pad, Reason, graphed
from graphdispatch.runtime.rules import as_pad
from graphdispatch.runtime.signature import InputSpec
from graphdispatch.runtime.static_inputs import StaticInputs, pointing_within
from graphdispatch.sizes import ROWS

from ..behaviour.forks import in_child
from ..helpers import AT_ONCE, check_calls

CPU = torch.device("cpu")
CAPACITY = 6


def spec(dim: int | None, pad: Pad, *, position: int = 0, order: tuple[int, ...] = (0, 1)) -> InputSpec:
    """A float argument of two dimensions, one of them the batch and the other of extent three."""
    shape = (3, 3) if dim is None else tuple(0 if d == dim else 3 for d in range(2))
    spans = () if dim is None else ((dim, ROWS),)
    return InputSpec(f"x{position}", position, shape, order, torch.float32, CPU, spans, (pad,) * len(spans))


class InTurn(Pad):
    """A rule of a user's own: the real rows in turn."""

    def filler(self, padding: torch.Tensor, real: torch.Tensor, dim: int) -> Callable[[], Any]:
        """Copies row after row, the first one again behind the last."""
        turns = torch.arange(padding.shape[dim]) % real.shape[dim]
        return lambda: padding.copy_(real.index_select(dim, turns))


class Numbered(Pad):
    """Another one: each row holds its place in the batch, whatever the real rows hold."""

    follows_data = False

    def filler(self, padding: torch.Tensor, real: torch.Tensor, dim: int) -> Callable[[], Any]:
        """Counts on behind the real rows."""
        first = real.shape[dim]
        places = torch.arange(first, first + padding.shape[dim]).float().view((-1, 1) if dim == 0 else (1, -1))
        return lambda: padding.copy_(places.expand_as(padding))


# A rule, and what it puts into so many padding rows, given the real ones (None: anything).
Model = Callable[[torch.Tensor, int], torch.Tensor | None]
RULES: dict[str, tuple[Pad, Model]] = {
    "zero": (Pad.zero(), lambda real, count: torch.zeros(count, 3)),
    "value": (Pad.value(7), lambda real, count: torch.full((count, 3), 7.0)),
    "repeat_last": (Pad.repeat_last(), lambda real, count: real[-1:].expand(count, 3)),
    "leave": (Pad.leave(), lambda real, count: None),
    "function": (
        Pad.function(lambda padding, real: padding.fill_(real.sum())),
        lambda real, count: real.sum().expand(count, 3),
    ),
    "rows in turn": (InTurn(), lambda real, count: real[torch.arange(count) % len(real)]),
    "numbered rows": (
        Numbered(),
        lambda real, count: (torch.arange(count) + len(real)).float().view(-1, 1).expand(-1, 3),
    ),
}
BATCH = st.integers(1, CAPACITY).flatmap(lambda size: st.tuples(st.integers(1, size), st.just(size)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dim", [0, 1])
@given(batches=st.lists(BATCH, min_size=1, max_size=12), soiled=st.sets(st.integers(0, 11)))
def test_buffers_after_any_sequence(rule: str, dim: int, batches: Sequence[tuple[int, int]], soiled: set[int]) -> None:
    """After each batch of any sequence the buffers hold its rows, then padding by the rule, whatever was before."""
    pad, model = RULES[rule]
    inputs = StaticInputs([spec(dim, pad)], CAPACITY)
    generator = torch.Generator().manual_seed(0)
    for step, (rows, size) in enumerate(batches):
        if step in soiled:
            inputs.views(CAPACITY)[0].fill_(-1.0)
            inputs.mark_dirty()
        real = torch.randn(rows, 3, generator=generator)
        inputs.load([real.movedim(0, dim)], rows, size)
        view, expected = inputs.views(size)[0].movedim(dim, 0), model(real, size - rows)
        assert view.shape[0] == size
        assert torch.equal(view[:rows], real)
        if expected is not None:
            torch.testing.assert_close(view[rows:], expected)


class Noted(Pad):
    """Zeros; notes how many rows it fills, each time."""

    follows_data = False

    def __init__(self) -> None:
        self.filled: list[int] = []

    def filler(self, padding: torch.Tensor, real: torch.Tensor, dim: int) -> Callable[[], Any]:
        """Fills them, and notes it."""
        return lambda: (self.filled.append(padding.shape[dim]), padding.zero_())


@pytest.mark.parametrize(("dim", "filled"), [(0, [3, 1, 2]), (1, [2, 3, 2])], ids=["rows", "columns"])
def test_padding_that_is_there_is_not_put_again(dim: int, filled: list[int]) -> None:
    """Where rows lie one behind the other, what a longer batch has left is filled; else all, after another batch."""
    pad = Noted()
    inputs = StaticInputs([spec(dim, pad)], CAPACITY)
    for rows in (3, 3, 2, 5, 5, 3):
        inputs.load([torch.ones(rows, 3).movedim(0, dim)], rows, 5)
    assert pad.filled == filled


@pytest.mark.parametrize("dim", [0, 1])
def test_a_forked_child_takes_nothing_for_padding(dim: int) -> None:
    """Another thread may have been filling the buffers."""
    inputs, real = StaticInputs([spec(dim, Pad.zero())], CAPACITY), torch.ones(2, 3).movedim(0, dim)
    inputs.load([real], 2, 4)
    inputs.views(4)[0].fill_(-1.0)

    def load() -> None:
        inputs.load([real], 2, 4)
        assert inputs.views(4)[0].movedim(dim, 0).tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2

    in_child(load)


def test_other_padding_is_put_until_the_next_batch() -> None:
    """That of the arguments that get some, and behind the real rows; then each has that of its rule again."""
    inputs = StaticInputs([spec(0, Pad.zero()), spec(0, Pad.zero(), position=1)], CAPACITY)
    for padding in (None, 7.0, None):
        inputs.load([torch.ones(2, 3)] * 2, 2, 4)
        if padding is not None:
            inputs.put([torch.full((4, 3), padding), None], 2, 4)
        held = [view[:, 0].tolist() for view in inputs.views(4)]
        assert held == [[1.0, 1.0, padding or 0.0, padding or 0.0], [1.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize(("rows", "is_named"), [(1, False), (2, True), (3, False)])
def test_a_tensor_with_as_many_rows_as_the_batch_is_named(rows: int, is_named: bool) -> None:
    """Of one row none is: it is as long for many other reasons."""
    other = replace(spec(None, Pad.zero(), position=1), shape=(min(rows, 2), 4))
    hint = StaticInputs([spec(0, Pad.zero()), other], CAPACITY).missing_entries(rows)
    assert hint == ("; dynamic= may lack 'x1': 0, since x1 had as many rows as the batch, 2" if is_named else "")


def test_so_many_batches_are_kept_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is prepared twice until there are too many; then all begin anew."""
    monkeypatch.setattr("graphdispatch.runtime.static_inputs._MOST_PREPARED", 3)
    inputs, kept = StaticInputs([spec(0, Pad.zero())], CAPACITY), []
    for rows in (5, 4, 3, 2, 1):
        inputs.load([torch.ones(rows, 3)], rows, CAPACITY)
        kept.append((len(inputs._targets), len(inputs._fills)))
    assert kept == [(1, 1), (2, 2), (3, 3), (1, 1), (2, 2)]


def test_where_buffers_lie() -> None:
    """Every size is a view of one buffer, in the memory order of the argument; one without a batch is copied whole."""
    inputs = StaticInputs([spec(0, Pad.zero()), spec(None, Pad.zero(), position=1)], CAPACITY)
    assert len({inputs.views(size)[0].data_ptr() for size in (1, 3, CAPACITY)}) == 1
    assert inputs.nbytes == CAPACITY * 3 * 4 + 3 * 3 * 4
    value = torch.randn(3, 3)
    inputs.load([torch.ones(2, 3), value], 2, 4)
    assert torch.equal(inputs.views(4)[1], value)
    view = StaticInputs([spec(0, Pad.zero(), order=(1, 0))], CAPACITY).views(4)[0]
    assert (view.shape, view.stride()) == ((4, 3), (1, 4))


def test_each_rule_is_tried_and_documented() -> None:
    """Each is an attribute of ``Pad`` that type checkers find, and has a case here and a row in the page on padding."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "concepts" / "padding.md").read_text()
    rules, annotated = {*Pad.rules}, get_type_hints(Pad)
    assert {name for name in rules if annotated.get(name) == ClassVar[type[Pad.rules[name]]]} == rules, "in Pad"
    assert {name for name in rules if name in RULES and type(RULES[name][0]) is getattr(Pad, name)} == rules, "in RULES"
    assert {*re.findall(r"^\| `gd\.Pad\.(\w+)\(", page, re.M)} == rules, "in the page"


@pytest.mark.parametrize("rule", [RULES[name][0] for name in sorted(Pad.rules.keys() - {"function"})], ids=repr)
def test_a_rule_is_a_value(rule: Pad) -> None:
    """It prints as the call that makes it, and a copy or a pickle is equal to it, and to no other one."""
    assert eval(repr(rule), {"Pad": Pad}) == rule
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == rule
    assert [other for other, _ in RULES.values() if other == rule] == [rule]


@pytest.mark.parametrize("rule", [Pad.zero(), "zero", 0, 0.0, False, lambda padding, _: padding.zero_()])
def test_zero_as_a_pad_a_name_a_number_or_a_function(rule: Any) -> None:
    """A rule may be given as a ``Pad``, by name, as a number, or as a function."""
    padding = torch.ones(2, 3)
    as_pad("x", rule).filler(padding, torch.ones(1, 3), 0)()
    assert not bool(padding.any())


MIXED = (torch.float32, torch.int64, torch.bfloat16, torch.int64, torch.float32)


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_hit_copies_inputs_of_several_dtypes(is_contiguous: bool) -> None:
    """Each into its own place, by bytes and by torch."""
    names = [f"x{place}" for place in range(len(MIXED))]

    def total(**tensors: torch.Tensor) -> torch.Tensor:
        return sum((2**place * value.double() for place, value in enumerate(tensors.values())), torch.zeros(()))

    step = gd.graphed(total, dynamic=dict.fromkeys(names, 0), sizes=(4,))
    for shift in range(6):
        batch = {}
        for place, (name, dtype) in enumerate(zip(names, MIXED, strict=True)):
            value = (torch.arange(12) + 7 * shift + place).to(dtype)
            batch[name] = value.reshape(4, 3) if is_contiguous else value.reshape(3, 4).t()
        assert torch.equal(step(**batch), total(**batch))
    assert step.stats.hits == 3


SIZES = (2, 4, 8)


def last(sequence: Tensor, length: Tensor) -> Tensor:
    """What a sequence has in its last place: the length less one is an index, which gather takes from zero on."""
    return sequence.gather(1, (length - 1).view(-1, 1)) * 2


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Numbers, and how many of them count in each row."""
    return torch.randn(rows, 5), torch.randint(1, 6, (rows,))


def serve(**settings: Any) -> Graphed[..., Tensor]:
    """``last``, captured when it first comes."""
    return graphed(last, dynamic={"sequence": 0, "length": 0}, sizes=SIZES, options=AT_ONCE, **settings)


def test_a_prewarm_finds_padding_that_the_callable_takes() -> None:
    """All sizes are captured, and every batch is a hit."""
    step = serve()
    report = step.prewarm(*batch(8))
    assert step.captured_sizes == SIZES, str(report)
    assert not report.left_out
    assert all(reason.is_graph for reason in check_calls(step, *[batch(rows) for rows in range(1, 9)]))


def test_calls_find_it_too() -> None:
    """The first padded call fails to capture, and says what comes next; the next ones are served."""
    step = serve()
    check_calls(step, batch(3))
    decision = step.last_decision
    assert decision.reason is Reason.CAPTURE_FAILED
    assert "out of bounds" in decision.detail
    assert "copies of the last row" in decision.detail
    assert check_calls(step, *[batch(3) for _ in range(4)])[-1] is Reason.PADDED


def test_a_rule_of_the_user_stays() -> None:
    """It is used as given, and what it leads to says how to give another."""
    step = serve(pad={"length": 0})
    check_calls(step, *[batch(3) for _ in range(3)])
    assert "pad=" in step.explain(*batch(3))
    assert not step.entries
    assert {spec.name: spec.pads[0] for spec in step._route.groups[0].inputs.specs}["length"] == Pad.value(0)


@pytest.mark.parametrize(
    ("left", "cut", "found"),
    [
        (2, [5, 1], [1, 0]),
        (3, [3, 3, 5], [1, 1, 2]),  # what differs does so still, as slots that each have one writer
        (4, [5, 2, 5, 3], [3, 1, 3, 2]),  # no zero comes where there was none, as in lengths
        (4, [3, 2, 0, 1], [3, 2, 0, 1]),  # nothing points at what is gone
        (2, [6, 1], [6, 1]),  # these are no places of rows
        (2, [-1, 5], [-1, 5]),
    ],
)
def test_integers_that_may_point_at_rows_that_are_gone_point_at_others(
    left: int, cut: list[int], found: list[int]
) -> None:
    """The batch was cut from one of six rows, and stays as it is."""
    places = InputSpec("at", 1, (0,), (0,), torch.int64, CPU, ((0, ROWS),), (Pad.zero(),))
    inputs, values = StaticInputs([spec(0, Pad.zero()), places], 8), [torch.ones(left, 3), torch.tensor(cut)]
    assert pointing_within(inputs, values, left, 6)[1].tolist() == found
    assert values[1].tolist() == cut


@pytest.mark.parametrize(
    ("given", "rows", "shift", "found"),
    [
        ([0, 2, 4], 5, 0, [0, 2, 4, 4, 4]),
        ([0, 2, 4], 4, 1, [2, 4, 4, 4]),
        ([0, 2, 4], 3, 1, [2, 4, 0]),
        ([0, 2, 2], 5, 0, [0, 2, 2, 2, 2]),
        ([0, 2, 1], 5, 0, [0, 2, 1, 0, 2]),
    ],
)
def test_offsets_in_an_example_do_not_fall(given: list[int], rows: int, shift: int, found: list[int]) -> None:
    """Else bags of a longer batch would begin behind their end, and torch would read what is not theirs."""
    offsets = InputSpec("offsets", 0, (0,), (0,), torch.int64, CPU, ((0, ROWS),), (Pad.zero(),))
    assert offsets.repeated(torch.tensor(given), rows, shift).tolist() == found
