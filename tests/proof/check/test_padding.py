"""What padding holds in the replays that look whether it matters: values of each kind that an argument may hold."""

from typing import Any

import pytest
import torch

from graphdispatch import Dim, Pad, Reason, eager_break
from graphdispatch.proof.check.padding import edge, far, uniform
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


@pytest.mark.parametrize(("sign", "seq", "own"), [(1, [5, 5], [3, 5, 4]), (-1, [0, 0], [1, 0, 2])])
@pytest.mark.parametrize("spans", [1, 2])
def test_rows_at_the_edge_hold_what_some_row_holds_there(sign: int, seq: Any, own: Any, spans: int) -> None:
    """At each place of a row that does not follow the batch the largest number of all rows, or the smallest."""
    value = torch.tensor([[3, 0, 4], [1, 5, 2]])
    got = edge(sign, argument(torch.int64, spans), value, SIZE)
    assert torch.equal(got, torch.tensor(own).expand(4, 3) if spans == 1 else torch.full((4, 16), seq[0]))


def test_one_place_of_the_batch_is_everywhere() -> None:
    """The first along axes for which no place is given."""
    value = torch.tensor([[3, 0, 4], [1, 5, 2]])
    for place, number in (({}, 3), ({AXES[1]: 2}, 4), ({AXES[0]: 1, AXES[1]: 1}, 5)):
        assert uniform(place, argument(torch.int64), value, SIZE).eq(number).all()


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


def test_where_other_padding_writes_is_undone() -> None:
    """Where a write goes may depend on values: in early batches, and padding, it is one place alone."""
    cache, early = torch.zeros(2), torch.tensor([[1.0, -1, 0], [-1, 1, 0], [-1, -1, 0]])

    def fn(x: torch.Tensor, into: torch.Tensor = cache) -> torch.Tensor:
        into[((x[:, 0] > 0) & (x[:, 1] > 0)).long()] = 1.0
        return x * 2

    step = make(lambda x: fn(x), rows="independent", sizes=(4,), padding_writes="allow")
    for _ in range(4):
        check_calls(step, early, fn=lambda x: fn(x, torch.zeros(2)))
        assert cache.tolist() == [1.0, 0.0]
    assert step.last_decision.reason is Reason.PADDED


def test_a_break_that_writes_for_other_padding_depends_on_it() -> None:
    """What it wrote is undone."""
    seen = torch.zeros(1)

    @eager_break
    def notes(x: torch.Tensor) -> torch.Tensor:
        if x.max() > 10:
            seen.add_(1)
        return x * 2

    step = make(lambda x: notes(x + 1), mode="PIECEWISE", rows="independent", sizes=(4,))
    assert check_rows(step, 4, 4, 3, 3)[2:] == [Reason.ROWS_MIX] * 2
    assert "padding rows write to a tensor" in step.last_decision.detail
    assert not seen


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
