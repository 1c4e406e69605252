"""What each backend promises in ``backends/base.py``: captures, graphs, pools, streams, events, generators, memory."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from graphdispatch import Reason
from graphdispatch.backends import Backend, Graph, Pool, Stopwatch, get_backend, register_backend
from graphdispatch.errors import BackendError, CaptureError, ReplayError

from ..helpers import in_threads, may_capture
from ..sized import Unused

Draw = Callable[..., torch.Tensor]
Record = Callable[..., tuple[Graph, Any]]
Fn = Callable[[torch.Tensor], Any]
MODELS: dict[str, Fn] = {
    "elementwise": lambda x: (x * 2 + 1).relu(),
    "matmul": lambda x: (x @ x.T).softmax(-1),
    "views": lambda x: x.T.reshape(-1)[1:].view(-1, 1),
    "several outputs": lambda x: (x.sum(0), x.max(1).values, x),
    "in place inside": lambda x: x.clone().add_(1).mul_(2),
    "constant": lambda x: x + torch.arange(3, device=x.device),
}


@pytest.mark.parametrize("fn", MODELS.values(), ids=MODELS.keys())
def test_a_replay_is_eager(backend: Backend, fn: Fn, draw: Draw, record: Record) -> None:
    """On new values in the old place, as exactly as the backend promises."""
    x = draw()
    graph, out = record(fn, x)
    for _ in range(3):
        x.copy_(draw())
        graph.replay()
        backend.synchronize()
        tolerance = {"rtol": 0, "atol": 0} if backend.capture_executes else {}
        torch.testing.assert_close(out, fn(x), **tolerance)


def test_state_is_written_once_for_each_replay(backend: Backend, draw: Draw, record: Record) -> None:
    """And by the capture only where recording executes."""
    count = torch.zeros(1, device=backend.device)
    graph, _ = record(lambda x: count.add_(x.sum() * 0 + 1), draw())
    before = count.item()
    assert before == (2 if backend.capture_executes else 1)  # the warm-up counts too
    graph.replay()
    graph.replay()
    assert count.item() == before + 2


def test_python_is_frozen(draw: Draw, record: Record) -> None:
    """A number is what it was at the capture, and Python does not run again."""
    factor, runs = [2.0], []

    def fn(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x * factor[0]

    x = draw()
    graph, out = record(fn, x)
    factor[0], seen = 3.0, len(runs)
    graph.replay()
    assert len(runs) == seen
    torch.testing.assert_close(out, x * 2)


def test_graphs_of_one_pool_work_in_turn(draw: Draw, record: Record) -> None:
    """They may share memory; each is right when it is replayed, and the memory stays when another is released."""
    made = []
    for rows in (8, 4):
        x = draw(rows, 3)
        made.append((x, *record(lambda x: (x * 2).exp().cumsum(0), x)))
    for x, graph, out in made * 2:
        x.copy_(draw(*x.shape))
        graph.replay()
        torch.testing.assert_close(out, (x * 2).exp().cumsum(0))
    made[0][1].reset()
    x, graph, out = made[-1]
    graph.replay()
    torch.testing.assert_close(out, (x * 2).exp().cumsum(0))


def test_the_generation_grows_with_each_replay(backend: Backend, pool: Pool, draw: Draw, record: Record) -> None:
    """Of whichever graph of the pool, and of no other pool."""
    x = draw()
    graphs = [record(lambda x: x + 1, x)[0] for _ in range(2)]
    other = backend.make_pool()
    before = pool.generation
    for graph in (*graphs, *graphs):
        graph.replay()
    assert (pool.generation, other.generation) == (before + 4, 0)
    other.trim()


def test_a_released_graph_is_not_replayed(draw: Draw, record: Record) -> None:
    """Releasing is idempotent and gives its bytes back."""
    graph, _ = record(lambda x: x + 1, draw())
    assert graph.nbytes >= 0
    graph.reset()
    graph.reset()
    assert graph.nbytes == 0
    with pytest.raises(ReplayError, match="released"):
        graph.replay()


def test_an_error_in_a_capture_is_kept_and_nothing_else(
    backend: Backend, pool: Pool, draw: Draw, record: Record
) -> None:
    """The exception passes through; stream, lock and pool are as before, and the next capture works."""
    stream = backend.current_stream()
    x = draw()

    def broken() -> None:
        with backend.begin_capture(pool):
            x + 1
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        broken()
    capture = backend.begin_capture(pool)
    x + 1
    capture.abort()
    capture.abort()
    assert not backend.is_capturing()
    assert repr(backend.current_stream()) == repr(stream)
    assert may_capture()
    graph, out = record(lambda x: x + 1, x)
    graph.replay()
    torch.testing.assert_close(out, x + 1)


def test_a_capture_inside_a_capture_is_refused(backend: Backend, pool: Pool, draw: Draw) -> None:
    """With a reason, and the outer one goes on."""
    x = draw()
    x + 1
    with backend.begin_capture(pool) as outer:
        with pytest.raises(CaptureError, match="already under way on this thread") as caught:
            backend.begin_capture(pool)
        out = x + 1
    assert caught.value.reason is Reason.INSIDE_CAPTURE
    outer.graph.replay()
    torch.testing.assert_close(out, x + 1)


def test_captures_of_two_threads_take_turns(backend: Backend, pool: Pool) -> None:
    """The second begins when the first has ended."""
    order: list[str] = []
    started = threading.Event()

    def second() -> None:
        started.set()
        with backend.begin_capture(backend.make_pool()):
            order.append("second begins")

    thread = threading.Thread(target=second)
    with backend.begin_capture(pool):
        thread.start()
        assert started.wait(10)
        assert not may_capture()
        order.append("first ends")
    thread.join()
    assert order == ["first ends", "second begins"]


def test_a_pause_is_not_recorded(backend: Backend, pool: Pool, draw: Draw) -> None:
    """Two graphs with eager work between them, which sees the first one's outputs at their address."""
    x = draw()
    x + 1
    capture = backend.begin_capture(pool)
    doubled = x * 2
    first = capture.pause()
    assert not backend.is_capturing()
    middle = torch.zeros_like(doubled)
    capture.resume()
    assert backend.is_capturing()
    out = middle + 1
    second = capture.end()
    x.copy_(draw())
    first.replay()
    middle.copy_(doubled)
    second.replay()
    torch.testing.assert_close(out, x * 2 + 1)


def test_a_pool_knows_its_bytes(backend: Backend, draw: Draw, record: Record) -> None:
    """Nothing before the first graph, nothing once all graphs and outputs are gone and it was trimmed, twice."""
    pool = backend.make_pool()
    assert pool.nbytes == 0
    graph, _ = record(lambda x: (x * 2).cumsum(0).exp(), draw(), pool)
    assert pool.nbytes + graph.nbytes > 0
    graph.reset()
    del graph, _
    pool.trim()
    pool.trim()
    assert pool.nbytes == 0


def test_a_foreign_pool_is_refused(backend: Backend) -> None:
    """Its memory is of another kind."""
    with pytest.raises(BackendError, match="pool must come from"):
        backend.begin_capture(Unused())
    assert may_capture()


def test_an_ended_capture_cannot_end_again(backend: Backend) -> None:
    """``end`` within the ``with`` block is the end; a second one is a clear error."""
    with backend.begin_capture(backend.make_pool()) as capture:
        graph = capture.end()
    assert capture.graph is graph
    assert not capture.is_open
    with pytest.raises(CaptureError, match="ended already"):
        capture.end()


# Streams, events, timers, generators and memory as ``backends/base.py`` promises them, by every backend.


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
