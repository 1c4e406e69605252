"""Faults that are injected, and memory that runs out."""

import pytest
import torch
from queued_device import DEVICE, fail_after, limit_memory, lose, recover

from .test_captures import captured, x_of

LOST = "unspecified launch failure"
MIB = 1 << 20


def test_a_failed_allocation_or_launch_fails_once() -> None:
    """The host learns it at once."""
    x = x_of()
    for fault, error in (("allocation", torch.OutOfMemoryError), ("launch", RuntimeError)):
        fail_after(fault, 0)
        with pytest.raises(error, match=r"out of memory|invalid configuration"):
            x + 1
        assert (x + 1).cpu()[0] == 2


def test_a_failed_kernel_loses_the_device() -> None:
    """The host learns it later, and from then on always, until the device is made whole."""
    x = x_of()
    fail_after("kernel", 0)
    x + 1
    with pytest.raises(RuntimeError, match=LOST):
        torch.accelerator.synchronize()
    for call in (lambda: x + 1, lambda: torch.empty(1, device=DEVICE), torch.accelerator.synchronize, x.cpu):
        with pytest.raises(RuntimeError, match=LOST):
            call()
    recover()
    assert x.cpu()[0] == 1


def test_a_device_that_is_lost_in_a_capture_or_before_a_replay() -> None:
    """The capture ends with that error, and leaves the stream; a replay has it, too."""
    x, stream = x_of(), torch.Stream(DEVICE)
    with pytest.raises(RuntimeError, match=LOST):
        captured(lose, stream)
    recover()
    graph, _ = captured(lambda: x + 1, stream)
    lose()
    with pytest.raises(RuntimeError, match=LOST):
        graph.replay()
    recover()
    graph.replay()


def test_memory_runs_out_and_the_cache_is_emptied_first() -> None:
    """What is cached is given back before an allocation fails."""
    torch.accelerator.empty_cache()
    limit_memory(torch.accelerator.memory_reserved() + 4 * MIB)
    x = torch.empty(3 * MIB, dtype=torch.uint8, device=DEVICE)
    del x
    with torch.Stream(DEVICE):
        x = torch.empty(3 * MIB, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        captured(lambda: torch.empty(3 * MIB, dtype=torch.uint8, device=DEVICE))
    del x
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5 * MIB, dtype=torch.uint8, device=DEVICE)
