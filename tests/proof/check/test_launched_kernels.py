"""Triton kernels that the model launches itself, on a stand-in for Triton's launcher: torch sees nothing of them."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import Reason
from graphdispatch.backends import operator_mode

from ...helpers import AT_ONCE, assert_same, check_calls, check_rows, make
from .test_padding import check_slots


class Kernel:
    """What ``triton.jit`` makes of a function, as far as its launches show: ``kernel[grid](*args)``."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **named: self.run(*args, grid=grid, warmup=False, **named)

    def run(self, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """Run it for each place of the grid, out of torch's sight."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            for place in range(grid[0]):
                self.fn(place, *args, **named)


@pytest.fixture(autouse=True)
def _launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain, module = Kernel.run, ModuleType(operator_mode.LAUNCHER)
    module.JITFunction = Kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, operator_mode.LAUNCHER, module)
    yield
    Kernel.run = plain  # type: ignore[method-assign]
    operator_mode._shown.discard(Kernel)


def copy_row(to: Tensor, at: int, row: Tensor) -> None:
    """By address: neither torch's modes nor the versions of tensors tell."""
    ctypes.memmove(to.data_ptr() + at * row.nbytes, row.data_ptr(), row.nbytes)


@Kernel
def double(place: int, source: Tensor, target: Tensor) -> None:
    """A row for each place."""
    copy_row(target, place, source[place] * 2)


@Kernel
def write_slot(place: int, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Each row into its slot."""
    copy_row(cache, int(slots[place]), rows[place])


@Kernel
def add_rows(place: int, source: Tensor, target: Tensor) -> None:
    """The sum of all rows."""
    copy_row(target, 0, source.sum(0))


@Kernel
def scale_row(place: int, source: Tensor, weight: Tensor, target: Tensor) -> None:
    """A row for each place, by a weight."""
    copy_row(target, place, source[place] * weight)


@Kernel
def clamp_row(place: int, rows: Tensor) -> None:
    """No number below zero."""
    copy_row(rows, place, rows[place].clamp(min=0))


@Kernel
def add_to(place: int, totals: tuple[Tensor], rows: Tensor) -> None:
    """The sum of the rows, into a tensor in a tuple."""
    copy_row(totals[0], 0, totals[0][0] + rows.sum(0))


@Kernel
def mark_slot(place: int, seen: Tensor, slots: Tensor) -> None:
    """Ones into each slot."""
    copy_row(seen, int(slots[place]), torch.ones_like(seen[0]))


class Cached(nn.Module):
    """Adds what each slot held before, and keeps the row there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(12, 4))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """``x`` of (rows, 4), ``slots`` of (rows,)."""
        before = self.cache[slots]
        write_slot[(len(slots),)](self.cache, slots, x.contiguous())
        return x + before


def doubled(x: Tensor) -> Tensor:
    """New memory, which the kernel alone fills."""
    out = torch.empty_like(x)
    double[(len(x),)](x, out)
    return out + 1


def summed(x: Tensor) -> Tensor:
    """Each row with the sum of all, which the kernel makes."""
    total = torch.empty(1, 4)
    add_rows[(1,)](x, total)
    return x + total


@pytest.mark.parametrize("is_word", [False, True])
@pytest.mark.parametrize("fn", [doubled, summed])
def test_an_answer_that_a_launched_kernel_writes(fn: Callable[[Tensor], Tensor], is_word: bool) -> None:
    """Exact sizes are served, since no rule describes a kernel; padded ones by the user's word, which a kernel that
    mixes rows does not keep."""
    step = make(fn, sizes=(4,), rows="independent" if is_word else "proven")
    check_rows(step, 4, 4, 4, 3, 2, 3, 2, width=4)
    is_padded = is_word and fn is doubled
    assert step.last_decision.reason.is_graph is is_padded, step.last_decision.explain()
    assert is_word or step.last_decision.reason is Reason.PADDING_UNPROVEN
    assert check_rows(step, 4, width=4) == [Reason.EXACT]


def test_padding_that_a_launched_kernel_would_write() -> None:
    """It is state, which padding must not write; so such a model is served where no row is padded."""
    model, twin = Cached(), Cached()
    step = make(model, dynamic={"x": 0, "slots": 0}, sizes=(4,), rows="independent")
    for rows in (3, 3, 3, 4, 3, 4, 3, 4, 4, 2, 3):
        check_calls(step, (torch.randn(rows, 4), torch.randperm(11)[:rows] + 1), fn=twin)
        assert_same(model.cache, twin.cache)
    assert step.stats.reasons[Reason.PADDING_WRITES_STATE] > 0, step.stats.reasons
    assert step.stats.hits > 0, step.stats.reasons


@pytest.mark.parametrize("padding_writes", ["refuse", "allow"])
def test_a_launched_kernel_that_takes_state_may_write_it(padding_writes: str) -> None:
    """Nobody sees that it only reads a weight: padded batches wait for the user's word for that, too."""
    weight = torch.randn(4)

    def scaled(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scale_row[(len(x),)](x, weight, out)
        return out + 1

    step = make(scaled, sizes=(4,), rows="independent", padding_writes=padding_writes)
    check_rows(step, 4, 4, 4, 3, 2, 3, 2, width=4)
    reason = step.last_decision.reason
    assert reason is (Reason.PADDED if padding_writes == "allow" else Reason.PADDING_WRITES_STATE)


@pytest.mark.parametrize("order", [[3, 3, 3], [4, 4, 4], [2, 2, 3], [3, 4, 3]], ids=str)
def test_slots_that_every_early_batch_writes(order: list[int]) -> None:
    """Padding of zeros writes what the first row writes, too; it must not when later batches leave that alone."""
    check_slots(lambda seen, slots: mark_slot[(len(slots),)](seen, slots), order, options=AT_ONCE)


def test_an_argument_that_a_kernel_writes_later() -> None:
    """While the first batches are as the kernel leaves them, nothing changes; later it does."""

    def clamped(x: Tensor) -> Tensor:
        clamp_row[(len(x),)](x)
        return x + 1

    step = make(clamped, sizes=(4,))
    for draw in (torch.rand, torch.rand, torch.rand, torch.randn, torch.randn, torch.randn):
        for rows in (4, 3):
            x = draw(rows, 4)
            wanted = x.clamp(min=0)
            assert_same((step(x), x), (wanted + 1, wanted))


def test_tensors_inside_of_other_arguments() -> None:
    """Nobody sees what such a kernel may write, so no graph is made."""
    total, wanted = torch.zeros(1, 4), torch.zeros(1, 4)

    def added(x: Tensor) -> Tensor:
        add_to[(1,)]((total,), x)
        return x + 1

    step = make(added, sizes=(4,))
    for x in torch.randn(4, 4, 4):
        step(x)
        wanted += x.sum(0)
    torch.testing.assert_close(total, wanted)
    assert step.last_decision.reason is Reason.CAPTURE_UNSAFE
