"""What a capture may have of tensors on the host: numbers that become arguments of kernels, and no copy."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphdispatch import Reason
from graphdispatch.backends import Backend, Graph, Pool

pytestmark = pytest.mark.gpu

Record = Callable[[Callable[[], object]], Graph]
Work = Callable[[Tensor, Tensor, Tensor], object]
"""Work on numbers of shape (4, 3), on indices of two of their rows, and on a mask of all rows."""

HALF = torch.tensor(0.5)
ROWS = torch.tensor([0, 2])


COPIES: dict[str, Work] = {
    "x[rows] = 1.0": lambda x, rows, mask: x.__setitem__(rows, 1.0),
    "x[1, 1] = 1.0": lambda x, rows, mask: x.__setitem__((1, 1), 1.0),
    "x[host rows] = y": lambda x, rows, mask: x.__setitem__(ROWS, x[:2].clone()),
    "index_put_, accumulate": lambda x, rows, mask: x.index_put_((rows,), HALF, accumulate=True),
    "index_put_, mask, accumulate": lambda x, rows, mask: x.index_put_((mask,), HALF, accumulate=True),
    "x[host rows]": lambda x, rows, mask: x[ROWS],
    "x[[0, 2]]": lambda x, rows, mask: x[[0, 2]],
    "where, a number": lambda x, rows, mask: torch.where(x > 0, x, HALF),
    "where, a condition": lambda x, rows, mask: torch.where(HALF > 0, x, x),
    "copy_": lambda x, rows, mask: x.copy_(HALF),
    "to": lambda x, rows, mask: ROWS.to(x.device),
    "tensor": lambda x, rows, mask: torch.tensor(0.5, device=x.device),
    "_foreach_copy_": lambda x, rows, mask: torch._foreach_copy_([x], [torch.ones(4, 3)]),
}
NUMBERS: dict[str, Work] = {
    "x[mask] = 1.0": lambda x, rows, mask: x.__setitem__(mask, 1.0),
    "x[rows] = y": lambda x, rows, mask: x.__setitem__(rows, torch.ones((), device=x.device)),
    "add": lambda x, rows, mask: x.add_(HALF),
    "sub": lambda x, rows, mask: x.copy_(HALF - x),
    "lerp": lambda x, rows, mask: x.lerp_(x + 1, HALF),
    "maximum": lambda x, rows, mask: x.copy_(x.maximum(HALF)),
    "pow": lambda x, rows, mask: x.pow_(HALF),
    "masked_fill_": lambda x, rows, mask: x.masked_fill_(mask[:, None], HALF),
    "fill_": lambda x, rows, mask: x.fill_(HALF),
    "where, a scalar": lambda x, rows, mask: x.copy_(torch.where(x > 1, x, 0.5)),
    "index_fill_": lambda x, rows, mask: x.index_fill_(0, rows, HALF),
}


def inputs(cuda: Backend) -> tuple[Tensor, Tensor, Tensor]:
    """What the work is given, on the device."""
    x = torch.arange(12.0).view(4, 3).to(cuda.device)
    return x, ROWS.to(cuda.device), torch.tensor([True, False, False, True]).to(cuda.device)


@pytest.mark.parametrize("work", COPIES.values(), ids=COPIES)
def test_a_copy_from_pageable_memory_is_not_captured(cuda: Backend, pool: Pool, work: Work) -> None:
    """What works eagerly is refused in a capture, for a reason; the next capture works."""
    given = inputs(cuda)
    work(*given)
    with pytest.raises(RuntimeError) as caught, cuda.begin_capture(pool):
        work(*given)
    assert cuda.classify_error(caught.value) is Reason.CAPTURE_UNSAFE
    with cuda.begin_capture(pool) as capture:
        given[0].fill_(3)
    capture.graph.replay()
    assert given[0].unique().tolist() == [3]
    capture.graph.reset()


@pytest.mark.parametrize("work", NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_need_no_copy_are_captured(cuda: Backend, record: Record, work: Work) -> None:
    """And a replay computes what eager does."""
    given, expected = inputs(cuda), inputs(cuda)
    graph = record(lambda: work(*given))
    work(*expected)
    for x, right in zip(given, inputs(cuda), strict=True):
        x.copy_(right)
    graph.replay()
    torch.testing.assert_close(given[0], expected[0])
