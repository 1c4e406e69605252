"""Several dynamic dimensions: models that mix a sequence, or that use its length in Python."""

from collections.abc import Callable

import pytest
import torch

from graphdispatch import Dim, Graphed, Reason, graphed

from ..helpers import AT_ONCE

DIMS = {0: "batch", 1: Dim("seq", sizes=[8])}
SEQUENCE_MIXERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention": lambda x: (x @ x.transpose(1, 2)).softmax(2) @ x,
    "mean": lambda x: x.mean(1),
    "softmax": lambda x: x.softmax(1),
    "maximum": lambda x: x.amax(1),
}
LENGTHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scales": lambda x: x / x.shape[1],
    "branches": lambda x: x * 2 if x.shape[1] > 5 else x * 3,
    "takes odd ones apart": lambda x: x * 2 if x.shape[1] % 2 else x * 3,
    "counts": lambda x: x + torch.arange(x.shape[1]).flip(0)[:, None],
}


def tried(fn: Callable[..., torch.Tensor]) -> Graphed[..., torch.Tensor]:
    """``fn`` after calls of many lengths, each compared with eager."""
    step = graphed(fn, dynamic={"x": DIMS}, sizes=[4], options=AT_ONCE)
    for length in (8, 8, 7, 6, 5, 4, 3, 2, 1, 8, 7, 4, 3):
        x = torch.randn(4, length, 3) - 1
        torch.testing.assert_close(step(x), fn(x), rtol=1e-4, atol=1e-6)
    return step


@pytest.mark.parametrize("mixer", SEQUENCE_MIXERS.values(), ids=SEQUENCE_MIXERS)
def test_sequence_mixed(mixer: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Such a model runs eagerly where a sequence would be padded, and by a graph where it is full."""
    step = tried(mixer)
    step(torch.randn(4, 5, 3))
    assert step.last_decision.reason is Reason.VERIFICATION_FAILED
    step(torch.randn(4, 8, 3))
    assert step.last_decision.reason is Reason.EXACT


def test_sequence_mixed_instead() -> None:
    """With a mask it is served, whatever the length."""

    def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = (x @ x.transpose(1, 2)).masked_fill(mask[:, None] == 0, -1e9)
        return scores.softmax(2) @ x

    step = graphed(attend, dynamic={"x": DIMS, "mask": {0: "batch", 1: "seq"}}, sizes=[4], options=AT_ONCE)
    for length in (8, 8, 7, 6, 5, 4, 3, 2, 1, 8, 7, 4, 3):
        x, mask = torch.randn(4, length, 3), torch.ones(4, length)
        torch.testing.assert_close(step(x, mask), attend(x, mask), rtol=1e-4, atol=1e-6)
    assert step.last_decision.reason is Reason.PADDED


@pytest.mark.parametrize("fn", LENGTHS.values(), ids=LENGTHS)
def test_length_in_python(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """It is found by comparing each length, before one is served."""
    step = tried(fn)
    for length in (3, 4):
        step(torch.randn(4, length, 3))
        assert step.last_decision.reason is Reason.VERIFICATION_FAILED


def test_length_in_python_instead() -> None:
    """The mask tells the length of each row."""

    def mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)

    step = graphed(mean, dynamic={"x": DIMS, "mask": {0: "batch", 1: "seq"}}, sizes=[4], options=AT_ONCE)
    for length in (8, 8, 5, 5, 3, 2, 5):
        x, mask = torch.randn(3, length, 3), torch.ones(3, length)
        torch.testing.assert_close(step(x, mask), mean(x, mask), rtol=1e-4, atol=1e-6)
    assert step.last_decision.reason is Reason.PADDED
