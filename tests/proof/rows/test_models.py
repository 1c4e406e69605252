"""What models of libraries do with rows: it is served padded, and a program like it whose rows mix is not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphdispatch as gd
from graphdispatch import Reason

from ...helpers import check_calls, make

GATE, EXPERTS = torch.randn(16, 4), torch.randn(4, 16, 16) / 4


def best_of(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The best expert, and the best of the others."""
    one = scores.max(-1, keepdim=True)
    other = scores.scatter(-1, one.indices, -1.0).max(-1, keepdim=True)
    return torch.cat((one.values, other.values), -1), torch.cat((one.indices, other.indices), -1)


def experts(x: Tensor, parts: int = 2, chosen: int = 2) -> tuple[Tensor, Tensor]:
    """The sum of the products with the best experts, for each place; and how often each expert was chosen."""
    flat = x.reshape(-1, 16)
    scores = (flat @ GATE).softmax(-1)
    weights, best = best_of(scores) if chosen == 0 else scores.topk(chosen, -1)
    ids, order = torch.sort(best.reshape(-1))
    counts = torch.histc(ids.float(), 4, 0, 3)
    groups = counts.cumsum(0, dtype=torch.int32)
    made = torch._grouped_mm(flat[order // parts], EXPERTS, groups) * weights.reshape(-1)[order][:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(order.size(0))
    return made[back].view(flat.size(0), -1, 16).sum(1).view(x.shape), counts


class Served(nn.Module):
    """An encoder's layer, which torch runs as one operator; before it, all rows are centred or not."""

    def __init__(self, *, is_centred: bool) -> None:
        super().__init__()
        self.layer, self.is_centred = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), is_centred

    def forward(self, x: Tensor) -> Tensor:
        """Rows in, rows out."""
        return self.layer(x - x.mean(0) if self.is_centred else x)


def grouped_heads(x: Tensor) -> Tensor:
    """A group norm, and as many heads as the batch has rows."""
    normed = nn.functional.group_norm(x, 3)
    return normed + x.mean((1, 2)).view(-1, 1, 1, 1).expand(-1, 4, -1, -1).sum(1)


PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "experts": (lambda x: experts(x)[0], lambda x: experts(x)[0] + experts(x)[1].sum()),
    "experts of other rows": (lambda x: experts(x, 1, 1)[0], lambda x: experts(x, 5)[0]),
    "experts chosen one by one": (lambda x: experts(x, 2, 0)[0], lambda x: x * experts(x, 2, 0)[1].amax()),
    "bounds of groups": (lambda x: x + experts(x)[0], lambda x: x + experts(x)[1].cumsum(0)[-1]),
    "layer": (Served(is_centred=False).eval(), Served(is_centred=True).eval()),
    "group norm": (grouped_heads, lambda x: grouped_heads(x) - grouped_heads(x).amax(0)),
}


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_of_a_model(name: str, mixes: bool) -> None:
    """Padded batches are served where rows are independent, and refused where they mix."""
    step = make(PROGRAMS[name][mixes], sizes=(4,))
    batches = [torch.randn(rows, 6, 16) for rows in (4, 4, 3, 3, 3)]
    with torch.no_grad():
        reasons = check_calls(step, *batches, rtol=1e-4, atol=1e-5)
    assert reasons[-1] is (Reason.ROWS_MIX if mixes else Reason.PADDED), step.last_decision.explain()


def test_lengths_from_an_example_with_a_short_row() -> None:
    """The batches that are made of an example hide no row of it altogether: its mask hides padding then, too."""
    table = torch.randn(50, 8)

    def fn(ids: Tensor, mask: Tensor) -> Tensor:
        x = table[ids]
        scores = x @ x.mT + (1.0 - mask[:, None, :].float()) * torch.finfo(torch.float32).min
        return scores.softmax(-1) @ x

    length = gd.Dim("length", sizes=[8, 16], pad={"mask": 0})
    dynamic = {"ids": {0: "batch", 1: length}, "mask": {0: "batch", 1: "length"}}
    step = gd.graphed(fn, dynamic=dynamic, sizes=(4,))
    shown = torch.arange(16) < torch.tensor([16, 1, 3, 9])[:, None]
    ids = torch.randint(0, 49, (4, 16))
    ids[1, 9] = 49  # the largest, and hidden
    step.prewarm(ids, shown.long())
    batches = [
        (ids[:rows, :long].clone(), shown[:rows, :long].clone().long())
        for rows, long in ((3, 9), (4, 5), (2, 16), (3, 2))
    ]
    reasons = check_calls(step, *batches, rtol=1e-4, atol=1e-5)
    assert set(reasons) == {Reason.PADDED}, step.last_decision.explain()
