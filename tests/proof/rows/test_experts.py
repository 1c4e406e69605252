"""Mixtures of experts: sorted, multiplied in groups, and put back, rows stay independent."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from .runs import Batch, judge

F = nn.functional
D, E, K = 8, 4, 2
GENERATOR = torch.Generator().manual_seed(0)
EXPERTS = torch.randn(E, D, D, generator=GENERATOR).bfloat16()
ROUTER = torch.randn(D, E, generator=GENERATOR)


def _rows(n: int) -> Batch:
    x = torch.randn(n, D)
    return (x,), {}, [(x, {0: 0})]


def _tokens(n: int, s: int) -> Batch:
    x = torch.randn(n, s, D)
    return (x,), {}, [(x, {0: 0, 1: 1})]


def _bounds(chosen: Tensor) -> Tensor:
    return torch.histc(chosen.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)


def _product(x: Tensor, bounds: Tensor) -> Tensor:
    return F.grouped_mm(x.bfloat16(), EXPERTS, offs=bounds).float()


def _by_places(x: Tensor) -> Tensor:
    """As transformers does: the places are written by the order."""
    weights, chosen = (x @ ROUTER).softmax(-1).topk(K, -1)
    values, order = torch.sort(chosen.reshape(-1))
    y = _product(x[order // K], _bounds(values)) * weights.reshape(-1)[order][:, None]
    places = torch.empty_like(order)
    places[order] = torch.arange(order.size(0))
    return y[places].view(x.shape[0], K, D).sum(1)


def _by_second_sort(x: Tensor) -> Tensor:
    """The order is sorted once more, which gives the places."""
    chosen = (x @ ROUTER).topk(K, -1).indices.reshape(-1)
    order = chosen.argsort()
    return _product(x[order // K], _bounds(chosen))[order.argsort()].view(x.shape[0], K, D).sum(1)


def _by_adding(x: Tensor) -> Tensor:
    """Each product is added to its token's row."""
    chosen = (x @ ROUTER).topk(K, -1).indices.reshape(-1)
    order = chosen.argsort(stable=True)
    token = torch.arange(x.shape[0])[:, None].expand(-1, K).reshape(-1)[order]
    return torch.zeros_like(x).index_add_(0, token, _product(x[token], _bounds(chosen)))


def _by_writing(x: Tensor) -> Tensor:
    """One expert for each row; rows are written back by the order."""
    chosen = (x @ ROUTER).argmax(-1)
    order = chosen.argsort()
    y = _product(x[order], _bounds(chosen))
    out = torch.empty_like(y)
    out[order] = y
    return out


def _by_choosing_weights(x: Tensor) -> Tensor:
    """Each row takes the weights of its experts."""
    weights, chosen = (x @ ROUTER).softmax(-1).topk(K, -1)
    return (torch.einsum("nd,nkdo->nko", x, EXPERTS.float()[chosen]) * weights[..., None]).sum(1)


FORMS = [_by_places, _by_second_sort, _by_adding, _by_writing, _by_choosing_weights]


@pytest.mark.parametrize("fn", FORMS)
def test_a_mixture_of_experts_is_proven(fn: Callable[[Tensor], Tensor]) -> None:
    """No form in use mixes rows, for all numbers of rows."""
    verdict = judge(fn, _rows)
    assert (verdict.mixes, verdict.unknown) == ("", "")
    assert all(verdict.speaks_for((n,)) for n in range(2, 65))
    assert verdict.outputs == (((0,), ()),)


def test_the_tokens_of_a_batch_of_sequences_are_proven() -> None:
    """Rows of several tokens each are numbered through; the length within is bound to that of the run."""
    verdict = judge(lambda x: _by_places(x.flatten(0, 1)).view_as(x), _tokens, own=(7, 5))
    assert verdict.independent
    assert verdict.speaks_for((9, 5))


@pytest.mark.parametrize("divisor", [3, 4])
def test_a_quotient_by_another_number_of_parts_numbers_no_rows(divisor: int) -> None:
    """Places divided by anything but the parts of a row name other rows."""

    def fn(x: Tensor) -> Tensor:
        order = (x @ ROUTER).topk(K, -1).indices.reshape(-1).argsort()
        return x[order // divisor][order.argsort()].view(x.shape[0], K, D).sum(1)

    assert "rows by an index" in judge(fn, _rows).mixes


@pytest.mark.parametrize(("bins", "low", "high"), [(E + 1, 0, E), (E, 0, E), (E, -1, E - 1), (2, 0, 1)])
def test_counts_of_other_bins_bound_no_groups(bins: int, low: int, high: int) -> None:
    """Only bins that hold one choice each count choices."""

    def fn(x: Tensor) -> Tensor:
        chosen = (x @ ROUTER).argmax(-1)
        order = chosen.argsort()
        bounds = torch.histc(chosen.float(), bins, low, high).cumsum(0, dtype=torch.int32)[:E]
        return _product(x[order], bounds)[order.argsort()] if len(bounds) == E else x + bounds.sum()

    assert judge(fn, _rows).mixes


def test_a_choice_among_more_than_the_groups_is_refused() -> None:
    """A row whose choice has no group would move those behind it."""

    def fn(x: Tensor) -> Tensor:
        chosen = torch.cat([x @ ROUTER, x[:, :2]], -1).argmax(-1)
        order = chosen.argsort()
        return _product(x[order], _bounds(chosen))[order.argsort()]

    assert judge(fn, _rows).mixes


def _counts(x: Tensor) -> Tensor:
    return torch.histc((x @ ROUTER).argmax(-1).float(), E, 0, E - 1)


def _places(x: Tensor) -> Tensor:
    order = (x @ ROUTER).argmax(-1).argsort()
    made = torch.empty_like(order)
    made[order] = torch.arange(order.size(0))
    return made


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sums": lambda x: _counts(x).cumsum(0),
    "windows": lambda x: _counts(x).unfold(0, 2, 2),
    "bits": lambda x: _counts(x).view(torch.int32),
    "bits of bounds": lambda x: _counts(x).cumsum(0, dtype=torch.int32).view(torch.float32),
    "bits of places": lambda x: _places(x).view(torch.float64),
    "diagonal": lambda x: _counts(x).view(2, 2).diagonal(),
    "pairs": lambda x: torch.view_as_complex(_counts(x).view(2, 2)),
    "parts": lambda x: _counts(x).unbind()[0],
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_counts_seen_in_another_way(part: Callable[[Tensor], Tensor]) -> None:
    """What is made of counts, or of places among all rows, mixes as they do."""
    assert judge(lambda x: (x * 2, part(x)), _rows).mixes
