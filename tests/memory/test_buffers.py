"""Outputs in preallocated memory: a ring of copies."""

from collections.abc import Iterator

import pytest
import torch

from graphdispatch import Reason, graphed
from graphdispatch.backends import Pool, get_backend
from graphdispatch.engines import OutputView
from graphdispatch.errors import CaptureError, StaleOutputError
from graphdispatch.memory.buffers import OutputRing
from graphdispatch.memory.outputs import OutputRule, Outputs

from ..helpers import AT_ONCE

CAPACITY = 8
ROWS = OutputRule((((0, 1),),))


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def pool() -> Pool:
    """An empty pool of the CPU backend."""
    return get_backend("cpu").make_pool()


def test_a_ring_takes_its_copies_in_turn(pool: Pool) -> None:
    """N results live at a time, each in memory of its own, and the oldest is overwritten next."""
    memory = torch.zeros(4, 2)
    outputs = Outputs(memory, ROWS, [True], "ring:2", pool, OutputRing(2, CAPACITY))
    views = [outputs.taker(3)() for _ in (memory.fill_(1.0),)]
    views += [outputs.taker(2)() for _ in (memory.fill_(2.0),)]
    assert [view.get().tolist() for view in views] == [[[1.0, 1.0]] * 3, [[2.0, 2.0]] * 2]
    addresses = [view.get().data_ptr() for view in views]
    memory.fill_(3.0)
    third = outputs.taker(4)()
    assert (views[0].is_stale, views[1].is_stale, third.is_stale) == (True, False, False)
    assert third.get().data_ptr() == addresses[0] != addresses[1]
    with pytest.raises(StaleOutputError, match="or a longer ring"):
        views[0].get()


def test_a_ring_refuses_outputs_of_another_kind(pool: Pool) -> None:
    """A size whose outputs have another type cannot share it; that is a failed capture."""
    ring = OutputRing(1, CAPACITY)
    Outputs(torch.zeros(2, 2), ROWS, [True], "ring:1", pool, ring)
    with pytest.raises(CaptureError, match="cannot share a ring") as caught:
        Outputs(torch.zeros(2, 2).double(), ROWS, [True], "ring:1", pool, ring)
    assert caught.value.reason is Reason.OUTPUT_UNSUPPORTED


def test_a_ring_leaves_foreign_outputs_alone(pool: Pool) -> None:
    """A cache that the model returns is handed out itself, and constants come back."""
    cache = torch.ones(5)
    ring = OutputRing(2, CAPACITY)
    rule = OutputRule((((0, 1),), ()))
    outputs = Outputs((torch.ones(4), cache, "name"), rule, [True, False], "ring:2", pool, ring)
    own, foreign, name = outputs.taker(2)().get()
    assert (own.shape, foreign is cache, name) == ((2,), True, "name")
    assert ring.nbytes == 2 * CAPACITY * 4


def test_graphed_with_a_ring() -> None:
    """Graphs and eager steps alike return handles; each is right for N - 1 further calls."""
    step = graphed(lambda x: {"y": x * 2}, dynamic={"x": 0}, sizes=(2, 4), outputs="ring:2", options=AT_ONCE)
    kept: list[tuple[torch.Tensor, OutputView]] = []
    for turn, rows in enumerate([4, 4, 3, 2, 9, 4, 1, 2, 4, 4, 3, 4]):
        x = torch.full((rows, 2), float(turn))
        kept.append((x, step(x)))  # type: ignore[arg-type]
    assert step.stats.hits >= 4
    for x, view in kept:
        if not view.is_stale:
            assert torch.equal(view.get()["y"], x * 2)
    assert [view.is_stale for _, view in kept[-3:]] == [True, False, False]
