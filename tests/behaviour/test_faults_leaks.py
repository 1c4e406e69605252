"""Repeated faults take no memory: no tensor, no byte of a pool and no thread is left of a capture that failed."""

import gc
import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphdispatch import Reason, graphed

from ..helpers import AT_ONCE
from .inject import Faults

CAPTURES = 200


def living() -> int:
    """Tensors and storages that Python can reach, once all garbage is collected."""
    gc.collect()
    # By type: some of torch's objects answer isinstance with a warning.
    return sum(issubclass(type(thing), (torch.Tensor, torch.UntypedStorage)) for thing in gc.get_objects())


@pytest.mark.parametrize(("point", "times"), [("end", CAPTURES), ("arena", 50), ("replay", 50)])
def test_failed_captures_leave_nothing(faults: Faults, point: str, times: int) -> None:
    """After hundreds of them there are as many tensors, tracked bytes and threads as after the first ten."""
    step = graphed(lambda x: x.relu() * 2, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    x = torch.randn(4, 2)

    def fail() -> None:
        step.clear()
        faults.set(point, 1, error=MemoryError)
        step(x)
        assert step.last_decision.reason is Reason.OUT_OF_MEMORY
        assert step.entries == []

    for _ in range(10):
        fail()
    before = living(), threading.active_count(), step.memory_bytes
    for _ in range(times):
        fail()
    assert (living(), threading.active_count(), step.memory_bytes) == before
    assert step._graph_cache.pool.nbytes == 0


def test_failed_replays_leave_nothing(faults: Faults) -> None:
    """A replay that fails and is compared and serves again, many times."""
    step = graphed(lambda x: x.relu() * 2, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)

    def fail(number: int) -> None:
        faults.set("replay", 1)
        step(torch.full((4, 2), float(number)))
        assert step.last_decision.reason is Reason.VERIFIED_NOW
        step(torch.ones(4, 2))
        assert step.last_decision.reason is Reason.EXACT

    for number in range(3):
        step(torch.full((4, 2), float(number)))
    for number in range(10):
        fail(number)
    before = living(), step.memory_bytes
    for number in range(100):
        fail(number)
    assert (living(), step.memory_bytes) == before


def test_a_failed_call_holds_no_batch(faults: Faults) -> None:
    """What is kept of a failure is text: the batch and the traceback go with the call, without the collector's help."""
    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=(2, 4), options=AT_ONCE)
    step(torch.randn(2, 2))  # torch imports more on its first use, and keeps the frames that asked for it
    gc.disable()
    try:
        faults.set("end", 1)
        x = torch.randn(4, 2)
        storage = StorageWeakRef(x.untyped_storage())
        step(x)
        assert step.last_decision.reason is Reason.CAPTURE_FAILED
        del x
        assert storage.expired()
    finally:
        gc.enable()
