"""Objects whose state Python cannot read: calls that use them run once each, eagerly, unless nothing changes."""

import array
import asyncio
import bz2
import ctypes
import decimal
import hashlib
import hmac
import io
import logging
import lzma
import mmap
import multiprocessing
import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import graphdispatch as gd
from graphdispatch import Reason

from ..helpers import AT_ONCE


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Foreign(NamedTuple):
    """How to make an object, what a call does with it, and what is left of that."""

    make: Callable[[], Any]
    use: Callable[[Any], Any]
    read: Callable[[Any], Any]


def add(value: Any) -> None:
    """Count."""
    value.value += 1


def count(table: Any, index: Any = 0) -> None:
    """Count in an entry."""
    table[index] = table[index] + 1


def turn(lock: Any) -> None:
    """Take a lock that is free, or free it."""
    if not lock.acquire(blocking=False):
        lock.release()


CHANGED = {
    "hash": Foreign(hashlib.sha256, lambda o: o.update(b"x"), lambda o: o.hexdigest()),
    "keyed hash": Foreign(
        lambda: hmac.new(b"k", digestmod="sha256"), lambda o: o.update(b"x"), lambda o: o.hexdigest()
    ),
    "zlib": Foreign(zlib.compressobj, lambda o: o.compress(b"x"), lambda o: o.flush()),
    "bz2": Foreign(bz2.BZ2Compressor, lambda o: o.compress(b"x"), lambda o: o.flush()),
    "lzma": Foreign(lzma.LZMACompressor, lambda o: o.compress(b"x"), lambda o: o.flush()),
    "text": Foreign(
        lambda: io.TextIOWrapper(io.BytesIO(), write_through=True), lambda o: o.write("x"), lambda o: o.tell()
    ),
    "map": Foreign(lambda: mmap.mmap(-1, 64), lambda o: o.write(b"x"), lambda o: (o[:], o.tell())),
    "entry of a map": Foreign(lambda: mmap.mmap(-1, 64), count, lambda o: o[:]),
    "large map": Foreign(lambda: mmap.mmap(-1, 1 << 21), count, lambda o: o[0]),
    "semaphore": Foreign(lambda: threading.Semaphore(50), lambda o: o.acquire(), lambda o: o._value),
    "event": Foreign(threading.Event, lambda o: o.clear() if o.is_set() else o.set(), lambda o: o.is_set()),
    "lock": Foreign(threading.Lock, turn, lambda o: o.locked()),
    "reentrant lock": Foreign(threading.RLock, lambda o: o.acquire(), lambda o: repr(o).partition("count")[2][:3]),
    "queue": Foreign(queue.SimpleQueue, lambda o: o.put(1), lambda o: o.qsize()),
    "queue of tasks": Foreign(asyncio.Queue, lambda o: o.put_nowait(1), lambda o: o.qsize()),
    "decimal context": Foreign(decimal.Context, lambda o: setattr(o, "prec", o.prec + 1), lambda o: o.prec),
    "shared value": Foreign(lambda: multiprocessing.Value("i", 0), add, lambda o: o.value),
    "shared semaphore": Foreign(lambda: multiprocessing.Semaphore(50), lambda o: o.acquire(), lambda o: o.get_value()),
    "bits of numpy": Foreign(lambda: np.random.PCG64(3), lambda o: o.random_raw(), lambda o: o.state),
    "log level": Foreign(lambda: logging.Logger("x"), lambda o: o.setLevel(o.level + 1), lambda o: o.level),
    "ctypes": Foreign(lambda: ctypes.c_int(0), add, lambda o: o.value),
    "array": Foreign(lambda: array.array("i"), lambda o: o.append(1), len),
}


