"""What one front end guarantees, every front end does: what is compared and never served, and that each call happens
once."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphOptions, eager_break

from ..helpers import Spy
from .features import needs
from .front_end import Open, one_tensor


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
    step = tried(lambda x: (count.add_(1), x * 2)[1], options=CUDAGraphOptions(verify_every=2))
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


def counting(count: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Counts its calls in a tensor and draws from the default generator: not the same twice."""
    return lambda x: x * count.add_(1) + torch.rand(3)


@pytest.mark.parametrize("reads", [False, True], ids=["captured", "refused"])
def test_generator_as_eager(opened: Open, reads: bool) -> None:
    """Captures and comparisons draw and write nothing, nor do captures that fail: the calls see eager's numbers, and
    leave eager's state and generator."""
    count, wanted = torch.zeros(()), torch.zeros(())
    ours, eager = counting(count), counting(wanted)

    def scale(x: torch.Tensor) -> float:
        return float(x.sum()) if reads else 1.0

    step = opened(lambda x: ours(x) * scale(x), options=CUDAGraphOptions(verify_every=2))
    before = torch.get_rng_state()
    x = torch.ones(4, 3)
    step.prepare(x)
    assert not count
    assert torch.equal(torch.get_rng_state(), before)
    got = [step(x * i) for i in range(8)]
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    assert all(torch.equal(one, eager(x * i) * scale(x * i)) for i, one in enumerate(got))
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(count, wanted)
    assert bool(step.hits) is not reads


@needs("pieces")
@pytest.mark.parametrize("error", [KeyError("broken"), KeyboardInterrupt()], ids=repr)
def test_exception_in_break(opened: Open, error: BaseException) -> None:
    """An exception of a break passes unchanged, in a capture, a comparison and a replay; what ran before it happened
    once, and later calls are right."""
    count = torch.zeros((), dtype=torch.int64)
    broken = Spy([False])

    @eager_break
    def part(x: torch.Tensor) -> torch.Tensor:
        if broken[0]:
            raise error
        return x + 1

    step = opened(lambda x: (count.add_(1), part(x * 2) * 3)[1], mode="PIECEWISE")
    step.prepare(torch.randn(4, 3))
    for number in range(12):
        x = torch.randn(4, 3)
        broken[0] = number in (0, 2, 6, 8)
        if broken[0]:
            with pytest.raises(type(error)) as caught:
                step(x)
            assert caught.value is error
        else:
            assert torch.equal(step(x), (x * 2 + 1) * 3)
        assert int(count) == step.calls
    assert step.was_hit()


def test_state_replaced(settled: Open) -> None:
    """State that was put elsewhere is read and written where it is now, and the old memory is left alone."""

    model = nn.Module()
    model.register_buffer("total", torch.zeros(3))
    step = settled(lambda x: x + model.total.add_(1))
    old, kept = model.total, model.total.clone()
    model.total = torch.full((3,), 100.0)
    for calls in range(1, 4):
        x = torch.randn(4, 3)
        assert torch.equal(step(x), x + 100 + calls)
        assert torch.equal(model.total, torch.full((3,), 100.0 + calls))
    assert torch.equal(old, kept)
