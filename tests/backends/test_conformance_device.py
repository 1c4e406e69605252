"""Streams, events, timers, generators and memory as ``backends/base.py`` promises them, by every backend."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from graphdispatch import Reason
from graphdispatch.backends import Backend, Graph, Pool, Stopwatch, get_backend, register_backend
from graphdispatch.errors import BackendError

from ..helpers import in_threads

Draw = Callable[..., torch.Tensor]
Record = Callable[..., tuple[Graph, Any]]


def test_capturing_is_known_to_its_thread(backend: Backend, pool: Pool) -> None:
    """And to no other."""
    assert not backend.is_capturing()
    with backend.begin_capture(pool):
        assert backend.is_capturing()
        assert backend.is_watched()
        assert in_threads(backend.is_watched) == [False]
    assert not backend.is_capturing()


def test_watched_blocks_nest(backend: Backend) -> None:
    """The thread is watched until the outermost ends, however it ends."""

    def failing() -> None:
        with backend.watched():
            raise KeyError("mine")

    with backend.watched():
        with pytest.raises(KeyError):
            failing()
        assert backend.is_watched()
    assert not backend.is_watched()


def test_random_numbers_are_drawn_anew_and_can_be_put_back(backend: Backend, record: Record) -> None:
    """Each replay advances the generator; from one state come the same numbers."""
    x = torch.zeros(4, 3, device=backend.device)
    graph, out = record(lambda x: x + torch.rand_like(x), x)
    state = backend.rng_state()
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(out.clone())
    assert not torch.equal(drawn[0], drawn[1])
    backend.set_rng_state(state)
    graph.replay()
    assert torch.equal(out, drawn[0])


def append_digit(x: torch.Tensor, digit: int) -> None:
    """Write a digit behind those of ``x``."""
    x.mul_(10).add_(digit)


def test_work_on_a_stream_runs_in_order(backend: Backend) -> None:
    """And is done after ``synchronize``."""
    stream = backend.make_stream()
    x = torch.zeros(1, device=backend.device)
    stream.wait_stream(backend.current_stream())
    for factor in (1, 2, 3):
        with backend.use_stream(stream):
            append_digit(x, factor)
    stream.synchronize()
    assert x.item() == 123


def test_the_stream_before_comes_back(backend: Backend) -> None:
    """Blocks of streams nest, and end well however they end."""
    worker, other, before = backend.make_stream(), backend.make_stream(), backend.current_stream()
    with backend.use_stream(worker):
        with suppress(KeyError), backend.use_stream(other):
            assert backend.current_stream() == other
            raise KeyError("mine")
        assert backend.current_stream() == worker
    assert backend.current_stream() == before


def test_a_replay_goes_to_the_current_stream(backend: Backend, pool: Pool, draw: Draw, record: Record) -> None:
    """The pool orders it after its last use elsewhere, and back again."""
    x = draw()
    graph, out = record(lambda x: x.cumsum(0), x)
    stream = backend.make_stream()
    with backend.use_stream(stream), pool.lock:
        assert backend.current_stream() == stream
        pool.order_after_last_use()
        graph.replay()
    with pool.lock:
        pool.order_after_last_use()
    torch.testing.assert_close(out, x.cumsum(0))


def test_an_event_orders_two_streams(backend: Backend) -> None:
    """What waits for it sees all work before the mark; unrecorded, it is done."""
    one, two = backend.make_stream(), backend.make_stream()
    x = torch.zeros(1, device=backend.device)
    event = backend.make_event()
    assert event.query()
    event.synchronize()
    one.wait_stream(backend.current_stream())
    with backend.use_stream(one):
        append_digit(x, 1)
    event.record(one)
    event.wait(two)
    with backend.use_stream(two):
        append_digit(x, 0)
    two.synchronize()
    assert x.item() == 10
    assert event.query()


def test_a_stopwatch_tells_later(backend: Backend, draw: Draw) -> None:
    """Milliseconds, once the end was reached; while as many as allowed are outstanding it times no more."""
    watch, times = Stopwatch(most=1), list[float]()
    marks = watch.start(backend)
    assert marks is not None
    draw().exp()
    watch.stop(marks, times.append)
    backend.synchronize()
    watch.collect()
    watch.collect()
    assert len(times) == 1
    assert times[0] >= 0
    assert watch.start(backend) == marks  # for the next time, since making them costs as much as a short replay


def test_a_weak_reference_is_the_same_memory(backend: Backend, draw: Draw) -> None:
    """Over it one reads and writes the tensor."""
    x = draw()
    weak = backend.weak_reference(x)
    weak.fill_(3)
    assert (weak.data_ptr(), weak.shape, weak.dtype) == (x.data_ptr(), x.shape, x.dtype)
    assert x.tolist() == [[3.0] * 3] * 4


def test_errors_are_classified(backend: Backend) -> None:
    """Memory that ran out is an error of its own kind."""
    for full in (torch.OutOfMemoryError("full"), MemoryError()):
        assert backend.classify_error(full) is Reason.OUT_OF_MEMORY
    of_the_host = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
    assert get_backend("cpu").classify_error(of_the_host) is Reason.OUT_OF_MEMORY
    assert backend.classify_error(ValueError("no")) is Reason.CAPTURE_FAILED


@pytest.mark.parametrize(
    ("name", "device", "named"),
    [
        ("tpu", None, "backend 'tpu' is unknown; expected one of 'auto', 'cpu', '.*', or a name given"),
        ("cpu", torch.device("meta"), "serves 'cpu' devices, got device 'meta'"),
        ("auto", torch.device("meta"), "backend 'meta' is unknown"),
    ],
)
def test_an_unknown_backend_is_named(name: str, device: torch.device | None, named: str) -> None:
    """The message lists what there is."""
    with pytest.raises(BackendError, match=named):
        get_backend(name, device)


def test_a_backend_without_a_device_is_refused(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to use instead."""
    monkeypatch.setattr(type(backend), "is_available", classmethod(lambda cls: False))
    with pytest.raises(BackendError, match="has no usable device here; use backend='cpu' or 'auto'"):
        get_backend(type(backend).name)


def test_a_name_is_taken_once() -> None:
    """A second backend of one name would make captures depend on the order of imports."""
    before = get_backend("cpu")
    with pytest.raises(BackendError, match="backend 'cpu' is registered already"):
        register_backend("cpu", pytest.fail)
    assert get_backend("cpu") is before
