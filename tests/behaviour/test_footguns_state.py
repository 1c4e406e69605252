"""What the callable writes, and memory that moves: state, weights, modes of modules."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphOptions, Reason

from .features import needs
from .front_end import FrontEnd

Settle = Callable[..., FrontEnd]
INPUT = {"dynamic": {"input": 0}}


def test_state_written_in_place(settled: Settle) -> None:
    """Captures and comparisons run a model several times; its state sees each call once."""
    count, total = torch.zeros((), dtype=torch.int64), torch.zeros(3)

    def fn(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        total.add_(rows)
        return x + count

    step = settled(fn, lambda rows: (torch.ones(rows, 3), torch.tensor(rows)))
    step(torch.ones(4, 3), torch.tensor(4))
    assert int(count) == step.calls
    assert torch.equal(total, torch.full((3,), float(sum(step.order) + 4)))


def test_state_too_large(tried: Settle) -> None:
    """State that is too large to be saved keeps the call eager, and is written once."""
    state = torch.zeros(1000)
    step = tried(lambda x: state.add_(1)[:3] + x, options=CUDAGraphOptions(state_limit_bytes=100))
    step.check(Reason.STATE_TOO_LARGE)
    assert float(state[0]) == step.calls


def test_buffer_resized(tried: Settle) -> None:
    """A tensor that the call resizes would keep the shape of the padded batch, so the call stays eager."""
    buffer = torch.zeros(0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        buffer.resize_(x.shape).copy_(x)
        return buffer + 1

    step = tried(fn)
    step.check(Reason.CAPTURE_UNSAFE)
    x = torch.randn(3, 3)
    assert torch.equal(step(x), x + 1)
    assert torch.equal(buffer, x)


def test_check_without_result(settled: Settle) -> None:
    """An operator that raises for some data does so in a replay, too, though nobody needs its result."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 100).all())
        return x + 1

    step = settled(fn)
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value, but got zero"):
        step(torch.full((4, 3), 200.0))
    step.check_calls(4)


def test_weight_cut_in_place(settled: Settle) -> None:
    """A weight that is cut where it lies keeps its address: the graph of the whole one is dropped."""
    model = nn.Linear(3, 3).eval().requires_grad_(False)
    step = settled(model, **INPUT)
    model.weight.data, model.bias.data = model.weight.data[:2], model.bias.data[:2]
    step.check_calls(4)


def test_weight_reshaped_in_place(settled: Settle) -> None:
    """Another shape of as many elements at the same address: the graph of the old one is dropped."""
    weight = torch.tensor([1.0, 2.0, 3.0])
    step = settled(lambda x: x + weight)
    weight.unsqueeze_(1)
    assert step(torch.zeros(3, 3)).tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_weights_converted(settled: Settle) -> None:
    """``.to(dtype)`` moves all weights: the graph of the old ones is dropped."""
    model = nn.Linear(3, 3).eval()
    step = settled(model, **INPUT)
    model.double()
    step.check_calls(torch.randn(4, 3, dtype=torch.float64))
    step.check(Reason.CAPTURED_NOW)


@pytest.mark.parametrize("serves", [False, True], ids=["before a capture", "between hits"])
def test_exception_in_model(opened: Settle, serves: bool) -> None:
    """The model's own exception passes unchanged, its effects happen once, and later calls are served."""
    count = torch.zeros((), dtype=torch.int64)

    def fn(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        if x.shape[1] != 3:
            raise KeyError("three columns")
        return x * 2

    step = opened(fn)
    if serves:
        step.settle(lambda rows: (torch.randn(rows, 3),))
    for _ in range(2):
        with pytest.raises(KeyError, match="three columns"):
            step(torch.randn(4, 5))
        assert int(count) == step.calls
        x = torch.randn(4, 3)
        assert torch.equal(step(x), x * 2)
        assert step.was_hit() or not serves
        assert int(count) == step.calls


@needs("padding")
def test_exception_while_capturing(tried: Settle) -> None:
    """A model that fails on padded sizes alone gives eager's answers, with the error in the explanation."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 4:
            raise KeyError("four rows")
        return x * 2

    step = tried(fn, lambda rows: (torch.randn(3, 3),))
    x = torch.randn(3, 3)
    assert torch.equal(step(x), x * 2)
    step.check(Reason.CAPTURE_FAILED)
    assert "four rows" in (step.explanation(x) or "four rows")


def test_nested(settled: Settle) -> None:
    """Inside of a capture an inner step runs as it is and becomes part of the outer graph."""
    inner = settled(lambda x: x + 1)
    serve = inner.plain
    outer = settled(lambda x: serve(x) * 2)
    x = torch.randn(4, 3)
    hits = inner.hits
    assert torch.equal(outer(x), (x + 1) * 2)
    assert inner.hits == hits