class Holding(nn.Module):
    """Uses an object that it holds."""

    def __init__(self, held: Any, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.use = held, use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in, rows out."""
        self.use(self.held)
        return x * 2


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("place", ["closure", "module"])
def test_each_call_uses_it_once(name: str, place: str) -> None:
    """It is left as eager calls leave it, and the calls say why they are eager."""
    case, left = CHANGED[name], []
    for is_served in (False, True):
        held = case.make()
        held_by = Holding(held, case.use).eval()

        def use(x: torch.Tensor, held: Any = held) -> torch.Tensor:
            case.use(held)
            return x * 2

        fn: Any = held_by if place == "module" else use
        step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,)) if is_served else fn
        for rows in (3, 4, 3, 3, 4, 2, 4):
            x = torch.randn(rows, 2)
            assert torch.equal(step(x), x * 2)
        left.append(case.read(held))
    assert left[0] == left[1]
    assert step.last_decision.reason in (Reason.STATE_UNSEEN, Reason.STATE_REBOUND)


@pytest.mark.parametrize("name", sorted(set(CHANGED) - {"large map"}))
def test_a_capture_ahead_leaves_it_alone_or_says_so(name: str) -> None:
    """A run for the graph's sake is refused before it changes what nobody can put back."""
    case = CHANGED[name]
    held, untouched = case.make(), case.make()
    step = gd.graphed(Holding(held, case.use).eval(), dynamic={"x": 0}, sizes=(4,))
    step.prewarm(torch.randn(4, 2))
    assert not step.entries
    if name not in SHARED:
        assert case.read(held) == case.read(untouched)


SHARED = {"reentrant lock", "semaphore", "event", "decimal context", "queue of tasks", "shared value", "log level"}
"""Other threads may use these at the same time, so nobody puts them back. The refusal says which it is."""

UNCHANGED: dict[str, Foreign] = {
    "lock": Foreign(threading.Lock, lambda o: (o.acquire(), o.release()), lambda o: o.locked()),
    "lock in a block": Foreign(
        threading.Lock, lambda o: o.__enter__() and o.__exit__(None, None, None), lambda o: o.locked()
    ),
    "reentrant lock": Foreign(threading.RLock, lambda o: (o.acquire(), o.release()), lambda o: 0),
    "event": Foreign(threading.Event, lambda o: o.is_set(), lambda o: o.is_set()),
    "log": Foreign(lambda: logging.getLogger("graphdispatch.tests"), lambda o: o.debug("hello"), lambda o: o.level),
    "number": Foreign(lambda: decimal.Decimal(3), lambda o: o.sqrt(), lambda o: o),
    "function of pybind11": Foreign(lambda: torch._C._get_tracing_state, lambda o: o(), lambda o: 0),
    "new hash": Foreign(object, lambda o: hashlib.sha256().update(b"x"), lambda o: 0),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_a_call_leaves_as_it_was_does_no_harm(name: str) -> None:
    """Locks that are given back, events that are read, and new objects are no reason to refuse a call."""
    case = UNCHANGED[name]
    step = gd.graphed(Holding(case.make(), case.use).eval(), dynamic={"x": 0}, sizes=(4,))
    for rows in (3, 4, 3, 3):
        step(torch.randn(rows, 2))
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.PADDED


def test_an_event_that_is_set_later_is_seen() -> None:
    """So is a value that processes share, and the precision of a decimal context."""
    event, shared, context = threading.Event(), multiprocessing.Value("i", 0), decimal.Context()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + event.is_set() + shared.value + context.prec

    step = gd.graphed(fn, dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    for change in (lambda: None, event.set, lambda: setattr(shared, "value", 5), lambda: setattr(context, "prec", 3)):
        change()
        for _ in range(6):
            x = torch.randn(3, 2)
            assert torch.equal(step(x), fn(x))
        assert step.last_decision is not None
        assert step.last_decision.reason is Reason.PADDED


@pytest.mark.parametrize("name", ["hash", "queue", "semaphore", "event", "queue of tasks"])
def test_breaks_use_it_once(name: str) -> None:
    """A capture runs its breaks more than once, so that such a call is refused, too."""
    case, left = CHANGED[name], []
    for is_served in (False, True):
        held = case.make()

        @gd.eager_break
        def use(x: torch.Tensor, held: Any = held) -> torch.Tensor:
            case.use(held)
            return x * 2

        step = gd.graphed(lambda x, use=use: use(x) + 1, dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE")
        for rows in (3, 4, 3, 3, 4, 2, 4):
            x = torch.randn(rows, 2)
            (step if is_served else use)(x)
        left.append(case.read(held))
    assert left[0] == left[1]


def test_breaks_write_the_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the extra runs of a capture change there is put back."""
    monkeypatch.setenv("GRAPHDISPATCH_TEST_COUNT", "0")

    @gd.eager_break
    def count(x: torch.Tensor) -> torch.Tensor:
        number = int(os.environ["GRAPHDISPATCH_TEST_COUNT"]) + 1
        os.environ["GRAPHDISPATCH_TEST_COUNT"] = str(number)
        return x * number

    step = gd.graphed(lambda x: count(x) + 1, dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE")
    for number, rows in enumerate((3, 4, 3, 3, 4, 2, 4), 1):
        x = torch.randn(rows, 2)
        assert torch.equal(step(x), x * number + 1)
    assert os.environ["GRAPHDISPATCH_TEST_COUNT"] == "7"


def test_other_threads_may_use_a_semaphore_that_the_call_does_not_touch() -> None:
    """What other threads take is no change of the call's, and nothing that it reads."""
    semaphore = threading.Semaphore(50)
    step = gd.graphed(lambda x: x * (semaphore is not None), dynamic={"x": 0}, sizes=(4,))
    for _ in range(4):
        step(torch.randn(3, 2))
        threading.Thread(target=semaphore.acquire).start()
    assert step.stats.hits
    assert step.stats.captures == 1
