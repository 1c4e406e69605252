"""Padding rows must write nothing that real rows leave alone: in arguments without rows, and in state by index."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import graphdispatch as gd
from graphdispatch import Reason

from ...helpers import check_calls

Write = Callable[[Tensor, Tensor], object]


def writes(number: int) -> dict[str, Write]:
    """What writes this number into rows of a cache, in the ways that torch has."""
    return {
        "index_fill": lambda c, i: c.index_fill_(0, i, number),
        "index_put": lambda c, i: c.__setitem__(i, number),
        "scatter": lambda c, i: c.scatter_(0, i[:, None].expand(-1, 2), number),
        "masked_fill": lambda c, i: c.masked_fill_((torch.arange(6)[:, None] == i).any(1)[:, None], number),
    }


WRITES = writes(0) | {
    "multiplied": lambda c, i: c.__setitem__(i, c[i] * 0),
    "slice": lambda c, i: c[: len(i)].zero_(),
    "view": lambda c, i: c.view(-1).index_fill_(0, i * 2, 0) if c.is_contiguous() else c.index_fill_(0, i, 0),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda c: c,
    "transposed": lambda c: c.t().contiguous().t(),
    "with_gaps": lambda c: torch.cat([c, c], 1)[:, :2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [3, 4], ids=["padded-first", "full-first"])
@pytest.mark.parametrize("name", WRITES)
def test_an_argument_of_zeros_keeps_its_rest(name: str, rows: int, layout: str) -> None:
    """Where the early caches hold what padding writes, it is found by where it writes."""
    write, laid = WRITES[name], LAYOUTS[layout]

    def fn(cache: Tensor, slots: Tensor) -> Tensor:
        write(cache, slots)
        return slots * 2

    step = gd.graphed(fn, dynamic={"slots": 0}, sizes=[4])
    for one in (rows, rows, rows, 3, 4, 3):
        step(laid(torch.zeros(6, 2)), torch.arange(one) + 1)
    assert not step.last_decision.reason.is_graph
    for slots in ([1, 2, 3], [5, 4], [4, 3, 2, 1]):
        got, want = laid(torch.ones(6, 2)), laid(torch.ones(6, 2))
        assert torch.equal(step(got, torch.tensor(slots)), fn(want, torch.tensor(slots)))
        assert torch.equal(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [3, 4], ids=["padded-first", "full-first"])
def test_an_argument_written_where_real_rows_write_is_served(rows: int, layout: str) -> None:
    """Padding that repeats a real row, and writes that do not follow the rows, are served padded."""

    def fn(cache: Tensor, slots: Tensor) -> Tensor:
        cache.index_fill_(0, slots, 3)
        cache[:, 1].add_(1)
        return slots * 2

    laid = LAYOUTS[layout]
    step = gd.graphed(fn, dynamic={"slots": 0}, sizes=[4], pad={"slots": "repeat_last"})
    for one in (rows, rows, rows, 3, 4, 3, 3):
        got, want = laid(torch.zeros(6, 2)), laid(torch.zeros(6, 2))
        slots = torch.randperm(6)[:one]
        assert torch.equal(step(got, slots), fn(want, slots))
        assert torch.equal(got, want)
    assert step.last_decision.reason is Reason.PADDED


@torch.library.custom_op("graphdispatch_test::store_rows", mutates_args=("cache",))
def store_rows(cache: Tensor, slots: Tensor) -> None:
    """Its schema says that it writes the whole cache."""
    cache[slots] = 1


def noting(write: Write, seen: Tensor) -> Callable[[Tensor], Tensor]:
    """Notes by index which slots its rows name."""
    return lambda slots: (write(seen, slots), slots * 2)[1]


NOTES = writes(1) | {
    "custom operator": store_rows,
    "index_copy": lambda c, i: c.index_copy_(0, i, torch.ones(len(i), 2)),
    "raised": lambda c, i: c.__setitem__(i, c[i].clamp(min=1)),
    "reduced": lambda c, i: c.scatter_reduce_(0, i[:, None], torch.ones(len(i), 1), "amax"),
}


def check_slots(write: Write, order: list[int], **how: Any) -> None:
    """Batches of these numbers of rows write slots from 0 on, and later ones other slots: all are eager's."""
    seen, expected = torch.zeros(6, 2), torch.zeros(6, 2)
    step = gd.graphed(noting(write, seen), dynamic={"slots": 0}, sizes=[4], **how)
    for rows in [*order, 3, 3] if max(order) > 1 else order * 3:
        step(torch.arange(rows))
    for slots in ([1, 2, 3], [3], [5, 4], [4, 3, 2, 1], [2], [5, 1, 4]):
        for one in (seen, expected):
            one.zero_()
        check_calls(step, torch.tensor(slots), fn=noting(write, expected))
        assert torch.equal(seen, expected), step.last_decision


