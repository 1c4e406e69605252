"""Padding rows: models that mix rows, and caches that padding would write to."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import Reason

from .features import needs
from .front_end import Batch, Open, one_tensor

FIRST = pytest.mark.parametrize("first", [3, 4], ids=["padded-first", "full-first"])


def positive(rows: int) -> tuple[Tensor]:
    """A batch of numbers above one."""
    return (torch.rand(rows, 3) + 1,)


def near_zero(rows: int) -> tuple[Tensor]:
    """A batch with a number near zero."""
    return ((torch.rand(4, 3) * 7 * torch.tensor([[0.01], [1.0], [1.0], [1.0]]))[:rows],)


def large(rows: int) -> tuple[Tensor]:
    """A batch of large numbers, of both signs."""
    return (torch.randn(rows, 3) * 200,)


class Mixes(NamedTuple):
    """A callable that mixes rows, early batches that may hide it, what happens then, and batches that show it."""

    fn: Callable[..., Tensor]
    early: Batch = one_tensor
    late: Batch = one_tensor
    between: Callable[[], object] = int


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    return x + gate * x.mean(0)


def opens_later() -> Mixes:
    """A gate of zeros, which is written later."""
    gate = torch.zeros(3)
    return Mixes(lambda x: _gated(x, gate), between=lambda: gate.fill_(1))


def _mean_of_number(x: Tensor, ends: Tensor) -> Tensor:
    """The mean of each row's segment, as a bag's: rows behind the last end count as the last segment's."""
    counts = torch.cat([ends[1:-1].diff(prepend=ends[:1]), len(x) - ends[-2:-1]])
    segments = torch.searchsorted(ends[1:], torch.arange(len(x)), right=True).clamp(max=len(ends) - 2)
    return x / counts[segments][:, None]


def _by_starts(x: Tensor, starts: Tensor) -> Tensor:
    return _mean_of_number(x, torch.cat([starts, starts.new_full((1,), 1 << 30)]))


def _by_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    return _mean_of_number(x, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))


def by_offsets(mean: Callable[..., Tensor], given: Callable[[list[int]], Tensor]) -> Mixes:
    """Segments, of which the last one is empty in the first calls: that padding falls into it shows later."""
    return Mixes(
        mean,
        lambda rows: (torch.randn(rows, 3), given([0, 2, rows, rows])),
        lambda rows: (torch.randn(rows, 3), given([0, 1, 2, rows])),
    )


