"""The test device itself: what ``torch.accelerator.Graph`` captures there and what it refuses, as CUDA does; mistakes
that the library has to prevent; faults that are injected."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from queued_device import DEVICE, delays, fail_after, held

from ..helpers import in_threads
from ..property.test_programs import COLUMNS, PURE, ROWS, VIEWS, WRITES

Graph = torch.accelerator.Graph


def captured(fn: Callable[[], Any], stream: torch.Stream | None = None, **options: Any) -> tuple[Graph, Any]:
    """A graph of one call, and its outputs."""
    torch.accelerator.synchronize()
    graph = Graph(**options)
    try:
        with stream or torch.Stream(DEVICE), graph:
            out = fn()
    except BaseException:
        graph.reset()
        raise
    return graph, out


def x_of(value: float = 1.0) -> torch.Tensor:
    """A small tensor that is there."""
    made = torch.full((8,), float(value), device=DEVICE)
    torch.accelerator.synchronize()
    return made


def test_a_fork_that_is_joined_is_captured() -> None:
    """By events, on a side stream, with the memory of one pool."""
    x, side, stream = x_of(), torch.Stream(DEVICE), torch.Stream(DEVICE)

    def fork() -> torch.Tensor:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            there = x * 2
        here = x + 1
        torch.accelerator.current_stream().wait_stream(side)
        return here + there

    graph, out = captured(fork, stream)
    delays(1, 300)
    for value in (2.0, 7.0):
        x.fill_(value)
        graph.replay()
        assert out.cpu()[0] == value * 3 + 1


def unjoined(x: torch.Tensor) -> None:
    """Leave work on a side stream."""
    side = torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x * 2


def wait_for_outside(x: torch.Tensor) -> None:
    """Wait for work that no capture has."""
    event = torch.Event(DEVICE)
    event.record(torch.Stream(DEVICE))
    torch.accelerator.current_stream().wait_event(event)


def ask_for_event(x: torch.Tensor) -> None:
    """Wait on the host for an event."""
    event = torch.Event(DEVICE)
    event.record(torch.accelerator.current_stream())
    event.synchronize()


def end_elsewhere(x: torch.Tensor) -> None:
    """Leave another stream current."""
    torch.accelerator.set_stream(torch.Stream(DEVICE))


def swallow(x: torch.Tensor) -> None:
    """Do what is refused, and go on."""
    try:
        x.sum().item()
    except RuntimeError:
        x + 1


WAITS = "not permitted when stream is capturing"
REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), WAITS),
    "nonzero": (lambda x: x.nonzero(), WAITS),
    "truth": (lambda x: bool((x > 0).all()), WAITS),
    "synchronize": (lambda x: torch.accelerator.synchronize(), WAITS),
    "stream": (lambda x: torch.accelerator.current_stream().synchronize(), WAITS),
    "query": (lambda x: torch.Stream(DEVICE).query(), WAITS),
    "to the host": (lambda x: x.cpu(), "unless the CPU tensor is pinned"),
    "from the host": (lambda x: x.copy_(torch.ones(8)), "unless the CPU tensor is pinned"),
    "pinned, but waits": (lambda x: torch.empty(8, pin_memory=True).copy_(x), WAITS),
    "unjoined": (unjoined, "unjoined work"),
    "work outside": (wait_for_outside, "uncaptured work in another stream"),
    "event": (ask_for_event, WAITS),
    "another capture": (lambda x: Graph().capture_begin(), WAITS),
    "another stream at the end": (end_elsewhere, "must end on the stream"),
    "swallowed": (swallow, "previous error during capture"),
    "another generator": (lambda x: x.normal_(generator=torch.Generator(DEVICE)), "outside graph capture"),
    "seed": (lambda x: torch.get_device_module(DEVICE).manual_seed(1), "state cannot be set"),
}


@pytest.mark.parametrize(("fn", "words"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_what_cuda_refuses_is_refused(fn: Callable[[torch.Tensor], Any], words: str, mode: Any) -> None:
    """In CUDA's words, and the next capture works."""
    x, default = x_of(), torch.accelerator.current_stream()
    with pytest.raises(RuntimeError) as caught:
        captured(lambda: fn(x), capture_error_mode=mode)
    assert words in f"{caught.value} {caught.value.__context__}"
    torch.accelerator.set_stream(default)
    graph, out = captured(lambda: x + 1)
    graph.replay()
    assert out.cpu()[0] == 2


