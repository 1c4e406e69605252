"""What is behind real rows: other padding, which a graph is tried with, holds numbers that no row has; and padding
rows must write nothing that real rows leave alone, in arguments without rows and in state by index."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import graphdispatch as gd
from graphdispatch import Dim, Pad, Reason, eager_break
from graphdispatch.proof.check.padding import far
from graphdispatch.runtime.signature import InputSpec
from graphdispatch.sizes import axes_of, pack

from ...helpers import check_calls, check_rows, make

AXES = axes_of(["batch", "seq"])
REAL, SIZE = (2, 3), pack(AXES, (4, 16))


def argument(dtype: torch.dtype, spans: int = 2) -> InputSpec:
    """An argument whose dimensions follow the batch, and the sequence if there are two spans."""
    shape = (0, 0) if spans == 2 else (0, 3)
    pads = (Pad.zero(),) * spans
    return InputSpec("x", 0, shape, (0, 1), dtype, torch.device("cpu"), tuple(enumerate(AXES))[:spans], pads)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [
        (torch.float64, 16, 32),
        (torch.bfloat16, 16, 32),
        (torch.complex64, 16, 32),
        (torch.int64, 16, 32),
        (torch.float8_e4m3fn, 448, 448),
        (torch.int8, 63, 64),
        (torch.bool, 1, 1),
    ],
    ids=str,
)
def test_large_numbers_are_beyond_all_of_the_batch(dtype: torch.dtype, least: int, most: int, sign: int) -> None:
    """They differ from each other, are at least four times as large as its largest finite one, and are finite in each
    type: of one that is too narrow they are the largest that it has, or half of that for integers."""
    largest = 3 if most == 32 else 120
    value = torch.full(REAL, -largest).to(dtype)
    if dtype is torch.float64:
        value[0, 0], value[1, 1] = float("inf"), float("nan")
    got = far(sign, argument(dtype), value, SIZE)
    assert got.dtype is dtype
    assert got.shape == (4, 16)
    if dtype is torch.bool:
        assert got.eq(sign > 0).all()
        return
    for part in torch.view_as_real(got).unbind(-1) if dtype.is_complex else [got]:
        sizes = part.to(torch.float64) * sign
        assert sizes.isfinite().all()
        assert least <= sizes.amin() <= least * 1.1
        assert most * 0.9 <= sizes.amax() <= most


def test_what_refuses_other_padding_depends_on_it() -> None:
    """As a break that looks at its values: the reason has its error."""

    @eager_break
    def looks(x: torch.Tensor) -> torch.Tensor:
        if x.max() > 10:
            raise ValueError("out of range")
        return x * 2

    step = make(lambda x: looks(x + 1), mode="PIECEWISE", rows="independent", sizes=(4,))
    check_rows(step, 4, 4, 3, 3)
    assert step.last_decision.reason is Reason.ROWS_MIX
    assert "with large numbers the call raises ValueError: out of range" in step.last_decision.detail


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64], ids=str)
def test_arguments_of_each_type_may_have_a_length(dtype: torch.dtype) -> None:
    """Other numbers are put behind them as behind any."""
    dynamic = {"x": {0: "batch", 1: Dim("seq", sizes=[8])}, "mask": {0: "batch", 1: "seq"}}
    step = make(lambda x, mask: (x.to(torch.complex64) * mask[..., None]).sum(1), dynamic=dynamic, sizes=[4])
    batches = ((torch.randn(4, length, 3).to(dtype), torch.ones(4, length)) for length in (8, 8, 5, 5))
    assert check_calls(step, *batches, rtol=1e-4, atol=1e-5)[-1] is Reason.PADDED


def test_a_draw_for_padding_alone_is_undone() -> None:
    """The generator is where eager leaves it, which does not draw."""
    step = make(lambda x: x * 2 + (torch.rand(3) * 0 if len(x) == 4 else 0), sizes=(4,))
    before = torch.get_rng_state()
    step(torch.ones(3, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_argument_that_is_written_is_padded_anew() -> None:
    """What a capture or a comparison left in its padding is not what the rule says."""

    def fn(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ((x + 1) * (mask.add_(1) > 1)[..., None]).sum(1)

    dynamic = {"x": {0: "batch", 1: Dim("seq", sizes=[8])}, "mask": {0: "batch", 1: "seq"}}
    step = make(fn, dynamic=dynamic, sizes=[4])
    for length in (5, 5, 5, 5, 8, 5, 6):
        x, mask = torch.randn(4, length, 3), torch.ones(4, length)
        torch.testing.assert_close(step(x, mask.clone()), fn(x, mask), rtol=1e-4, atol=1e-5)
    assert step.last_decision.reason is Reason.PADDED


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
