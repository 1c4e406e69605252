"""Reads and writes at places that a tensor names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .runs import Batch, judge

D = 6
FIXED, ONE = torch.tensor([0, 2, 4]), torch.tensor(2)
TABLE = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))


def _rows(n: int) -> Batch:
    x, i = torch.randn(n, D), torch.randint(0, D, (n,))
    return (x, i), {}, [(x, {0: 0}), (i, {0: 0})]


def _put(x: Tensor, place: Any, value: Any) -> Tensor:
    y = x * 1
    y[place] = value
    return y


def _places_of(x: Tensor) -> Tensor:
    """The place of each row among all, which only an index may use."""
    return x[:, 0].argsort().argsort()


INDEPENDENT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flags of rows": lambda x, i: _put(x, x[:, 0] > 0, 1.0),
    "flags of elements": lambda x, i: _put(x, x > 0, 1.0),
    "columns by a list": lambda x, i: _put(x, (slice(None), FIXED), 1.0),
    "one column of each row": lambda x, i: _put(x, (torch.arange(x.shape[0]), i), x[:, 0]),
    "columns selected": lambda x, i: x.index_select(1, FIXED),
    "a column selected": lambda x, i: x.index_select(1, ONE),
    "rows of a table selected": lambda x, i: TABLE.index_select(0, i),
    "own rows selected": lambda x, i: x.index_select(0, torch.arange(x.shape[0])),
    "columns copied": lambda x, i: x.index_copy(1, FIXED, x[:, :3]),
    "own rows added": lambda x, i: x.index_add(0, torch.arange(x.shape[0]), x),
    "columns filled": lambda x, i: x.index_fill(1, FIXED, 1.0),
    "columns gathered": lambda x, i: x.gather(1, i[:, None]),
    "columns scattered": lambda x, i: x.scatter(1, i[:, None], x[:, :1]),
    "columns scattered and added": lambda x, i: x.scatter_add(1, i[:, None], x[:, :1]),
}
SHAPES = {"a column selected": (0, 1), "columns selected": (0, 3), "rows of a table selected": (0, 4)}

MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows by a list": lambda x, i: _put(x, FIXED, 1.0),
    "flags of rows on a table": lambda x, i: _put(torch.zeros(7, D), x[:, 0] > 0, 1.0)[:1] + x,
    "rows into a column": lambda x, i: _put(torch.zeros(7), i, x[:, 0])[:1] + x,
    "a row for all": lambda x, i: x + x.index_select(0, ONE),
    "rows copied": lambda x, i: x.index_copy(0, FIXED, x[:, :3].T.contiguous().repeat(1, 1)[:, :D]),
    "rows filled": lambda x, i: x.index_fill(0, FIXED, 1.0),
    "rows added": lambda x, i: x.index_add(0, i, x),
    "places as values": lambda x, i: _put(x.long(), (slice(None), ONE), _places_of(x)),
    "places copied": lambda x, i: x.long().index_copy(1, ONE[None], _places_of(x)[:, None]),
    "places filled": lambda x, i: _places_of(x).index_fill(0, torch.arange(x.shape[0]), 0) + i,
    "places overwritten": lambda x, i: _places_of(x)[:, None].index_copy(1, ONE[None] * 0, i[:, None]),
    "places put": lambda x, i: torch.index_put(_places_of(x)[:, None], (x > 9).nonzero().unbind(1), ONE),
    "places selected": lambda x, i: _places_of(x)[:, None].index_select(1, ONE[None] * 0),
    "places as columns": lambda x, i: x[torch.arange(x.shape[0]), _places_of(x).clamp(max=D - 1)],
    "a table by places": lambda x, i: TABLE[_places_of(x)],
    "an embedding of rows": lambda x, i: torch.embedding(x, i.clamp(max=1)),
    "another's row gathered": lambda x, i: x.gather(0, i[:, None]),
    "scattered over rows": lambda x, i: x.scatter(0, i[:, None], 1.0),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_places_within_a_row_leave_rows_independent(name: str) -> None:
    """The labels hold for all numbers of rows."""
    verdict = judge(INDEPENDENT[name], _rows)
    assert (verdict.mixes, verdict.unknown) == ("", "")
    assert all(verdict.speaks_for((n,)) for n in range(2, 65))
    assert verdict.outputs[0] is not None
    assert verdict.outputs[0][0] == (0,)


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_selected_has_the_size_of_the_index(name: str) -> None:
    """The other dimensions stay."""
    verdict = judge(INDEPENDENT[name], _rows)
    results = verdict.steps[-1].dims[-1]
    assert results is not None
    assert [verdict.sizes.at(dim, (8,)) for dim in results] == [9, SHAPES[name][1]]


@pytest.mark.parametrize("name", MIXED)
def test_places_in_other_rows_are_refused(name: str) -> None:
    """A write for one row, or a read, that meets another is no row's own."""
    verdict = judge(MIXED[name], _rows)
    assert verdict.mixes or verdict.unknown


READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda cache, at: cache[at],
    "embedding": lambda cache, at: nn.functional.embedding(at, cache),
    "index_select": lambda cache, at: cache.index_select(0, at),
    "gather": lambda cache, at: cache.gather(0, at[:, None].expand(-1, D)),
}


def _with_cache(n: int) -> Batch:
    x, i = torch.randn(n, D), torch.randperm(n)
    return (x, i, torch.zeros(64, D)), {}, [(x, {0: 0}), (i, {0: 0})]


@pytest.mark.parametrize("read", READS)
def test_what_rows_wrote_is_read_at_their_places_alone(read: str) -> None:
    """State that rows write at places of their own may be read there, and nowhere else: not at a fixed place."""

    def step(x: Tensor, i: Tensor, cache: Tensor, at: Tensor | None = None) -> Tensor:
        cache[i] = x
        return x + READS[read](cache, i if at is None else at)

    assert judge(step, _with_cache).mixes == ""
    verdict = judge(lambda *args: step(*args, at=torch.tensor([3])), _with_cache)
    assert verdict.mixes or verdict.unknown


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.index_fill(1, FIXED, 1.0),
        lambda x: x.index_copy(1, FIXED, torch.zeros(7, 3, D)[: x.shape[0]]),
        lambda x: x.index_select(1, FIXED),
        lambda x: x[:, FIXED],
        lambda x: x.gather(1, torch.zeros(x.shape[0], 1, D, dtype=torch.long)),
        lambda x: x.scatter(1, torch.zeros(x.shape[0], 1, D, dtype=torch.long), 1.0),
    ],
)
def test_fixed_places_along_a_length_mix_it(fn: Callable[[Tensor], Tensor]) -> None:
    """A place that does not follow the length is another element's for another length."""

    def make(n: int, s: int) -> Batch:
        x = torch.randn(n, s, D)
        return (x,), {}, [(x, {0: 0, 1: 1})]

    verdict = judge(fn, make, own=(7, 11))
    assert verdict.mixes == ""
    assert verdict.mixed_axes == {1}
