"""Streams, events and timers, most of them of a CPU whose streams are threads.

Order is shown with gates and barriers, never by waiting a while.
"""

import contextlib
import contextvars
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from graphdispatch.backends import Backend, Timer, get_backend
from graphdispatch.errors import BackendError

from ..thread_streams import ThreadBackend

TIMEOUT_S = 30.0
"""Bound on every wait of a test: reached only where the code under test hangs, and then the test fails."""


def passed(gate: threading.Event) -> None:
    """Wait for ``gate``, or fail."""
    assert gate.wait(TIMEOUT_S), "the gate was never opened"


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, as a piece of work."""
    target.copy_(source)


def break_down() -> None:
    """A piece of work that fails."""
    raise ArithmeticError("the model broke")


def synchronized(stream: Any) -> None:
    """``stream.synchronize()`` on a helper thread, so that a hang fails the test instead of holding it up."""
    done = threading.Event()

    def target() -> None:
        stream.synchronize()
        done.set()

    threading.Thread(target=target, daemon=True).start()
    passed(done)


@pytest.fixture
def state() -> Backend:
    """The backend."""
    return get_backend(ThreadBackend.name)


@pytest.fixture
def worker(state: Backend) -> Iterator[Any]:
    """A stream."""
    stream = state.make_stream("worker")
    yield stream
    stream.close()


@pytest.fixture
def other(state: Backend) -> Iterator[Any]:
    """A second stream."""
    stream = state.make_stream("other")
    yield stream
    stream.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A closed gate; opened at the end, so that a failing test cannot leave a stream blocked."""
    event = threading.Event()
    yield event
    event.set()


def test_two_streams_without_an_event_are_not_ordered(worker: Any, other: Any, gate: threading.Event) -> None:
    """The fault that a missing event makes on a GPU shows here too: the reader gets the old value."""
    value, seen = torch.zeros(1), torch.full((1,), -1.0)
    worker.submit(partial(passed, gate))
    worker.submit(partial(write, value, torch.tensor([7.0])))
    other.submit(partial(write, seen, value))
    other.synchronize()
    gate.set()
    worker.synchronize()
    assert (seen.item(), value.item()) == (0, 7)


def test_waiting_refers_to_the_latest_record(state: Backend, worker: Any, gate: threading.Event) -> None:
    """An event that is recorded again stands for the new mark, and is no longer done."""
    event = state.make_event()
    event.record()
    before = event.query()
    worker.submit(partial(passed, gate))
    event.record(worker)
    assert (before, event.query()) == (True, False)
    gate.set()
    event.synchronize()
    assert event.query()


def test_work_behind_a_failure_is_skipped_until_it_was_raised(worker: Any) -> None:
    """Work that relied on the failed piece never runs; work that is given after the report does."""
    seen: list[str] = []
    worker.submit(break_down)
    worker.submit(lambda: seen.append("skipped"))
    with pytest.raises(ArithmeticError, match="the model broke"):
        worker.synchronize()
    worker.synchronize()
    worker.submit(lambda: seen.append("served"))
    worker.synchronize()
    assert seen == ["served"]


def test_a_failure_reaches_whoever_waits_for_it(state: Backend, worker: Any, other: Any) -> None:
    """A stream behind a failed one skips its work too, and reports the same exception."""
    seen: list[str] = []
    worker.submit(break_down)
    other.wait_stream(worker)
    other.submit(lambda: seen.append("wrong"))
    with pytest.raises(ArithmeticError):
        other.synchronize()
    with pytest.raises(ArithmeticError):
        state.current_stream().wait_stream(worker)
    with pytest.raises(ArithmeticError):
        worker.close()
    worker.close()
    assert seen == []
    with pytest.raises(ArithmeticError):
        state.current_stream().submit(break_down)  # at once
    state.current_stream().synchronize()


def test_even_a_request_to_exit_leaves_the_stream_alive(worker: Any) -> None:
    """SystemExit in a piece of work is kept like any exception: the thread, and who waits for it, go on."""
    worker.submit(partial(sys.exit, 3))
    with pytest.raises(SystemExit):
        worker.synchronize()
    synchronized(worker)


def test_a_closed_stream_finished_its_work_and_takes_no_more(state: Backend) -> None:
    """``close`` drains the queue and may be called twice; later work is refused."""
    stream, seen = state.make_stream("copies"), list[int]()
    assert repr(stream) == "<ThreadStream copies open>"
    stream.submit(lambda: seen.append(1))
    stream.close()
    stream.close()
    stream.synchronize()
    assert seen == [1]
    assert repr(stream) == "<ThreadStream copies closed>"
    with pytest.raises(BackendError, match="takes no work after close"):
        stream.submit(lambda: seen.append(2))
    with pytest.raises(BackendError, match="takes no work after close"):
        state.make_event().record(stream)


def test_a_forgotten_stream_ends_its_thread(state: Backend) -> None:
    """A stream that nobody holds is collected, and its thread does not stay behind."""
    stream = state.make_stream("forgotten")
    stream.submit(lambda: None)
    stream.synchronize()
    thread, gone = stream._thread, weakref.ref(stream)
    del stream
    gc.collect()
    thread.join(TIMEOUT_S)
    assert gone() is None
    assert not thread.is_alive()


