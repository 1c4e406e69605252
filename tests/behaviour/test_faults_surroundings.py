"""Faults among streams, threads and the collector."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from graphdispatch import Reason, eager_break, graphed
from graphdispatch.backends import get_backend
from graphdispatch.runtime.collector import paused_collector

from ..helpers import AT_ONCE, check_rows, make
from ..thread_streams import ThreadBackend
from .forks import in_child
from .inject import nothing_left_behind


def fail() -> None:
    """A piece of work that breaks down."""
    raise ArithmeticError("the work broke down")


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_call_on_a_stream_is_done_when_it_returns(mode: str) -> None:
    """The calling thread copies in and out itself: it waits for what the stream has, and for the replay."""
    weight = torch.randn(256, 256)
    middle = eager_break(lambda h: h * 2) if mode == "PIECEWISE" else lambda h: h * 2
    step = make(lambda x: middle(x @ weight) @ weight, sizes=(64,), backend=ThreadBackend.name, mode=mode)
    check_rows(step, *[64] * 3, width=256)
    stream = get_backend(ThreadBackend.name).make_stream()
    gate = threading.Event()
    with get_backend(ThreadBackend.name).use_stream(stream):
        for number in range(5):
            x, late = torch.zeros(64, 256), torch.randn(64, 256)
            stream.submit(gate.wait)
            stream.submit(lambda x=x, late=late: x.copy_(late))
            gate.set()
            assert torch.equal(step(x), step.unwrap()(late)), number
            assert step.last_decision.reason is Reason.EXACT
    stream.close()


@pytest.mark.parametrize("ended", ["failed", "closed"])
def test_a_stream_that_ended_badly_does_not_hold_others_up(ended: str) -> None:
    """Who synchronizes it gets its failure; the next calls of the graph, elsewhere, are served."""
    backend = get_backend(ThreadBackend.name)
    step = make(backend=ThreadBackend.name)
    check_rows(step, 4, 4, 4)
    stream = backend.make_stream()
    with backend.use_stream(stream):
        check_rows(step, 4)
        if ended == "failed":
            stream.submit(fail)
    if ended == "closed":
        stream.close()
    for _ in range(2):
        with nothing_left_behind(step):
            check_rows(step, 4)
        assert step.last_decision.reason is Reason.EXACT
    if ended == "failed":
        with pytest.raises(ArithmeticError, match="broke down"):
            stream.close()


def test_a_failed_stream_tells_its_own_next_call() -> None:
    """A call on a stream whose earlier work failed gets that failure, once; nothing was copied or counted."""
    backend = get_backend(ThreadBackend.name)
    step = make(backend=ThreadBackend.name)
    check_rows(step, 4, 4, 4)
    hits = step.stats.hits
    stream = backend.make_stream()
    with backend.use_stream(stream):
        stream.submit(fail)
        with nothing_left_behind(step), pytest.raises(ArithmeticError, match="broke down"):
            step(torch.randn(4, 3))
        assert step.stats.hits == hits
        check_rows(step, 4)
    stream.close()


def test_stale_graphs_serve_nobody_while_they_are_released() -> None:
    """Between the release of one graph whose weights moved and that of the next, a call gets none of them."""
    layer = torch.nn.Linear(3, 3).eval()
    step = graphed(layer, dynamic={"input": 0}, sizes=(2, 4), options=AT_ONCE)
    for number in range(3):
        for rows in (2, 4):
            step(torch.full((rows, 3), float(number)))
    seen: list[int] = []
    record = step.stats.record_eviction

    def call_in_between(eviction: Any) -> None:
        record(eviction)
        check_rows(step, 2, 4)
        seen.append(1)

    step.stats.record_eviction = call_in_between
    layer.weight = torch.nn.Parameter(torch.randn(3, 3))
    step(torch.randn(2, 3))
    assert seen


def test_pauses_of_the_collector_are_of_threads() -> None:
    """It runs again when the last of them is done, and not when the first is. In a child it runs, whoever paused it:
    the threads that would end the pauses are gone."""
    paused, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        with paused_collector():
            paused.set()
            go_on.wait()

    def check() -> None:
        assert gc.isenabled()
        with paused_collector():
            assert not gc.isenabled()
        assert gc.isenabled()

    with ThreadPoolExecutor(1) as thread:
        pausing = thread.submit(pause)
        try:
            assert paused.wait(60)
            in_child(check)
            with paused_collector():
                in_child(check)
            assert not gc.isenabled()
        finally:
            go_on.set()
        pausing.result()
    assert gc.isenabled()


def test_captures_leave_the_collector_as_it_was() -> None:
    """Also one that fails: it runs again, and what the process has frozen stays frozen."""
    gc.freeze()
    try:
        gc.collect()  # some versions of Python freeze objects of their own in each collection
        before = gc.get_freeze_count()
        with suppress(KeyboardInterrupt), paused_collector():
            assert not gc.isenabled()
            raise KeyboardInterrupt
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before // 2  # some objects end meanwhile; to unfreeze would leave none
    finally:
        gc.unfreeze()
