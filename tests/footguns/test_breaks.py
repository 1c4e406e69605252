"""Breaks of PIECEWISE captures: Python that runs while a graph is half-way."""

import torch
from torch import Tensor

from graphdispatch import Graphed, Reason, eager_break, get_backend, graphed


def test_break_calls_itself() -> None:
    """A break calls the served model that it is a part of: the inner call runs eagerly, and both are right."""

    @eager_break
    def part(h: Tensor) -> Tensor:
        return h + step(h[:1]) if len(h) > 1 else h

    step: Graphed[..., Tensor] = graphed(lambda x: part(x * 2) + x, dynamic={"x": 0}, sizes=(1, 4), mode="PIECEWISE")
    with torch.no_grad():
        step.prewarm(torch.linspace(-1, 1, 12).view(4, 3))
        x = torch.randn(4, 3)
        assert torch.equal(step(x), x * 2 + (x[:1] * 2 * 2 + x[:1] * 2) + x)
    assert step.stats.hits == 1
    assert step.stats.reasons[Reason.INSIDE_REPLAY] == 1


def test_break_on_side_stream() -> None:
    """What a break writes on a stream of its own, joined before it ends, is written once for each call."""
    backend = get_backend("cpu")
    side = backend.make_stream()
    cache = torch.zeros(3)

    @eager_break
    def part(x: Tensor) -> Tensor:
        side.submit(lambda: cache.add_(1))
        backend.current_stream().wait_stream(side)
        return x + cache

    step = graphed(lambda x: part(x + 1), dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE", capture_after=1)
    with torch.no_grad():
        for count in range(1, 5):
            x = torch.randn(4, 3)
            assert torch.equal(step(x), x + 1 + count)
            assert torch.equal(cache, torch.full((3,), float(count)))
    side.close()
    assert step.stats.hits == 2
