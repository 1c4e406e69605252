"""Effects and failures behind every front end: each call happens once, and what fails leaves nothing behind."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphOptions, eager_break

from ..helpers import Spy
from .features import needs
from .front_end import FrontEnd

Open = Callable[..., FrontEnd]


class Counting:
    """Counts its calls in a tensor and draws from the default generator."""

    def __init__(self) -> None:
        self.count = torch.zeros((), dtype=torch.int64)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Not the same twice."""
        self.count.add_(1)
        return x * self.count + torch.rand(3)


@pytest.mark.parametrize("reads", [False, True], ids=["captured", "refused"])
def test_generator_as_eager(opened: Open, reads: bool) -> None:
    """Captures and comparisons draw and write nothing, nor do captures that fail: the calls see eager's numbers, and
    leave eager's state and generator."""
    ours, eager = Counting(), Counting()

    def scale(x: torch.Tensor) -> float:
        return float(x.sum()) if reads else 1.0

    step = opened(lambda x: ours.step(x) * scale(x), options=CUDAGraphOptions(verify_every=2))
    before = torch.get_rng_state()
    x = torch.ones(4, 3)
    step.prepare(x)
    assert int(ours.count) == 0
    assert torch.equal(torch.get_rng_state(), before)
    got = [step(x * i) for i in range(8)]
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    assert all(torch.equal(one, eager.step(x * i) * scale(x * i)) for i, one in enumerate(got))
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(ours.count, eager.count)
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

    def fn(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return part(x * 2) * 3

    step = opened(fn, mode="PIECEWISE")
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

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.total.add_(1)

    model = Holder()
    step = settled(model)
    old, kept = model.total, model.total.clone()
    model.total = torch.full((3,), 100.0)
    for calls in range(1, 4):
        x = torch.randn(4, 3)
        assert torch.equal(step(x), x + 100 + calls)
        assert torch.equal(model.total, torch.full((3,), 100.0 + calls))
    assert torch.equal(old, kept)


def test_refused_before_anything_runs(settled: Open) -> None:
    """A call that the graph refuses runs once, eagerly, on the caller's own tensors."""
    log = torch.zeros(8, 5)

    def fn(x: torch.Tensor) -> torch.Tensor:
        log[: len(x), : x.shape[1]].add_(x)
        return x * 2

    step = settled(fn, lambda _: (torch.zeros(4, 3),))
    log.zero_()
    for columns in (5, 3, 5):
        kept = log.clone()
        x = torch.randn(4, columns)
        assert torch.equal(step(x), x * 2)
        kept[:4, :columns] += x
        assert torch.equal(log, kept)
