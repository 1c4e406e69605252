"""Random batches and lengths through models with several dynamic dimensions: always eager's answer."""

from collections.abc import Callable

import hypothesis.strategies as st
import torch
from hypothesis import given

from graphdispatch import Dim, graphed

from ..helpers import AT_ONCE

Model = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def masked(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Attention with a mask, and a mean by it."""
    weights = (x @ x.transpose(1, 2)).masked_fill(mask[:, None] == 0, -1e9).softmax(2)
    return weights @ x + y[:, None], (x * mask[:, :, None]).sum(1) / mask.sum(1).clamp(min=1)[:, None]


def causal(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A running sum, and the mask beside it."""
    return x.cumsum(1) * 2, mask + 1, y * 3


def mixing(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A softmax over the sequence."""
    return x.softmax(1), mask * y.sum(1)[:, None]


def branching(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A branch on the length, and one on the batch."""
    return (x * 2 if x.shape[1] % 3 else x + 1), (y if x.shape[0] != 2 else -y), mask.sum(1)


def squares(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The sequence twice in one output, and the length of it doubled in another."""
    return mask[:, :, None] * mask[:, None, :], torch.cat([x, -x], 1)[:, :, 0] * 2, y


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True).map(sorted)
shapes = st.tuples(st.integers(0, 10), st.integers(0, 10))


@given(
    model=st.sampled_from([masked, causal, mixing, branching, squares]),
    rows=sizes,
    lengths=sizes,
    calls=st.lists(shapes, min_size=1, max_size=12),
    repeats=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_each_call_has_eagers_answer(
    model: Model, rows: list[int], lengths: list[int], calls: list[tuple[int, int]], repeats: int, seed: int
) -> None:
    """Whatever the sizes, the order of the calls and the model: shapes are eager's, and values within rounding."""
    torch.manual_seed(seed)
    both = {0: "batch", 1: Dim("seq", sizes=lengths)}
    dims = {"x": both, "mask": {0: "batch", 1: "seq"}, "y": {0: "batch"}}
    step = graphed(model, dynamic=dims, sizes=rows, options=AT_ONCE)
    for batch, length in [call for call in calls for _ in range(repeats)] + calls:
        x, mask = torch.randn(batch, length, 3), (torch.rand(batch, length) < 0.7).float()
        mask[:, :1] = 1  # a mask that hides a whole row is among the limits
        values = (x, mask, torch.randn(batch, 3))
        got, want = step(*values), model(*values)
        assert [one.shape for one in got] == [one.shape for one in want]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    step.check_integrity()