def test_current_stream_nests_and_is_restored(state: Backend, worker: Any, other: Any) -> None:
    """``use`` puts the previous stream back, also when its block raises."""
    default = state.current_stream()
    with state.use_stream(worker):
        with contextlib.suppress(ArithmeticError), state.use_stream(other):
            assert state.current_stream() is other
            break_down()
        assert state.current_stream() is worker
    assert state.current_stream() is default


def test_work_runs_in_the_submitters_modes(worker: Any) -> None:
    """Inference and gradient mode, autocast and context variables, which each thread has apart, are carried over."""
    name = contextvars.ContextVar[str]("name", default="unset")
    one, seen = torch.ones(2, 2), list[tuple[bool, bool, str, bool]]()

    def look() -> None:
        halves = (one @ one).dtype is torch.bfloat16
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), name.get(), halves))

    with torch.inference_mode():
        worker.submit(look)
    with torch.no_grad():
        worker.submit(look)
    token = name.set("caller")
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        worker.submit(look)
    name.reset(token)
    worker.synchronize()
    assert seen == [(True, False, "unset", False), (False, False, "unset", False), (False, True, "caller", True)]


def test_work_may_use_its_own_stream(state: Backend, worker: Any) -> None:
    """What work gives to its own stream happens at once, so that nothing there can wait for itself."""
    seen: list[str] = []

    def work() -> None:
        worker.submit(lambda: seen.append("nested"))
        event = state.make_event()
        event.record()
        event.wait()
        event.synchronize()
        worker.synchronize()
        seen.append("outer")

    worker.submit(work)
    synchronized(worker)
    assert seen == ["nested", "outer"]


def test_a_mark_behind_the_running_work_does_not_block_it(state: Backend, worker: Any, gate: threading.Event) -> None:
    """A stream never waits for its own later mark; a thread that would is told so instead of hanging."""
    event, refused = state.make_event(), list[BackendError]()

    def work() -> None:
        passed(gate)
        event.wait()
        with pytest.raises(BackendError, match="behind itself") as caught:
            event.synchronize()
        refused.append(caught.value)

    worker.submit(work)
    event.record(worker)
    gate.set()
    synchronized(worker)
    assert len(refused) == 1


def test_a_timer_can_run_again_and_inline(state: Backend) -> None:
    """Starting again forgets the earlier end; stopping first is refused."""
    timer = Timer(state.make_event(timing=True), state.make_event(timing=True))
    with pytest.raises(BackendError, match="before it was started"):
        timer.stop()
    timer.start()
    timer.stop()
    assert timer.elapsed_ms() is not None
    timer.start()
    assert timer.elapsed_ms() is None


def test_elapsed_needs_two_timed_and_reached_events() -> None:
    """Asking for time that was not kept, or is not over, is a clear error."""
    backend = get_backend("cpu")
    start, end, plain = backend.make_event(timing=True), backend.make_event(timing=True), backend.make_event()
    start.record()
    plain.record()
    with pytest.raises(BackendError, match="end is not reached"):
        start.elapsed_ms(end)
    with pytest.raises(BackendError, match="end keeps no time"):
        start.elapsed_ms(plain)
    with pytest.raises(BackendError, match="end must be an event of the CPU backend"):
        start.elapsed_ms(object())  # type: ignore[arg-type]
    end.record()
    assert start.elapsed_ms(end) >= 0


def test_a_stream_of_another_backend_is_refused() -> None:
    """Only the CPU backend's own streams can be current or be waited for."""
    backend, foreign = get_backend("cpu"), object()
    with pytest.raises(BackendError, match="must come from the CPU backend"), backend.use_stream(foreign):  # type: ignore[arg-type]
        pass
    with pytest.raises(BackendError, match="must come from the CPU backend"):
        backend.make_stream().wait_stream(foreign)  # type: ignore[arg-type]


def test_an_inline_stream_runs_one_piece_at_a_time(gate: threading.Event) -> None:
    """Work that two threads give to a stream of the CPU never overlaps, and who waits for the stream waits for it."""
    backend = get_backend("cpu")
    stream, seen, inside = backend.make_stream(), list[str](), threading.Event()

    def first() -> None:
        assert backend.current_stream() is stream
        inside.set()
        passed(gate)
        stream.submit(lambda: seen.append("nested"))
        seen.append("first")

    others = [threading.Thread(target=stream.submit, args=(first,))]
    others[0].start()
    passed(inside)
    others += [
        threading.Thread(target=stream.submit, args=(lambda: seen.append("second"),)),
        threading.Thread(target=lambda: (backend.current_stream().wait_stream(stream), seen.append("waited"))),
        threading.Thread(target=lambda: (backend.make_event().record(stream), seen.append("marked"))),
    ]
    for other in others[1:]:
        other.start()
    assert seen == []
    gate.set()
    for other in others:
        other.join(TIMEOUT_S)
    assert (seen[:2], sorted(seen[2:])) == (["nested", "first"], ["marked", "second", "waited"])
    with pytest.raises(ArithmeticError):
        stream.submit(break_down)  # at once
    stream.close()
