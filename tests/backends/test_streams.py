"""Streams, events and timers of the CPU. Order is shown with gates, never by waiting a while."""

import contextlib
import threading
from collections.abc import Iterator

import pytest

from graphdispatch.backends import Backend, get_backend

TIMEOUT_S = 30.0
"""Bound on every wait of a test: reached only where the code under test hangs, and then the test fails."""


def passed(gate: threading.Event) -> None:
    """Wait for ``gate``, or fail."""
    assert gate.wait(TIMEOUT_S), "the gate was never opened"


def break_down() -> None:
    """A piece of work that fails."""
    raise ArithmeticError("the model broke")


@pytest.fixture
def backend() -> Backend:
    """The CPU's."""
    return get_backend("cpu")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A closed gate; opened at the end, so that a failing test cannot leave a stream blocked."""
    event = threading.Event()
    yield event
    event.set()


def test_current_stream_nests_and_is_restored(backend: Backend) -> None:
    """``use`` puts the previous stream back, also when its block raises."""
    worker, other = backend.make_stream(), backend.make_stream()
    default = backend.current_stream()
    with backend.use_stream(worker):
        with contextlib.suppress(ArithmeticError), backend.use_stream(other):
            assert backend.current_stream() is other
            break_down()
        assert backend.current_stream() is worker
    assert backend.current_stream() is default


def test_an_inline_stream_runs_one_piece_at_a_time(backend: Backend, gate: threading.Event) -> None:
    """Work that two threads give to a stream of the CPU never overlaps, and who waits for the stream waits for it."""
    stream, seen, inside = backend.make_stream(), list[str](), threading.Event()

    def first() -> None:
        assert backend.current_stream() is stream
        inside.set()
        passed(gate)
        backend.submit(stream, lambda: seen.append("nested"))
        seen.append("first")

    others = [threading.Thread(target=backend.submit, args=(stream, first))]
    others[0].start()
    passed(inside)
    others += [
        threading.Thread(target=backend.submit, args=(stream, lambda: seen.append("second"))),
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
        backend.submit(stream, break_down)  # at once
