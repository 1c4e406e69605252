"""What goes wrong on an asynchronous device without anyone's care: the mistakes that the library has to prevent."""

import pytest
import torch
from queued_device import DEVICE, held

from .test_captures import captured, x_of

Graph = torch.accelerator.Graph


def test_a_dropped_outputs_block_is_used_by_the_next_capture() -> None:
    """And a replay of the first graph then overwrites the other's output."""
    x, stream = x_of(), torch.Stream(DEVICE)
    one, dropped = captured(lambda: x * 2, stream)
    address = dropped.data_ptr()
    del dropped
    other, out = captured(lambda: x * 7, stream, pool=one.pool())
    assert out.data_ptr() == address
    other.replay()
    assert out.cpu()[0] == 7
    one.replay()
    assert out.cpu()[0] == 2


def test_a_freed_input_is_read_as_somebody_elses_data() -> None:
    """The graph holds an address, and owns nothing."""
    x = x_of(0)
    graph, out = captured(lambda x=x: x + 1)
    address = x.data_ptr()
    del x
    other = x_of(99)
    assert other.data_ptr() == address
    graph.replay()
    assert out.cpu()[0] == 100


def test_a_missing_wait_reads_what_was_there_before() -> None:
    """With the wait it is right."""
    side, x = torch.Stream(DEVICE), x_of(1)
    with held(side):
        with side:
            x.fill_(5)
        early = x.cpu()
    assert early[0] == 1
    side.synchronize()
    with held(side):
        with side:
            x.fill_(9)
        torch.accelerator.current_stream().wait_stream(side)
        late = x * 1
    assert late.cpu()[0] == 9


@pytest.mark.parametrize("is_told", [False, True])
def test_memory_that_another_stream_still_reads_is_given_again(is_told: bool) -> None:
    """Unless ``record_stream`` said so to the allocator."""
    side, x = torch.Stream(DEVICE), x_of(1)
    with held(side):
        with side:
            seen = x * 1
        if is_told:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        other = torch.full((8,), 50.0, device=DEVICE)
        assert (other.data_ptr() == address) is not is_told
        torch.accelerator.current_stream().synchronize()
    side.synchronize()
    assert seen.cpu()[0] == (1 if is_told else 50)


def test_a_read_of_the_host_needs_a_wait() -> None:
    """A copy to pinned memory is under way when the call is back; one to other memory is done."""
    side, x, there = torch.Stream(DEVICE), x_of(3), torch.zeros(8, pin_memory=True)
    with held(side), side:
        there.copy_(x, non_blocking=True)
        assert there[0] == 0
    side.synchronize()
    assert there[0] == 3
