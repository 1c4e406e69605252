"""Padding rows: models that mix rows, and caches that padding would write to."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphdispatch import Reason, graphed

from .features import needs
from .front_end import Open


def positive(rows: int) -> tuple[torch.Tensor]:
    """A batch of numbers above one."""
    return (torch.rand(rows, 3) + 1,)


MIXERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "softmax": lambda x: x.softmax(0),
    "sort": lambda x: x.sort(0).values,
    "number": lambda x: x / x.shape[0],
}


@needs("padding")
@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
@pytest.mark.parametrize("first", [3, 4], ids=["padded-first", "full-first"])
def test_rows_mixed(opened: Open, mixer: Callable[[torch.Tensor], torch.Tensor], first: int) -> None:
    """A model that mixes rows, or computes with how many there are, is found when it is captured; padded batches run
    eagerly, also after full ones, which are served."""
    step = opened(mixer)
    step.prepare(torch.randn(first, 3))
    step.check_calls(first, first, first, 3, 3)
    step.check_not_padded()
    step.check_calls(4)
    assert step.was_hit() or first == 3


def test_rows_mixed_instead(opened: Open) -> None:
    """With exact sizes alone, which a ladder of every size gives, such a model is served."""
    step = opened(MIXERS["mean"], sizes=(1, 2, 3, 4))
    for rows in (3, 4):
        step.prepare(torch.randn(rows, 3))
    step.check_calls(3, 3, 3, 4, 4, 4)
    assert step.hits >= 2


MIXED_FOR_SOME_DATA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "maximum": lambda x: x - x.amax(0),
    "argsort": lambda x: x.argsort(0) * 1.0,
    "quantization": lambda x: (x / x.abs().amax() * 127).round(),
    "rank": lambda x: (x[:, None] < x[None]).sum(1) * 1.0,
    "masked_softmax": lambda x: x.masked_fill(x == 0, -1e9).softmax(0),
    "capacity": lambda x: torch.where((x[:, :1] < 0).cumsum(0) <= len(x) // 2, x, 0.0),
}


@needs("padding")
@pytest.mark.parametrize("fn", MIXED_FOR_SOME_DATA.values(), ids=MIXED_FOR_SOME_DATA)
@pytest.mark.parametrize("first", [3, 4], ids=["padded-first", "full-first"])
def test_rows_mixed_for_some_data(opened: Open, fn: Callable[[torch.Tensor], torch.Tensor], first: int) -> None:
    """Zero padding changes no row of the first batches, and would change rows of later ones."""
    step = opened(fn)
    step.prepare(torch.rand(first, 3) + 1)
    step.check_calls(*(torch.rand(rows, 3) + 1 for rows in (first, first, 4, 3, 3, 2)))
    for x in (-torch.rand(3, 3) - 1, torch.randn(3, 3) * 200):
        step.check_calls(x)
        step.check_not_padded()


@needs("padding")
@pytest.mark.parametrize("first", [3, 4], ids=["padded-first", "full-first"])
def test_rows_mixed_unseen(opened: Open, first: int) -> None:
    """Each early batch holds numbers near zero, so that padding of zeros changes nothing."""
    step = opened(lambda x: x + x.long().abs().amin())
    place = torch.tensor([[0.01], [1.0], [1.0], [1.0]])
    step.prepare((torch.rand(4, 3) * 7 * place)[:first])
    step.check_calls(*((torch.rand(4, 3) * 7 * place)[:rows] for rows in (first, first, 4, 3, 3, 2)))
    for rows in (3, 2, 3):
        step.check_calls(torch.rand(rows, 3) * 7 + 2)
        step.check_not_padded()


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
    step.check_calls(*(positive(3) for _ in range(4)))
    step.check_not_padded()
    step.check_calls(-torch.rand(3, 3) - 1)


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


def cache(slots: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Writes each row to its slot and reads it back."""
    return lambda x, slot: slots.index_copy_(0, slot, x)[slot] * 2


@needs("padding")
def test_padding_writes_cache(opened: Open) -> None:
    """Padding that points at a slot is refused even while that slot holds what padding would write."""
    mine, eager = torch.zeros(10, 3), torch.zeros(10, 3)
    step = opened(cache(mine), dynamic={"x": 0, "slot": 0})
    step.prepare(torch.randn(3, 3), torch.tensor([5, 6, 7]))
    for slots in ([5, 6, 7], [6, 7, 8], [5, 6, 8], [0, 1, 2, 3], [5, 6, 7]):
        step.check_calls((torch.randn(len(slots), 3), torch.tensor(slots)), fn=cache(eager))
        assert torch.equal(mine, eager)
    step.check(Reason.PADDING_WRITES_STATE)


