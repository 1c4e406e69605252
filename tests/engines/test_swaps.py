"""Decisions while tables are swapped: each answer is that of a table that existed.

First a change is made before every single line of a decision, one after the other. Then 32 threads ask while another
one changes: each answer is one that some table of those keys, built by itself, gives.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, cycle, islice, takewhile
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

import pytest
import torch

import graphdispatch
from graphdispatch import CUDAGraphMode
from graphdispatch.engines import CudagraphDispatcher, CudagraphKeyDispatcher, DispatchMode

from ..helpers import switching_often
from .test_dispatcher import compared, decode

READERS = 32
_ROOMS = tuple(str(Path(graphdispatch.__file__).parent / room) for room in ("decide", "engines"))
FULL = CUDAGraphMode.FULL


@pytest.fixture(autouse=True)
def switches_often() -> Iterator[None]:
    """In all tests."""
    with switching_often(5e-5):
        yield


def changed_before_line(number: int, ask: Callable[[], Any], change: Callable[[], object]) -> tuple[Any, bool]:
    """The answer, with the change made before the line of that number of the package's code, and if it came to that."""
    lines = count()
    is_made = False

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal is_made
        if not frame.f_code.co_filename.startswith(_ROOMS):
            return None
        if event == "line" and next(lines) == number:
            is_made = True
            change()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        answer = ask()
    finally:
        sys.settrace(before)
    return answer, is_made


def assert_whole(make: Callable[[], tuple[Callable[[], Any], Callable[[], object]]]) -> None:
    """Wherever in a decision the change is made, the answer is the old one or the new one."""
    ask, change = make()
    old = ask()
    change()
    new = ask()
    assert old != new
    for number in count():
        ask, change = make()
        answer, is_made = changed_before_line(number, ask, change)
        assert answer in (old, new), number
        if not is_made:
            assert number > 5
            return


@pytest.mark.parametrize("tokens", [3, 20])
def test_a_change_in_the_middle_of_a_decision_is_not_seen(tokens: int) -> None:
    """The key dispatcher, for a batch that goes from one graph to another, and for one that gets a graph."""

    def make() -> tuple[Callable[[], Any], Callable[[], object]]:
        dispatcher = CudagraphKeyDispatcher(capture_sizes=[16], max_num_reqs=32)
        dispatcher.initialize_cudagraph_keys(FULL)

        def change() -> None:
            dispatcher.capture_sizes = (8, 32)
            dispatcher.initialize_cudagraph_keys(FULL)

        return lambda: dispatcher.decide(tokens, 3), change

    assert_whole(make)


@pytest.mark.parametrize("rows", [3, 4, 6])
def test_a_change_in_the_middle_of_a_choice_is_not_seen(rows: int) -> None:
    """The executing dispatcher, with its graphs cleared, and exchanged for others of another mode."""
    full, piecewise = compared(4), compared(8)

    def make() -> tuple[Callable[[], Any], Callable[[], object]]:
        dispatcher = CudagraphDispatcher(lambda: None, max_cached_graphs=1)
        dispatcher.register_graph(decode(4), full)

        def change() -> None:
            dispatcher.register_graph(decode(8), piecewise, mode=DispatchMode.PIECEWISE)

        def ask() -> Any:
            _, found, decision, _ = dispatcher.choose(decode(rows))
            return found and found.key, decision

        return ask, change

    assert_whole(make)


def test_every_call_under_changes_gets_eagers_answer() -> None:
    """Dispatch itself: graphs that pad, appear, are evicted for others and cleared, while 32 threads call."""
    entries = {decode(size): compared(size) for size in (4, 8, 16)}
    dispatcher = CudagraphDispatcher(lambda x: x * 2, max_cached_graphs=2)
    batches = [torch.randn(rows, 3) for rows in range(1, 18)]

    changes: list[Callable[[], object]] = [
        *(partial(dispatcher.register_graph, *each) for each in [*entries.items()] * 2),
        dispatcher.clear_cache,
    ]
    done, made = Event(), count()

    def change() -> None:
        for one in takewhile(lambda _: not done.is_set(), cycle(changes)):
            one()
            next(made)

    def read(number: int) -> None:
        for x in islice(cycle(batches), number, number + 300):
            assert torch.equal(dispatcher.dispatch(decode(len(x)), x), x * 2)

    with ThreadPoolExecutor(READERS + 1) as pool:
        writer = pool.submit(change)
        try:
            list(pool.map(read, range(READERS), timeout=120))
        finally:
            done.set()
        writer.result(timeout=120)
    assert dispatcher.stats.total == READERS * 300
    assert next(made) > len(entries)
    assert dispatcher.stats.graph > 0
    assert dispatcher.num_graphs <= 2
    served = {id(found.route) for found in dispatcher._registered.graphs}
    assert {id(group.route) for group in dispatcher.workers[0].server.graphs.groups.values()} <= served
