"""State that rows write at places which they name: which reads mix rows, and what the verdict says of the writes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .runs import Batch, by_rows, judge

SLOTS, COLUMNS = 10, 6
FIXED = torch.tensor([3])
Step = Callable[[Tensor, Tensor, Tensor], Any]


def _batch(n: int) -> Batch:
    x, i = torch.randn(n, COLUMNS), torch.randint(0, COLUMNS, (n,))
    return by_rows(x, i, others=[torch.zeros(SLOTS, COLUMNS)])


def _pages(cache: Tensor) -> Tensor:
    return cache.view(5, 2, COLUMNS)


WRITES: dict[str, Step] = {
    "slots": lambda x, i, cache: cache.index_copy_(0, i, x),
    "slots by index": lambda x, i, cache: cache.__setitem__(i, x),
    "filled": lambda x, i, cache: cache.index_fill_(0, i, 1.0),
    "in pages": lambda x, i, cache: _pages(cache).__setitem__((i // 2, i % 2), x),
}
OF_SLOTS: dict[str, Step] = {
    "own": lambda x, i, cache: cache[i],
    "selected": lambda x, i, cache: cache.index_select(0, i),
    "embedded": lambda x, i, cache: nn.functional.embedding(i, cache),
    "gathered": lambda x, i, cache: cache.gather(0, i[:, None].expand(-1, COLUMNS)),
    "an element of its own at a fixed column": lambda x, i, cache: cache[i, FIXED],
    "its page": lambda x, i, cache: _pages(cache)[i // 2].sum(1),
    "of a view": lambda x, i, cache: cache[:, 1:4][i],
    "of a transposed view": lambda x, i, cache: cache.t()[:, i].t(),
    "by an index that was written": lambda x, i, cache: cache[torch.zeros_like(i).copy_(i)],
}
OF_OTHERS: dict[str, Step] = {
    "one slot": lambda x, i, cache: cache[FIXED],
    "one slot at its own column": lambda x, i, cache: cache[FIXED, i][:, None],
    "one slot, selected": lambda x, i, cache: cache.index_select(0, FIXED),
    "its column": lambda x, i, cache: cache[:, i].t(),
    "a slot of each page": lambda x, i, cache: _pages(cache)[:, i % 2].sum(0),
    "a slot of one page": lambda x, i, cache: _pages(cache)[FIXED, i % 2],
    "one slot for each row": lambda x, i, cache: cache[torch.zeros_like(i)],
    "one slot for each row, filled": lambda x, i, cache: cache[torch.empty_like(i).fill_(3)],
    "one slot for each row at its own column": lambda x, i, cache: cache[FIXED.expand(len(i)), i][:, None],
    "all": lambda x, i, cache: cache.sum(0),
    "of a copy": lambda x, i, cache: (cache * 2)[i],
    "a copy of another shape": lambda x, i, cache: (cache[:, None] * torch.ones(2, 1))[i][:, 0],
    "one slot of a copy": lambda x, i, cache: torch.zeros(SLOTS, COLUMNS).copy_(cache)[FIXED],
    "windows": lambda x, i, cache: cache.unfold(0, 2, 1)[i % 9].sum(-1),
    "a product": lambda x, i, cache: x @ cache.t() @ cache,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", OF_SLOTS)
def test_rows_read_what_they_name(write: str, read: str) -> None:
    """A read by rows among all slots leaves them independent, and so does a read before the write."""
    for order in (1, -1):

        def step(x: Tensor, i: Tensor, cache: Tensor, order: int = order) -> Any:
            return [part(x, i, cache) for part in (WRITES[write], OF_SLOTS[read])[::order]][::order][1] * 1

        verdict = judge(step, _batch)
        assert (verdict.mixes, verdict.unknown) == ("", "")


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", OF_OTHERS)
def test_rows_may_read_nothing_else_of_what_they_wrote(write: str, read: str) -> None:
    """Padding may have written there: in this call, or in one before."""
    for order in (1, -1):

        def step(x: Tensor, i: Tensor, cache: Tensor, order: int = order) -> Any:
            parts = [part(x, i, cache) for part in (WRITES[write], OF_OTHERS[read])[::order]]
            return x.sum(-1, keepdim=True) + parts[::order][1]

        verdict = judge(step, _batch)
        assert verdict.mixes or verdict.unknown


def test_a_column_that_rows_named_is_read_as_such() -> None:
    """Where rows name a column of a fixed slot, they may read such a column, and not a slot as a whole."""

    def write(x: Tensor, i: Tensor, cache: Tensor) -> None:
        cache[FIXED, i] = x[:, 0]

    assert judge(lambda x, i, c: (write(x, i, c), x[:, 0] + c[FIXED, i])[1], _batch).mixes == ""
    assert judge(lambda x, i, c: (write(x, i, c), x + c[i])[1], _batch).mixes
    assert judge(lambda x, i, c: (write(x, i, c), x + c[FIXED])[1], _batch).mixes


@pytest.mark.parametrize(
    "write",
    [
        lambda x, i, cache: cache.__setitem__(torch.zeros_like(i), x),
        lambda x, i, cache: cache.index_copy_(0, torch.full((len(i),), 3), x),
        lambda x, i, cache: cache.index_add_(0, FIXED.expand(len(i)), x),
    ],
)
def test_rows_may_not_write_one_place_all_of_them(write: Step) -> None:
    """What lies there afterwards is that of the last row, or of all: of padding."""
    assert "rows write at one place" in judge(lambda x, i, cache: (write(x, i, cache), x * 2)[1], _batch).mixes


@pytest.mark.parametrize(
    ("write", "adds"),
    [
        (lambda x, i, c: c.index_copy_(0, i, x), False),
        (lambda x, i, c: c.index_fill_(0, i, 1.0), False),
        (lambda x, i, c: c.__setitem__(i, x), False),
        (lambda x, i, c: c.index_add_(0, i, x), True),
        (lambda x, i, c: c.index_put_((i,), x, accumulate=True), True),
    ],
)
def test_the_verdict_names_the_write(write: Step, adds: bool) -> None:
    """Where it happens, along which axes, and whether a row that comes twice leaves something else."""
    slots = judge(lambda x, i, c: (write(x, i, c), x * 2)[1], _batch).slots
    assert (slots.axes, slots.adds) == ({0}, adds)
    assert "test_slots.py:" in slots.where


def test_places_that_no_row_names_are_no_slots() -> None:
    """What each call writes at the same place, whatever its rows are."""
    slots = judge(lambda x, i, c: (c.index_add_(0, FIXED, torch.ones(1, COLUMNS)), x * 2)[1], _batch).slots
    assert (slots.where, slots.axes) == ("", set())


def test_a_length_names_places_too() -> None:
    """Padding along it would write."""

    def make(n: int, s: int) -> Batch:
        i = torch.randint(0, SLOTS, (n, s))
        return (i, torch.zeros(SLOTS)), [(i, {0: 0, 1: 1})]

    verdict = judge(lambda i, c: (c.__setitem__(i, 1.0), i * 2)[1], make, own=(7, 11))
    assert (verdict.slots.axes, verdict.mixed_axes) == ({0, 1}, {1})