def test_the_default_stream_is_not_captured() -> None:
    """As on CUDA."""
    with pytest.raises(RuntimeError, match="non-default stream"):
        Graph().capture_begin()


def test_a_replay_in_a_capture_is_refused() -> None:
    """One graph holds no other one."""
    x = x_of()
    inner, _ = captured(lambda: x + 1)
    with pytest.raises(RuntimeError, match="previous error"):
        captured(inner.replay)


@pytest.mark.parametrize(("mode", "is_refused"), [("global", True), ("thread_local", False)])
def test_the_mode_says_whom_a_capture_forbids_to_wait(mode: Any, is_refused: bool) -> None:
    """In the global mode nobody may, and the capture is lost; else only the capture's thread."""
    x, errors = x_of(), []

    def wait() -> None:
        try:
            torch.accelerator.synchronize()
        except RuntimeError as error:
            errors.append(error)

    def fn() -> None:
        in_threads(wait)
        x + 1

    if is_refused:
        with pytest.raises(RuntimeError, match="previous error"):
            captured(fn, capture_error_mode=mode)
    else:
        captured(fn, capture_error_mode=mode)
    assert len(errors) == is_refused


# What goes wrong on an asynchronous device without anyone's care.


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


# Faults that are injected, and memory that runs out.


def test_a_failed_allocation_or_launch_fails_once() -> None:
    """The host learns it at once."""
    x = x_of()
    for fault, error in (("allocation", torch.OutOfMemoryError), ("launch", RuntimeError)):
        fail_after(fault, 0)
        with pytest.raises(error, match=r"out of memory|invalid configuration"):
            x + 1
        assert (x + 1).cpu()[0] == 2


# The operators of the device are the CPU's, later.


CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "numbers promote": lambda x: (x.long() * 2, x.long() * 2.5, x.half() * 2.5),
    "reductions": lambda x: (x.sum(0), x.max(1), x.argmax(), x.std()),
    "views of another type": lambda x: (torch.view_as_complex(x[:, :2].contiguous()), x.view(torch.int32)),
    "shapes by values": lambda x: (x.nonzero(), x[x > 0], (x > 0).any().item()),
    "out": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "new tensors": lambda x: (torch.arange(5, device=x.device), torch.eye(3, device=x.device), torch.full_like(x, 3)),
    "empty": lambda x: (x[:0] + 1, x[:0].sum()),
    "convolution": lambda x: torch.nn.functional.conv1d(x[None], x[:2, :ROWS, None], x[0, :2], padding=1),
    "on the host": lambda x: x.cpu().mul(2).to(x.device),
}
OF_TWO = PURE | VIEWS | WRITES
LEFT_OUT = ("literal", "written_literal", "index_written", "complex", "negative")
"""What makes tensors on the host, and lazy conjugates, which the device does not have."""


def on_host(value: Any) -> Any:
    """The same nest on the CPU."""
    return torch.utils._pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, value)


@pytest.mark.parametrize("name", [*CASES, *(name for name in OF_TWO if name not in LEFT_OUT)])
def test_an_operator_is_the_cpus(name: str) -> None:
    """Values, shapes and types, and what is written."""
    here = [torch.randn(ROWS, COLUMNS) for _ in range(1 if name in CASES else 2)]
    there = [x.to(DEVICE) for x in here]
    torch.testing.assert_close(on_host((OF_TWO | CASES)[name](*there)), (OF_TWO | CASES)[name](*here))
    torch.testing.assert_close(on_host(there), here)