@pytest.mark.parametrize("order", [[3, 3, 3], [4, 4, 4], [3, 4, 3], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("name", NOTES)
def test_slots_from_zero_on_hide_nothing(name: str, order: list[int]) -> None:
    """While each batch writes to slot 0, padding of zeros does no harm; it must not write there later."""
    check_slots(NOTES[name], order)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_slots_that_do_not_follow_the_rows_are_served(rows: int) -> None:
    """What each call writes at the same place, by an index of the model's own, pads as before."""
    place, seen = torch.tensor([2]), torch.zeros(6, 2)
    fn = noting(lambda c, i: c.index_add_(0, place, torch.ones(1, 2)), seen)
    step = gd.graphed(fn, dynamic={"slots": 0}, sizes=[4])
    for one in (rows, rows, rows, 3, 2, 3, 2, 3):
        step(torch.randperm(6)[:one])
    assert step.last_decision.reason is Reason.PADDED


def test_a_comparison_leaves_no_write_of_padding() -> None:
    """Even where the user has allowed padding to write: eager answers that call."""
    cache = torch.full((9, 2), 7.0)

    def fn(x: Tensor, slots: Tensor) -> Tensor:
        cache[slots] = x
        return x * 2

    options = gd.CUDAGraphOptions(capture_after=1, padding_writes="allow")
    step = gd.graphed(fn, dynamic={"x": 0, "slots": 0}, sizes=[4], pad={"slots": gd.Pad.value(8)}, options=options)
    for rows, reason in ((4, Reason.CAPTURED_NOW), (4, Reason.VERIFIED_NOW), (3, Reason.VERIFIED_NOW)):
        assert check_calls(step, (torch.randn(rows, 2), torch.arange(rows))) == [reason]
        assert cache[8].tolist() == [7.0, 7.0]


def test_rows_that_are_written_by_a_mask_are_served() -> None:
    """An argument with rows holds its own padding, so that one row tells as much as many."""
    step = gd.graphed(lambda x: x.masked_fill_(x < 0, 0) + 1, dynamic={"x": 0}, sizes=[2], pad={"x": -1})
    for _ in range(4):
        x = torch.randn(1, 3)
        assert torch.equal(step(x.clone()), x.clamp(min=0) + 1)
    assert step.last_decision.reason is Reason.PADDED


@pytest.mark.parametrize("writes", ["refuse", "allow"])
def test_a_break_writes_nothing_for_padding_alone(writes: Any) -> None:
    """Even where the user has allowed padding to write: real rows do not write to that memory at all."""
    seen = torch.zeros(2)

    def note(slots: Tensor) -> Tensor:
        if bool((slots == 7).any()):
            seen.add_(1)
        return slots * 2

    options = gd.CUDAGraphOptions(capture_after=1, padding_writes=writes, rows="independent")
    step = gd.graphed(
        lambda slots: gd.eager_break(note)(slots + 1) + 1,
        dynamic={"slots": 0},
        sizes=[4],
        pad={"slots": 6},
        mode="PIECEWISE",
        options=options,
    )
    check_calls(step, *(torch.arange(rows) for rows in (4, 4, 4, 3, 3, 3)))
    assert not seen.any()
    assert step.last_decision.reason is Reason.PADDING_WRITES_STATE


PADS = ["zero", 2, lambda padding, real: padding.zero_(), lambda padding, real: padding.fill_(2)]


@pytest.mark.parametrize("ahead", [False, True], ids=["on-demand", "prewarm"])
@pytest.mark.parametrize("pad", PADS)
def test_a_rule_of_the_users_may_name_a_slot_that_no_row_names(pad: Any, ahead: bool) -> None:
    """A number, or a function that fills padding anew from each batch: it does not write where real rows do. Early
    batches, which name that slot, hide it."""
    state, want = torch.zeros(8), torch.zeros(8)

    def fn(slot: Tensor) -> Tensor:
        state[slot] = 1.0
        return slot * 2

    step = gd.graphed(fn, dynamic={"slot": 0}, sizes=[4], pad={"slot": pad})
    if ahead:
        step.prewarm(torch.tensor([0, 1, 2]))
    for slots in ([0, 1, 2, 3], [0, 1, 2], [2, 0], [2, 0, 1], [5, 6, 7], [1, 3], [7]):
        state.zero_(), want.zero_()
        step(torch.tensor(slots))
        want[slots] = 1.0
        assert torch.equal(state, want)
    assert step.last_decision.reason is Reason.PADDING_WRITES_STATE
