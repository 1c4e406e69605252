"""Code that reads other memory or other numbers for some numbers of rows, with the same bits for now: no comparison
shows it.

Later somebody writes one of the two, and a graph that was compared for such a batch would read the wrong one.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphdispatch import Reason, graphed

from ..helpers import assert_same, make

ROWS = (5, 8, 7, 1, 6, 3, 8, 4, 2)


class Pairs(nn.Module):
    """Pairs of equal weights; ``read`` says which ones a batch reads."""

    def __init__(self, read: Callable[["Pairs", Tensor, bool], Tensor], most: int) -> None:
        super().__init__()
        weight = torch.randn(4, 4)
        self.one, self.other = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
        self.both = nn.Parameter(torch.stack((weight, weight)))
        self.halves = [self.both.detach()[0], self.both.detach()[1]]
        self.table, self.read, self.most = nn.Parameter(torch.ones(32, 4)), read, most

    def forward(self, x: Tensor) -> Tensor:
        """Rows in, rows out."""
        return self.read(self, x, x.shape[0] > self.most)


READS: dict[str, Callable[[Pairs, Tensor, bool], Tensor]] = {
    "another weight": lambda m, x, is_large: x @ (m.other if is_large else m.one),
    "a weight by its detached view": lambda m, x, is_large: x @ (m.other if is_large else m.one).detach(),
    "another copy": lambda m, x, is_large: x @ (m.other if is_large else m.one).clone(),
    "a view made before": lambda m, x, is_large: x @ m.halves[int(is_large)],
    "a part of a weight": lambda m, x, is_large: x @ m.both[int(is_large)],
    "a slice of a weight": lambda m, x, is_large: x @ m.both.view(8, 4)[4 if is_large else 0 :][:4],
    "one of several results": lambda m, x, is_large: x @ m.both.unbind()[int(is_large)],
    "weights in another order": lambda m, x, is_large: (
        torch.cat((x, x * 2), 1) @ torch.cat((m.other, m.one) if is_large else (m.one, m.other))
    ),
    "results in another order": lambda m, x, is_large: _difference(x @ m.one, x @ m.other, is_large),
    "another row of a table": lambda m, x, is_large: x + nn.functional.embedding(torch.tensor(int(is_large)), m.table),
    "rows from another one on": lambda m, x, is_large: (
        x + nn.functional.embedding(torch.arange(int(is_large), x.shape[0] + is_large), m.table)
    ),
    "a slice that follows the rows": lambda m, x, is_large: x + m.table[x.shape[0] :][:1],
    "as many as there are rows, from there on": lambda m, x, is_large: x + m.table[x.shape[0] : 2 * x.shape[0]],
    "another operator": lambda m, x, is_large: x.sin() if is_large else x.tan(),
    "another number as a tensor": lambda m, x, is_large: x * torch.tensor(3.0 if is_large else 2.0),
    "another number as an array": lambda m, x, is_large: x * torch.from_numpy(np.float32([3.0 if is_large else 2.0])),
    "a number of another type": lambda m, x, is_large: x * (3 if is_large else 2.0),
    "a tensor of many other numbers": lambda m, x, is_large: x * torch.tensor([3.0 if is_large else 2.0] * 100)[:4],
    "other columns": lambda m, x, is_large: x[:, 2:] if is_large else x[:, :2],
    "columns that were written": lambda m, x, is_large: _scaled(x, slice(2, 4) if is_large else slice(0, 2)),
    "a copy, written where others read": lambda m, x, is_large: _added(x @ m.one, m.table[0], is_large),
}


def _difference(one: Tensor, other: Tensor, is_large: bool) -> Tensor:
    return other - one if is_large else one - other


def _scaled(x: Tensor, columns: slice) -> Tensor:
    y = x.clone()
    y[:, columns].mul_(3)
    return y


def _added(y: Tensor, more: Tensor, is_large: bool) -> Tensor:
    made = y.clone() if is_large else y.view(y.shape)
    y.add_(more - 1)
    return made * 2


@pytest.mark.parametrize("most", [1, 6])
@pytest.mark.parametrize("sizes", [(8,), (2, 8)], ids=str)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_each_batch_reads_its_own_tensors(
    read: Callable[[Pairs, Tensor, bool], Tensor], sizes: tuple[int, ...], most: int
) -> None:
    """While both hold the same, and when each was written; batches of zeros tell nothing of columns."""
    model = Pairs(read, most).eval()
    step = make(model, sizes=sizes)
    for write in (None, model.other, model.one, model.both, model.table):
        if write is not None:
            write.data.copy_(torch.randn_like(write))
        for rows in ROWS * 2:
            x = torch.zeros(rows, 4) if write is None else torch.randn(rows, 4)
            assert_same(step(x), model(x), step.explain(x), rtol=1e-4, atol=1e-4)


def test_a_batch_that_reads_another_weight_says_so() -> None:
    """It stays eager, with the line that decides; the others are padded."""
    model = Pairs(READS["another weight"], 6).eval()
    step = make(model, sizes=(8,))
    for rows in ROWS:
        step(torch.randn(rows, 4))
    assert "Python decides by the number of rows" in step.explain(torch.randn(5, 4))
    reasons = {rows: (step(torch.randn(rows, 4)), step.last_decision.reason)[1] for rows in (5, 7)}
    assert reasons == {5: Reason.PATH_CHANGES, 7: Reason.PADDED}


def test_a_single_row_is_padded_where_torch_makes_a_view_for_it() -> None:
    """Where there is one row, ``reshape`` copies nothing; that is no other path."""
    model = nn.Linear(4, 4)
    step = make(lambda x: model(x.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4).clone().view(-1, 4)), sizes=(8,))
    for rows in (8, 8, 5, 1, 1, 1):
        step(torch.randn(rows, 4))
    assert step.last_decision.reason is Reason.PADDED, step.last_decision


def test_a_number_that_is_compared_by_identity_is_seen_in_the_code() -> None:
    """No number made of sizes is the plain number itself, so that the run would see no branch."""
    weights: dict[bool, Tensor] = {True: torch.ones(4), False: torch.ones(4)}
    names: dict[str, Callable[[Tensor], Tensor]] = {}
    code = "def first(x): return x * weights[x.shape[0] is 3]\ndef second(x): return x * weights[3 is len(x)]"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        exec(compile(code, "by_identity.py", "exec"), {"weights": weights}, names)
    for line, fn in enumerate(names.values(), 1):
        step = make(fn, sizes=(8,))
        for rows in (8, 8, 5, 3, 5):
            assert_same(step(torch.ones(rows, 4)), fn(torch.ones(rows, 4)))
        assert f"by identity (is), by_identity.py:{line}" in step.explain(torch.ones(5, 4))


@pytest.mark.parametrize(
    "is_plain",
    [
        lambda n: type(n) is int,
        lambda n: type(n) in (int, float),
        lambda n: type(n) == int,  # noqa: E721
        lambda n: not isinstance(n, torch.SymInt),
    ],
    ids=["is", "in", "equal", "no symbol"],
)
def test_code_that_asks_for_the_type_of_a_size_is_not_padded(is_plain: Callable[[Any], bool]) -> None:
    """In the run of all batches a size is of another type, so that the run would not come to the branch."""

    def fn(x: Tensor) -> Tensor:
        n = x.shape[0]
        return x + 1 if is_plain(n) and n == 3 else x * 2

    step = make(fn, sizes=(8,))
    for rows in (8, 8, 5, 3, 5, 3):
        x = torch.randn(rows, 4)
        assert_same(step(x), fn(x))
    assert "may ask for the type of a number, test_same_bits.py" in step.explain(torch.ones(5, 4))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_view_changed_in_place_is_the_same_tensor(kind: type[nn.Module]) -> None:
    """Recurrent networks turn their result (``transpose_``), for which other lengths of rows stand in memory."""
    cells = kind(8, 8, batch_first=True).eval()
    step = graphed(lambda x: cells(x)[0][:, -1], dynamic={"x": 0}, sizes=(4, 16))
    step.prewarm(torch.randn(16, 3, 8))
    for rows in (16, 4, 5, 13, 3, 2):
        x = torch.randn(rows, 3, 8)
        torch.testing.assert_close(step(x), cells(x)[0][:, -1])
    assert step.stats.hits == 6