@needs("padding")
@pytest.mark.parametrize("first", [3, 4], ids=["padded-first", "full-first"])
def test_padding_writes_used_slot(opened: Open, first: int) -> None:
    """While each batch names slot 0, padding of zeros does no harm; that it will is found at the capture."""
    seen, wanted, one = torch.zeros(6), torch.zeros(6), torch.ones(())

    def fn(x: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        seen[slot] = one  # a Python number would be copied to the device, which a capture refuses
        return x * 2

    step = opened(fn, dynamic={"x": 0, "slot": 0})
    step.prepare(torch.randn(first, 3), torch.arange(first))
    for slots in (range(first), range(first), range(first), [1, 2, 3], [5, 4, 3]):
        seen.zero_()
        x, slot = torch.randn(len(slots), 3), torch.tensor(list(slots))
        assert torch.equal(step(x, slot), x * 2)
        assert torch.equal(seen, wanted.index_fill(0, slot, 1.0))
    step.check(Reason.PADDING_WRITES_STATE)


@needs("padding")
@pytest.mark.parametrize("first", [3, 4], ids=["padded-first", "full-first"])
def test_padding_writes_bucket(opened: Open, first: int) -> None:
    """While each batch has a row in the bucket of padding, which hides what padding marks; later ones do not."""
    seen, one = torch.zeros(6), torch.ones(())

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.zero_()
        seen[x[:, 0].clamp(0, 5).long()] = one
        return x * 2

    step = opened(fn)
    step.prepare(torch.rand(first, 3))
    for low, rows in ((0, first), (0, first), (0, 3), (0, 3), (2, 3), (1, 2), (4, 3)):
        x = torch.rand(rows, 3) + low
        assert torch.equal(step(x), x * 2)
        assert torch.equal(seen, torch.zeros(6).index_fill(0, x[:, 0].long(), 1.0))
    step.check(Reason.PADDING_WRITES_STATE)


@needs("padding", "pad_rules")
def test_padding_adds(opened: Open) -> None:
    """Copies of the last row add what that added: the answer is right while it adds nothing, and later it is not."""
    mine, eager = torch.zeros(6), torch.zeros(6)

    def adds(held: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda x, slot: (held.index_add_(0, slot, (x[:, 0] > 1).float()), x * 2)[1]

    step = opened(adds(mine), dynamic={"x": 0, "slot": 0}, pad={"x": "repeat_last", "slot": "repeat_last"})
    step.prepare(torch.rand(3, 3), torch.arange(3))
    for low in (0, 0, 0, 2, 2):
        step.check_calls((torch.rand(3, 3) + low, torch.randperm(6)[:3]), fn=adds(eager))
        assert torch.equal(mine, eager)
    step.check(Reason.PADDING_WRITES_STATE)


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


def _gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x + gate * x.mean(0)


@needs("padding")
@pytest.mark.parametrize("first", [3, 4], ids=["padded-first", "full-first"])
def test_rows_mixed_later(opened: Open, first: int) -> None:
    """A gate of zeros hides nothing at the capture, so that rows cannot mix once it opens."""
    gate = torch.zeros(3)
    step = opened(lambda x: _gated(x, gate))
    step.prepare(torch.randn(first, 3))
    step.check_calls(first, first, first, 3, 3)
    step.check_not_padded()
    gate.fill_(1)
    step.check_calls(3, 4, 3)


@needs("padding")
@pytest.mark.parametrize("first", [3, 4], ids=["padded-first", "full-first"])
def test_rows_mixed_by_argument(opened: Open, first: int) -> None:
    """So is an argument without rows that is zero in the first calls."""
    step = opened(_gated)
    step.prepare(torch.randn(first, 3), torch.tensor(0.0))
    step.check_calls(*((torch.randn(rows, 3), torch.tensor(0.0)) for rows in (first, first, first, 3, 3)))
    step.check_not_padded()
    step.check_calls(*((torch.randn(rows, 3), torch.tensor(1.0)) for rows in (3, 4, 3)))


def _mean_of_number(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The mean of each row's segment, as a bag's: rows behind the last end count as the last segment's."""
    counts = torch.cat([ends[1:-1].diff(prepend=ends[:1]), len(x) - ends[-2:-1]])
    segments = torch.searchsorted(ends[1:], torch.arange(len(x)), right=True).clamp(max=len(ends) - 2)
    return x / counts[segments][:, None]


def _by_starts(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return _mean_of_number(x, torch.cat([starts, starts.new_full((1,), 1 << 30)]))


def _by_lengths(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return _mean_of_number(x, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))


MEANS_BY_OFFSETS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[list[int]], torch.Tensor]]] = {
    "ends": (_mean_of_number, torch.tensor),
    "starts": (_by_starts, lambda ends: torch.tensor(ends[:-1])),
    "lengths": (_by_lengths, lambda ends: torch.tensor(ends).diff()),
}


@needs("padding")
@pytest.mark.parametrize("form", MEANS_BY_OFFSETS)
@pytest.mark.parametrize("first", [3, 4], ids=["padded-first", "full-first"])
def test_rows_mixed_by_offsets(opened: Open, first: int, form: str) -> None:
    """A last segment that is empty in the first calls hides that padding falls into it."""
    mean, given = MEANS_BY_OFFSETS[form]
    step = opened(mean)
    step.prepare(torch.randn(first, 3), given([0, 2, first, first]))
    hiding = ((torch.randn(rows, 3), given([0, 2, rows, rows])) for rows in (first, first, first, 3, 3, 3))
    step.check_calls(*hiding)
    step.check_not_padded()
    step.check_calls(*((torch.randn(rows, 3), given([0, 1, 2, rows])) for rows in (3, 4, 3)))


@pytest.mark.parametrize("form", MEANS_BY_OFFSETS)
@pytest.mark.parametrize("is_state", [False, True], ids=["argument", "state"])
def test_rows_mixed_by_offsets_ahead(is_state: bool, form: str) -> None:
    """A full batch is captured ahead; in the first padded one the last segment is empty."""
    mean, given = MEANS_BY_OFFSETS[form]
    ends = given([0, 1, 2, 4])
    serve = graphed((lambda x: mean(x, ends)) if is_state else mean, dynamic={"x": 0}, sizes=[4])
    serve.prewarm(torch.randn(4, 3), *(() if is_state else (ends,)))
    for held in ([0, 2, 3, 3], [0, 2, 3, 3], [0, 1, 2, 3]):
        x, now = torch.randn(3, 3), given(held)
        ends.copy_(now)
        torch.testing.assert_close(serve(x, *(() if is_state else (now,))), mean(x, now))


@needs("padding")
@pytest.mark.parametrize("first", [3, 4], ids=["padded-first", "full-first"])
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
