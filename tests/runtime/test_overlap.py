"""Calls whose arguments share memory that the graph writes run eagerly, whatever storages the memory has."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Graphed, graphed
from graphdispatch.runtime.overlap import Spans, may_overlap_itself, share_memory

OPTIONS = CUDAGraphOptions(capture_share=None)


def _served(fn: Callable[..., object], *shapes: tuple[int, ...], dynamic: dict[str, int]) -> Graphed:
    serve = graphed(fn, dynamic=dynamic, options=OPTIONS)
    for _ in range(6):
        serve(*map(torch.randn, shapes))
    assert serve.last_decision.reason.name == "EXACT"
    return serve


class Cache(nn.Module):
    """Writes one slot, which is an argument, and reads all."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slots", torch.zeros(8, 3))

    def forward(self, slot: Tensor, x: Tensor) -> Tensor:
        slot.copy_(x)
        return self.slots.sum(0) + x


def test_an_argument_that_is_written_may_be_state_that_is_read() -> None:
    """A copy of the slot would not be seen by the sum over all slots."""
    cache = Cache()
    serve = _served(cache, (3,), (3,), dynamic={})
    assert torch.equal(serve(cache.slots[0], torch.ones(3)), torch.full((3,), 2.0))
    assert serve.last_decision.reason.name == "ALIASED_ARGUMENTS"


def test_two_storages_over_one_memory_are_seen() -> None:
    """An argument is written, and another one begins within it."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    serve = _served(fn, (4, 3), (4, 3), dynamic={"x": 0, "y": 0})
    numbers = np.zeros((6, 3), np.float32)
    answer = serve(torch.from_numpy(numbers[:4]), torch.from_numpy(numbers[2:]))
    assert torch.equal(answer[:, 0], torch.tensor([2.0, 2.0, 0.0, 0.0]))


@pytest.mark.parametrize("first", [0, 1, 3])
def test_an_argument_that_ends_within_written_state_is_seen(first: int) -> None:
    """It begins before the state, or in the middle, in a storage of its own."""
    numbers = np.zeros((9, 3), np.float32)
    state = torch.from_numpy(numbers[2:5])

    def fn(x: Tensor) -> Tensor:
        state.add_(1)
        return x * 1

    serve = _served(fn, (4, 3), dynamic={"x": 0})
    x = torch.from_numpy(numbers[first : first + 4])
    for _ in range(2):
        assert torch.equal(serve(x), x)
        assert serve.last_decision.reason.name == "ALIASED_ARGUMENTS"
    serve(torch.from_numpy(numbers[5:9]))
    assert serve.last_decision.reason.name == "EXACT"


def test_an_argument_whose_elements_share_memory_is_not_copied_back() -> None:
    """Written by the graph in a copy, its other elements would keep what they were."""

    def fn(x: Tensor) -> Tensor:
        x[:, 0].masked_fill_(x[:, 0] > 10, 0.0)
        return x * 1

    for given in (lambda: torch.randn(6).add_(20).as_strided((4, 3), (1, 1)), lambda: torch.randn(4, 3)):
        serve = graphed(fn, dynamic={"x": 0}, options=OPTIONS)
        for _ in range(6):
            serve(given())
        x = torch.randn(6).add_(20).as_strided((4, 3), (1, 1))
        mine = x.as_strided((6,), (1,)).clone().as_strided((4, 3), (1, 1))
        assert torch.equal(serve(x), fn(mine))
        assert torch.equal(x, mine)


def test_ranges_of_addresses() -> None:
    """Slices beside each other share nothing, interleaved ones may; a tensor without elements takes no memory."""
    base = torch.zeros(8, 6)
    assert not share_memory([base[:4], base[4:]])
    assert share_memory([base[:5], base[4:]])
    assert share_memory([base[:, :3], base[:, 3:]])
    assert not share_memory([base[:4], base[4:4], base[4:]])
    spans = Spans([base[2:4].clone(), torch.zeros(3)])
    assert not spans.overlaps(base)
    assert Spans([base]).overlaps(base[7:])
    assert not Spans([]).overlaps(base)


@pytest.mark.parametrize(
    ("tensor", "shares"),
    [
        (torch.zeros(4, 3), False),
        (torch.zeros(4, 3).t(), False),
        (torch.zeros(8, 6)[::2, :3], False),
        (torch.zeros(1, 3).expand(4, 3), True),
        (torch.zeros(6).as_strided((4, 3), (1, 1)), True),
        (torch.zeros(9).as_strided((4, 3), (2, 1)), True),
        (torch.zeros(12).as_strided((4, 3), (3, 1)), False),
        (torch.zeros(()), False),
        (torch.zeros(0, 3), False),
    ],
)
def test_elements_that_share_memory(tensor: Tensor, shares: bool) -> None:
    """Strides say whether two elements may lie at one place."""
    assert may_overlap_itself(tensor) == shares