MIXES: dict[str, Callable[[], Mixes]] = {
    "rows_mixed": lambda: Mixes(lambda x: x - x.mean(0)),
    "rows_mixed: softmax": lambda: Mixes(lambda x: x.softmax(0)),
    "rows_mixed: sort": lambda: Mixes(lambda x: x.sort(0).values),
    "rows_mixed: number": lambda: Mixes(lambda x: x / x.shape[0]),
    "rows_mixed_for_some_data": lambda: Mixes(lambda x: x - x.amax(0), positive, large),
    "rows_mixed_for_some_data: argsort": lambda: Mixes(lambda x: x.argsort(0) * 1.0, positive, large),
    "rows_mixed_for_some_data: quantization": lambda: Mixes(
        lambda x: (x / x.abs().amax() * 127).round(), positive, large
    ),
    "rows_mixed_for_some_data: rank": lambda: Mixes(lambda x: (x[:, None] < x[None]).sum(1) * 1.0, positive, large),
    "rows_mixed_for_some_data: masked": lambda: Mixes(
        lambda x: x.masked_fill(x == 0, -1e9).softmax(0), positive, large
    ),
    "rows_mixed_for_some_data: capacity": lambda: Mixes(
        lambda x: torch.where((x[:, :1] < 0).cumsum(0) <= len(x) // 2, x, 0.0), positive, large
    ),
    "rows_mixed_unseen": lambda: Mixes(lambda x: x + x.long().abs().amin(), near_zero, positive),
    "rows_mixed_later": opens_later,
    "rows_mixed_by_argument": lambda: Mixes(
        _gated, lambda rows: (*one_tensor(rows), torch.tensor(0.0)), lambda rows: (*one_tensor(rows), torch.tensor(1.0))
    ),
    "rows_mixed_by_offsets": lambda: by_offsets(_mean_of_number, torch.tensor),
    "rows_mixed_by_offsets: starts": lambda: by_offsets(_by_starts, lambda ends: torch.tensor(ends[:-1])),
    "rows_mixed_by_offsets: lengths": lambda: by_offsets(_by_lengths, lambda ends: torch.tensor(ends).diff()),
}


@needs("padding")
@pytest.mark.parametrize("name", MIXES)
@FIRST
def test_rows_mixed(opened: Open, name: str, first: int) -> None:
    """A model that mixes rows, or computes with how many there are, is found when it is captured, whatever the first
    batches and state hold: padded batches run eagerly, also after full ones, which are served."""
    fn, early, late, between = MIXES[name]()
    step = opened(fn)
    step.prepare(*early(first))
    step.check_calls(*map(early, (first, first, first, 3, 3)))
    step.check_not_padded()
    between()
    for rows in (3, 3):
        step.check_calls(late(rows))
        step.check_not_padded()
    step.check_calls(late(4))
    assert step.was_hit() or first == 3


def test_rows_mixed_instead(opened: Open) -> None:
    """With exact sizes alone, which a ladder of every size gives, such a model is served."""
    step = opened(lambda x: x - x.mean(0), sizes=(1, 2, 3, 4))
    for rows in (3, 4):
        step.prepare(torch.randn(rows, 3))
    step.check_calls(3, 3, 3, 4, 4, 4)
    assert step.hits >= 2


@needs("padding", "comparisons")
def test_rows_in_blocks(opened: Open) -> None:
    """A batch whose last block of rows is not full runs eagerly, as any padded one."""
    step = opened(lambda x: torch.cat([part - part.amax(0) for part in x.split(32)]), sizes=(128,))
    step.prepare(torch.randn(128, 3))
    step.check_calls(128, 96, 96, 96, 100)
    step.check_not_padded()


@needs("padding", "pad_rules")
@pytest.mark.parametrize("pad", [7.0, 0.0])
def test_pad_rule_not_neutral(opened: Open, pad: float) -> None:
    """Whatever the rule of the user's is: rows mix."""
    step = opened(lambda x: x + x.amax(0).clamp(max=0.3), pad={"x": pad})
    step.prepare(*positive(3))
    step.check_calls(*map(positive, [3] * 4))
    step.check_not_padded()
    step.check_calls(large(3))


@needs("padding")
def test_batch_norm_training(opened: Open) -> None:
    """Batch norm in training mode mixes rows: full batches only, with statistics as eager leaves them."""
    model, eager = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    step = opened(model, dynamic={"input": 0})
    step.prepare(torch.randn(4, 3))
    step.check_calls(4, 4, 4, 3, fn=eager)
    assert torch.equal(model.running_var, eager.running_var)
    assert int(model.num_batches_tracked) == step.calls
    step.check_not_padded()


SLOTS = {"dynamic": {"x": 0, "slot": 0}}
ONE = torch.ones(())
"""What is written to a place: a Python number would be copied to the device, which a capture refuses."""


def in_slots(*slots: Any) -> list[tuple[Tensor, ...]]:
    """Batches with such slots."""
    return [(torch.randn(len(one), 3), torch.tensor([*one])) for one in slots]


def check_writes(opened: Open, write: Callable[..., Tensor], batches: list[tuple[Tensor, ...]], **how: Any) -> None:
    """Answers and state are eager's, of each batch; no graph serves the last one."""
    mine, eager = torch.zeros(10, 3), torch.zeros(10, 3)
    step = opened(partial(write, mine), **how)
    step.prepare(*batches[0])
    for args in batches:
        mine.zero_(), eager.zero_()
        step.check_calls(args, fn=partial(write, eager))
        assert torch.equal(mine, eager)
    step.check(Reason.PADDING_WRITES_STATE)


@needs("padding")
def test_padding_writes_cache(opened: Open) -> None:
    """Padding that points at a slot is refused even while that slot holds what padding would write."""
    batches = in_slots([5, 6, 7], [6, 7, 8], [5, 6, 8], [0, 1, 2, 3], [5, 6, 7])
    check_writes(opened, lambda held, x, slot: held.index_copy_(0, slot, x)[slot] * 2, batches, **SLOTS)


@needs("padding")
@FIRST
def test_padding_writes_used_slot(opened: Open, first: int) -> None:
    """While each batch names slot 0, padding of zeros does no harm; that it will is found at the capture."""
    batches = in_slots(*[range(first)] * 3, [1, 2, 3], [5, 4, 3])
    check_writes(opened, lambda held, x, slot: (held.__setitem__(slot, ONE), x * 2)[1], batches, **SLOTS)


@needs("padding")
@FIRST
def test_padding_writes_bucket(opened: Open, first: int) -> None:
    """While each batch has a row in the bucket of padding, which hides what padding marks; later ones do not."""
    shapes = ((0, first), (0, first), (0, 3), (0, 3), (2, 3), (1, 2), (4, 3))
    batches = [(torch.rand(rows, 3) + low,) for low, rows in shapes]
    check_writes(opened, lambda held, x: (held.__setitem__(x[:, 0].clamp(0, 5).long(), ONE), x * 2)[1], batches)


@needs("padding", "pad_rules")
def test_padding_adds(opened: Open) -> None:
    """Copies of the last row add what that added: the answer is right while it adds nothing, and later it is not."""
    batches = [(torch.rand(3, 3) + low, torch.randperm(6)[:3]) for low in (0, 0, 0, 2, 2)]
    pad = {"x": "repeat_last", "slot": "repeat_last"}
    check_writes(
        opened, lambda held, x, slot: (held.index_add_(0, slot, (x > 1).float()), x * 2)[1], batches, pad=pad, **SLOTS
    )


@needs("padding")
def test_padding_writes_slice(opened: Open) -> None:
    """A write to as many rows as the batch has writes more of them when padded, and is refused."""
    state = torch.zeros(8, 3)
    step = opened(lambda x: (state[: x.shape[0]].copy_(x), x * 2)[1])
    step.prepare(torch.randn(3, 3))
    for rows in (3, 3, 4, 3):
        kept = state.clone()
        x = torch.randn(rows, 3)
        step(x)
        assert torch.equal(state, torch.cat([x, kept[rows:]]))
    step.check_not_padded()


@needs("padding")
@FIRST
def test_padding_renormalises(opened: Open, first: int) -> None:
    """Rows that are small enough at the capture show nothing; where padding writes is seen."""
    model, eager = (nn.Embedding(10, 3, max_norm=5.0) for _ in range(2))
    for one in (model, eager):
        one.weight.fill_(0.01)
    step = opened(model, dynamic={"input": 0})
    step.prepare(torch.tensor([1, 2, 3, 4][:first]))
    batches = ([1, 2, 3, 4][:first], [3, 1, 2, 4][:first], [4, 5, 6], [5, 4, 3])
    step.check_calls(*map(torch.tensor, batches), fn=eager)
    for one in (model, eager):
        one.weight.fill_(9.0)
    for ids in ([1, 2, 3], [1, 3, 4]):
        step.check_calls(torch.tensor(ids), fn=eager)
        assert torch.equal(model.weight, eager.weight)
        step.check_not_padded()
