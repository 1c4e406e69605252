"""Callables that write state, and do something else for some numbers of rows: whatever that is, it is noticed."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphdispatch as gd

ROWS, WIDTH = 8, 4


@torch.library.custom_op("graphdispatch_known_program::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    """An operator that does something else for six rows."""
    return x * (2.0 if len(x) != 6 else 3.0)


class Cached(nn.Module):
    """Adds what each slot held before to what ``fn`` gives, keeps that there."""

    odd = 0
    """For so many rows another of its tensors is the answer."""

    def __init__(self, fn: Callable[["Cached", Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn
        self.register_buffer("cache", torch.zeros(ROWS + 2, WIDTH))
        self.register_buffer("a", torch.linspace(1, 2, WIDTH))
        self.register_buffer("b", torch.linspace(2, 3, WIDTH))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """``x`` of (rows, 4), ``slots`` of (rows,)."""
        y = self.fn(self, x) + self.cache[slots]
        self.cache[slots] = y
        return (y * 2, y * 3)[int(len(x) == self.odd)]


def served(fn: Callable[[Cached, Tensor], Tensor], *, prewarms: bool = True) -> tuple[Cached, gd.Graphed[..., Tensor]]:
    """Such a model behind graphs of 8 rows, with a scratch slot for padding."""
    model = Cached(fn).eval()
    options = gd.CUDAGraphOptions(padding_writes="allow", capture_share=None, capture_after=1)
    pad = {"slots": gd.Pad.value(ROWS + 1)}
    step = gd.graphed(model, dynamic={"x": 0, "slots": 0}, pad=pad, sizes=(ROWS,), options=options)
    if prewarms:
        step.prewarm(torch.randn(ROWS, WIDTH), torch.arange(ROWS))
    return model, step


def assert_as_eager(fn: Callable[[Cached, Tensor], Tensor], *, prewarms: bool) -> gd.Graphed[..., Tensor]:
    """Each number of rows, several times: answers and slots are eager's."""
    (model, step), twin = served(fn, prewarms=prewarms), Cached(fn).eval()
    for rows in (ROWS, ROWS, *[7, 5, 4] * 4, *range(ROWS, 0, -1), *range(1, ROWS + 1), *range(ROWS, 0, -1)):
        x, slots = torch.randn(rows, WIDTH), torch.randperm(ROWS)[:rows]
        torch.testing.assert_close(step(x, slots), twin(x, slots), msg=f"{rows} rows: {step.explain(x, slots)}")
        torch.testing.assert_close(model.cache[:ROWS], twin.cache[:ROWS])
    return step


DIFFERENT: dict[str, Callable[[Cached, Tensor], Tensor]] = {
    "another tensor": lambda m, x: x * (m.a if len(x) != 6 else m.b),
    "another number as a tensor": lambda m, x: x * torch.tensor(1.0 if len(x) != 6 else 2.0),
    "another number": lambda m, x: x * (1.0 if len(x) != 6 else 2.0),
    "the number of rows as a tensor": lambda m, x: x / torch.tensor(float(len(x))),
    "another operator": lambda m, x: x.sin() if len(x) != 6 else x.cos(),
    "an array": lambda m, x: x * torch.from_numpy(np.float32([1.0 if len(x) != 6 else 2.0])),
    "many numbers as a tensor": lambda m, x: x * torch.tensor([1.0 if len(x) != 6 else 2.0] * 100)[:1],
    "places from the end": lambda m, x: x * torch.arange(len(x)).flip(0)[:, None],
    "shares of the rows": lambda m, x: x * torch.linspace(0, 1, len(x))[:, None],
    "a row alone": lambda m, x: x * m.a if x.squeeze().dim() > 1 else x * m.b,
    "a row squeezed": lambda m, x: x * m.a + x.squeeze().sum(-1, keepdim=True),
    "another view": lambda m, x: x + (x[:, :2], x[:, 2:])[len(x) == 6].sum(1, keepdim=True),
    "another result": lambda m, x: (x.sin(), x.cos())[len(x) == 6],
    "another length": lambda m, x: x + m.a[: 3 if len(x) == 6 else 4].sum(),
    "an operator of its own": lambda m, x: scaled(x),
}


@pytest.mark.parametrize("prewarms", [True, False])
@pytest.mark.parametrize("fn", DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_for_some_numbers_of_rows(fn: Callable[[Cached, Tensor], Tensor], prewarms: bool) -> None:
    """It is noticed, whichever number comes first."""
    assert_as_eager(fn, prewarms=prewarms)


def test_another_answer_for_some_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same tensors."""
    monkeypatch.setattr(Cached, "odd", 6)
    assert_as_eager(lambda m, x: x * m.a, prewarms=True)
