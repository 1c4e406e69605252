"""``EffectRecorder``: what a run writes that is not its own can be undone, and done again."""

import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from graphdispatch import Reason
from graphdispatch.backends import get_backend
from graphdispatch.errors import CaptureError
from graphdispatch.proof.watch.effects import (
    EffectRecorder,
    first_uncovered,
    redo,
    retry_once,
    undo,
)

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")
LIMIT = 1 << 20
Write = Callable[[torch.Tensor], object]
FEW, OTHERS = torch.tensor([1, 2]), torch.tensor([0, 3])


def _written(write: Write, state: torch.Tensor) -> EffectRecorder:
    with EffectRecorder(LIMIT).watching() as effects:
        write(state)
    return effects


BY_INDEX: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "index_fill": lambda s, i: s.index_fill_(0, i, 9.0),
    "index_reduce": lambda s, i: s.index_reduce_(0, i, torch.full((2, 3), 9.0), "amax"),
    "embedding_renorm": lambda s, i: torch.embedding_renorm_(s, i, 0.1, 2.0),
    "scatter": lambda s, i: s.scatter_(0, i[:, None], 9.0),
    "scatter_src": lambda s, i: s.t().scatter_(1, i[None], torch.full((1, 2), 9.0)),
    "scatter_add": lambda s, i: s.scatter_add_(0, i[:, None], torch.full((2, 1), 9.0)),
    "scatter_reduce": lambda s, i: s.scatter_reduce_(0, i[:, None], torch.full((2, 1), 9.0), "amax"),
    "put": lambda s, i: s.put_(i * 3 - 12, torch.full((2,), 9.0)),
    "masked_fill": lambda s, i: s.masked_fill_((torch.arange(4)[:, None] == i).any(1, keepdim=True), 9.0),
    "masked_scatter": lambda s, i: s.masked_scatter_((torch.arange(4)[:, None] == i).any(1)[:, None], torch.ones(6)),
}
"""Writes by indices or by a mask of rows."""
WRITES: dict[str, Write] = {
    **{name: partial(write, i=FEW) for name, write in BY_INDEX.items()},
    "add": lambda s: s.add_(1),
    "slice": lambda s: s[1:3].fill_(7),
    "index_put": lambda s: s.__setitem__(torch.tensor([0, 3]), 5.0),
    "index_put_negative": lambda s: s.__setitem__((torch.tensor([-1]), torch.tensor([0, 1])), 5.0),
    "index_put_column": lambda s: s.__setitem__((slice(None), torch.tensor([1, 2])), 5.0),
    "index_copy": lambda s: s.index_copy_(0, torch.tensor([2, 1]), torch.ones(2, 3)),
    "index_copy_columns": lambda s: s.index_copy_(1, torch.tensor([2, 0]), torch.ones(4, 2)),
    "out": lambda s: torch.add(s, 1, out=s),
    "overlapping_views": lambda s: (s[:3].add_(1), s[1:].mul_(3), s[2].zero_()),
    "index_then_whole": lambda s: (s.__setitem__(torch.tensor([0]), 5.0), s.add_(1)),
    "whole_then_index": lambda s: (s.add_(1), s.__setitem__(torch.tensor([0]), 5.0)),
    "random": lambda s: s.normal_(),
    "foreach": lambda s: torch._foreach_add_([s[0], s[2]], 1.0),
    "numpy": lambda s: s.numpy().fill(5),
    "storage": lambda s: s.untyped_storage().fill_(5),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_undo_and_redo(write: Write, mode: Callable[[], Any]) -> None:
    """Undoing puts back what was there before the run, redoing what was there after it."""
    state = torch.randn(4, 3)
    before = state.clone()
    with mode():
        effects = _written(write, state)
    after = state.clone()
    for region in effects.regions:
        region.after = region.read().clone()
    assert not torch.equal(before, after)
    undo(effects.regions)
    assert torch.equal(state, before)
    redo(effects.regions)
    assert torch.equal(state, after)


def test_indexed_write_saves_only_its_rows() -> None:
    """A write to two rows of a large cache saves two rows."""
    effects = _written(lambda s: s.index_copy_(0, torch.tensor([3, 900]), torch.ones(2, 4)), torch.zeros(1000, 4))
    assert [region.before.numel() for region in effects.regions] == [8]


def test_own_memory_is_not_saved() -> None:
    """Writes to what the run made itself are nobody else's business, and reads no writes."""

    def run(x: torch.Tensor) -> None:
        (x * 2).add_(1)
        torch.zeros(3)[1:].fill_(2.0)
        torch.tensor([1.0]).add_(1)
        (x * 2).numpy().fill(5)
        x.numpy().sum()  # what is only read

    assert _written(run, torch.ones(3)).regions == []


def test_a_generator_of_the_models_own_is_put_back() -> None:
    """Drawing from it is an effect, and a write to what the run made is none."""
    generator = torch.Generator()
    before = generator.get_state()
    effects = _written(lambda s: s.normal_(generator=generator), torch.zeros(3))
    undo(effects.regions)
    assert torch.equal(generator.get_state(), before)
    assert effects.may_leave_effects
    assert not _written(lambda s: s.clone().add_(1), torch.zeros(3)).may_leave_effects


def test_memory_that_is_freed_or_moved_cannot_be_put_back() -> None:
    """That of others, while a run may free what it has made."""
    for free in (lambda s: s.untyped_storage().resize_(0), lambda s: s.share_memory_()):
        assert _written(free, torch.ones(3)).given_up is not None
    assert _written(lambda s: (s * 2).untyped_storage().resize_(4), torch.ones(3)).given_up is None


def test_numbers_may_look_unwritten() -> None:
    """Bytes mark memory that nothing wrote, where the run made such; many numbers of one byte are alike."""
    numbers = torch.full((2,), 0x5B5B5B5B, dtype=torch.int32)
    effects = _written(lambda _: torch.empty(3), numbers)
    assert effects.unwritten(numbers).all()
    assert effects.unwritten(numbers.view(torch.uint8)) is None
    assert effects.unwritten(numbers.to_sparse()) is None
    assert _written(lambda s: s.clone(), numbers).unwritten(numbers) is None


@pytest.mark.parametrize("run", [None, torch.batch_norm_update_stats])
def test_batch_norm_statistics_are_saved(run: Any) -> None:
    """Running statistics, which the operator's schema does not mark as written, are put back."""
    norm = torch.nn.BatchNorm1d(3)
    before = norm.running_mean.clone()
    update = partial(run, running_mean=norm.running_mean, running_var=norm.running_var, momentum=0.1) if run else norm
    effects = _written(update, torch.randn(4, 3))
    assert not torch.equal(norm.running_mean, before)
    undo(effects.regions)
    assert torch.equal(norm.running_mean, before)
    assert int(norm.num_batches_tracked) == 0


def test_a_run_that_writes_too_much() -> None:
    """One that must be undone stops before the write that could not be; another one goes on, and is marked."""
    state = torch.zeros(1000)
    with EffectRecorder(100) as effects:
        state.add_(1)
    assert isinstance(effects.given_up, CaptureError)
    assert bool(state.all())
    state.zero_()
    with pytest.raises(CaptureError, match="state_limit_bytes=100") as caught, EffectRecorder(100, strict=True):
        state.add_(1)
    assert caught.value.reason is Reason.STATE_TOO_LARGE
    assert not bool(state.any())


@pytest.mark.parametrize(
    ("padded", "real", "is_uncovered"),
    [
        (lambda s: s[:3].add_(1), lambda s: s[:2].add_(1), True),
        (lambda s: s[:2].add_(1), lambda s: s[:3].add_(1), False),
        (lambda s: s.add_(1), lambda s: s.add_(1), False),
        (lambda s: s.add_(1), lambda s: (s[:2].add_(1), s[2:].add_(1)), False),
        (lambda s: s.index_fill_(0, torch.tensor([0, 1]), 1), lambda s: s[:2].add_(1), False),
        (lambda s: s.index_fill_(0, torch.tensor([0, 3]), 1), lambda s: s[:2].add_(1), True),
        (lambda s: s.__setitem__(torch.tensor([-1]), 1), lambda s: s[3].add_(1), False),
        (lambda s: s.index_fill_(1, torch.tensor([2]), 1), lambda s: s[:, 1].add_(1), True),
    ],
)
def test_writes_elsewhere_are_found(padded: Write, real: Write, is_uncovered: bool) -> None:
    """A run is compared with another by the elements that they write, not by the values."""
    state = torch.zeros(4, 3)
    found = first_uncovered(_written(padded, state).regions, _written(real, state).regions)
    assert (found is not None) is is_uncovered


@pytest.mark.parametrize("write", BY_INDEX.values(), ids=BY_INDEX)
def test_writes_by_index_are_distinguished(write: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """What an operator writes by indices or a mask is compared by the elements alone."""
    state = torch.full((4, 3), 5.0)
    few, others = (_written(partial(write, i=rows), state).regions for rows in (FEW, OTHERS))
    assert first_uncovered(others, few) is not None
    assert first_uncovered(others, others) is None
    assert first_uncovered(_written(lambda s: s.add_(1), state).regions, few) is not None


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.5, True)])
def test_attention_draws_only_for_its_dropout(dropout: float, draws: bool) -> None:
    """Its operators are tagged as ones that draw; where nothing is dropped, other threads may draw meanwhile."""
    attend = torch.nn.functional.scaled_dot_product_attention
    effects = _written(lambda q: attend(q, q, q, dropout_p=dropout), torch.randn(2, 4, 8, 16))
    assert effects.uses_rng is draws


def _time_limit(*_: Any) -> None:
    raise TimeoutError


@pytest.mark.parametrize(
    ("first", "second", "raised"),
    [
        (RuntimeError, None, None),
        (RuntimeError, ValueError, ValueError),
        (KeyboardInterrupt, None, KeyboardInterrupt),
        (signal.SIGUSR1, None, TimeoutError),
    ],
)
def test_putting_back_is_tried_twice(first: Any, second: Any, raised: Any) -> None:
    """The second time counts; but nobody swallows what stops the program, or a signal's handler raised."""
    faults = [second, first]

    def put_back() -> None:
        fault = faults.pop()
        if isinstance(fault, signal.Signals):
            signal.raise_signal(fault)
        elif fault is not None:
            raise fault

    before = signal.signal(signal.SIGUSR1, _time_limit)
    try:
        with pytest.raises(raised) if raised else nullcontext():
            retry_once(put_back, get_backend("cpu"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not faults
