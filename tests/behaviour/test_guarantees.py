"""What one front end guarantees, every front end does: what is compared, when, and what is never served."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from graphdispatch import CUDAGraphOptions, Reason

from .features import needs
from .front_end import FrontEnd, one_tensor

Open = Callable[..., FrontEnd]


@needs("comparisons")
def test_frozen_value_found(settled: Open) -> None:
    """With ``verify_every=2`` a frozen value of Python answers two calls at most after it has changed."""
    array = np.full(1, 2.0)
    step = settled(lambda x: x * float(array[0]), options=CUDAGraphOptions(verify_every=2))
    array[0] = 5.0
    batches = torch.randn(12, 4, 3)
    assert sum(not torch.equal(step(x), x * 5.0) for x in batches) <= 2


SIGNED = torch.tensor([[0.0, -0.0, 0.0], [-0.0, 0.0, 0.0], [0.0, 0.0, -0.0]])


@needs("padding")
@pytest.mark.parametrize("zeros", [torch.zeros(3, 3), SIGNED], ids=["equal", "signed"])
def test_equal_rows_prove_nothing(opened: Open, zeros: torch.Tensor) -> None:
    """An example of zeros, padded with zeros, shows nothing of a model that mixes its rows; nor do zeros of both signs,
    whose bits differ and whose values do not."""
    step = opened(lambda x: x - x.mean(0))
    step.prepare(zeros)
    step.check_calls(zeros, -zeros, zeros, 3, 3)


def test_invalidated(settled: Open) -> None:
    """After the owner of the graphs said that they are stale, none serves; a new capture serves again."""
    array = np.full(1, 2.0)
    step = settled(lambda x: x * float(array[0]))
    array[0] = 5.0
    step.forget("another scale")
    for _ in range(2):
        step.check_calls(4)
        assert not step.was_hit()
    step.renew(*one_tensor(4))
    step.check_calls(4, 4, 4, 4)
    assert step.was_hit()


@needs("freezing")
def test_frozen(tried: Open) -> None:
    """Frozen, verified graphs go on serving, and nothing is captured or compared: other calls run eagerly."""
    count = torch.zeros((), dtype=torch.int64)

    def fn(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * 2

    step = tried(fn, options=CUDAGraphOptions(verify_every=2))
    step.freeze(True)
    captures, calls = step.captures, step.calls
    for _ in range(4):
        step.check_calls(4, fn=lambda x: x * 2)
        assert step.was_hit()
    for _ in range(4):
        step.check_calls(torch.randn(2, 5), fn=lambda x: x * 2)
        assert not step.was_hit()
    assert step.captures == captures
    assert int(count) == calls + 8
    step.freeze(False)
    step.renew(*one_tensor(4))
    step.check_calls(4, 4, 4, 4)


def test_weight_moved_and_back(settled: Open) -> None:
    """A weight that moves is read where it lies now, however often it moves, and a new capture serves it."""
    model = torch.nn.Linear(3, 3).eval().requires_grad_(False)
    step = settled(model, dynamic={"input": 0})
    for _ in range(2):
        model.weight.data = torch.randn(3, 3)
        step.check_calls(4)
        step.check(Reason.CAPTURED_NOW)
    step.renew(*one_tensor(4))
    step.check_calls(4, 4, 4)
    assert step.was_hit()
