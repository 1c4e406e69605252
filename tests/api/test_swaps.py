"""Decisions while tables are swapped: each answer is that of a table that existed.

First a change is made before every single line of a decision, one after the other. Then 32 threads ask while another
one changes: a reader notes the table before and after it asks; if they are one object, the answer must be what a table
of those keys, built apart and asked alone, says, and if not, what one of all the tables says.
"""

import sys
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, combinations, count, cycle, islice
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

import pytest
import torch

import graphdispatch
from graphdispatch import CUDAGraphMode
from graphdispatch.api.registered import RegisteredGraphs
from graphdispatch.decide.table import KeyTable
from graphdispatch.engines import (
    BatchDescriptor,
    CudagraphDispatcher,
    CUDAGraphEntry,
    CudagraphKeyDispatcher,
    CUDAGraphRegistry,
    DispatchKey,
    DispatchMode,
)
from graphdispatch.testing import MockCUDAGraph

READERS = 32
_ROOMS = tuple(str(Path(graphdispatch.__file__).parent / room) for room in ("api", "decide"))
FULL = CUDAGraphMode.FULL


@pytest.fixture(autouse=True)
def switches_often() -> Iterator[None]:
    """Threads interleave some hundred times as often as they would."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def subsets(things: list[Any]) -> list[frozenset[Any]]:
    """All subsets."""
    return [frozenset(some) for some in chain.from_iterable(combinations(things, n) for n in range(len(things) + 1))]


def run_under_changes(read: Callable[[int], int], changes: list[Callable[[], object]]) -> tuple[int, int]:
    """Readers run ``read`` with their number while one thread makes the changes, over and over: the sum of what the
    readers return, and how many changes were made."""
    done = Event()

    def change() -> int:
        made = 0
        for one in cycle(changes):
            if done.is_set():
                return made
            one()
            made += 1
        return made

    with ThreadPoolExecutor(READERS + 1) as pool:
        writer = pool.submit(change)
        try:
            total = sum(pool.map(read, range(READERS), timeout=120))
        finally:
            done.set()
        return total, writer.result(timeout=120)


def reader(
    state: Callable[[], Any],
    ask: Callable[[Any], Hashable],
    expected: Callable[[Any], dict[Any, Any]],
    batches: list[Any],
    asks: int,
) -> Callable[[int], int]:
    """A reader that checks ``asks`` answers; it returns how many were asked of a table that stayed."""

    def read(number: int) -> int:
        anything: dict[Any, set[Any]] = {}
        stayed = 0
        for batch in islice(cycle(batches), number, number + asks):
            before = state()
            answer = ask(batch)
            if state() is before:
                stayed += 1
                assert answer == expected(before)[batch]
            else:
                anything.setdefault(batch, set()).add(answer)
        for batch, answers in anything.items():
            assert answers <= expected(None)[batch]
        return stayed

    return read


def with_all(by_state: dict[Any, dict[Any, Any]], batches: list[Any]) -> dict[Any, dict[Any, Any]]:
    """The expected answers, and under None the set of those that any state gives."""
    return {**by_state, None: {batch: {answers[batch] for answers in by_state.values()} for batch in batches}}


def entry(size: int) -> CUDAGraphEntry:
    """A graph that doubles its input and whose padding was compared with eager."""
    example = {"x": torch.randn(size - 1, 2)}
    return CUDAGraphRegistry().capture(size - 1, 1, lambda x: x * 2, inputs=example, size=size)


def scripted(outputs: Any) -> MockCUDAGraph:
    """A graph with these outputs."""
    graph = MockCUDAGraph(outputs)
    graph.capture_begin()
    graph.capture_end()
    return graph


def decode(rows: int) -> DispatchKey:
    """A batch of one token for each request."""
    return DispatchKey(rows, rows)


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
            dispatcher.remove_cudagraph_key(FULL, BatchDescriptor(16))
            dispatcher.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE)

        return lambda: dispatcher.decide(tokens, 3), change

    assert_whole(make)


@pytest.mark.parametrize("rows", [3, 4, 6])
def test_a_change_in_the_middle_of_a_choice_is_not_seen(rows: int) -> None:
    """The executing dispatcher, with its graphs cleared, and exchanged for others of another mode."""
    full, piecewise = entry(4), entry(8)

    def make() -> tuple[Callable[[], Any], Callable[[], object]]:
        dispatcher = CudagraphDispatcher(lambda: None, max_cached_graphs=1)
        dispatcher.register_graph(decode(4), full)

        def change() -> None:
            dispatcher.register_graph(decode(8), piecewise, mode=DispatchMode.PIECEWISE)

        def ask() -> Any:
            found, decision = dispatcher.workers[0].choose(decode(rows), dispatcher.policy)
            return found and found.key, decision

        return ask, change

    assert_whole(make)


def test_a_million_decisions_are_each_those_of_one_table() -> None:
    """The key dispatcher, with keys added and removed underneath."""
    fixed = BatchDescriptor(8)
    moving = [BatchDescriptor(16), BatchDescriptor(12, 12, True), BatchDescriptor(4, 2)]
    batches = [(tokens, reqs) for tokens in range(1, 18) for reqs in {1, tokens}]
    expected = {}
    for keys in subsets(moving):
        table = KeyTable({FULL: keys | {fixed}}, mode=FULL, query_len=1, max_num_reqs=16)
        expected[keys | {fixed}] = {batch: table.decide(*batch, 1) for batch in batches}
    expected = with_all(expected, batches)
    dispatcher = CudagraphKeyDispatcher(capture_sizes=[8], max_num_reqs=16)
    dispatcher.initialize_cudagraph_keys(FULL)
    stayed, changes = run_under_changes(
        reader(
            lambda: dispatcher.table,
            lambda batch: dispatcher.decide(*batch, query_len=1),
            lambda table: expected[table.keys[FULL] if table is not None else None],
            batches,
            1_000_000 // READERS,
        ),
        [
            lambda add=add, key=key: (
                dispatcher.add_cudagraph_key(FULL, key) if add else dispatcher.remove_cudagraph_key(FULL, key)
            )
            for add in (True, False)
            for key in moving
        ],
    )
    assert 0 < stayed <= 1_000_000
    assert changes > len(moving)


def test_registered_graphs_are_chosen_as_if_nobody_changed_them() -> None:
    """The executing dispatcher's decisions, with graphs registered, evicted, cleared and switched off underneath."""
    graphs = {decode(3): scripted("3"), decode(4): entry(4), decode(8): entry(8)}
    batches = [decode(rows) for rows in range(1, 10)]
    dispatcher = CudagraphDispatcher(lambda: None, max_cached_graphs=2)

    def chosen(asked: CudagraphDispatcher, key: DispatchKey) -> Hashable:
        found, decision = asked.workers[0].choose(key, asked.policy)
        return decision, found and found.key

    expected = {}
    for keys in subsets(list(graphs)):
        for modes in (frozenset(DispatchMode), frozenset(DispatchMode) - {DispatchMode.CUDAGRAPH}):
            alone = CudagraphDispatcher(lambda: None)
            for key in keys:
                alone.register_graph(key, graphs[key])
            for mode in frozenset(DispatchMode) - modes:
                alone.disable_mode(mode)
            expected[keys, modes] = {batch: chosen(alone, batch) for batch in batches}
    expected = with_all(expected, batches)

    def answers(state: RegisteredGraphs | None) -> dict[Any, Any]:
        if state is None:
            return expected[None]
        return expected[frozenset(key for key, _ in state.graphs), state.modes]

    stayed, changes = run_under_changes(
        reader(
            lambda: dispatcher.workers[0]._graphs,
            lambda key: chosen(dispatcher, key),
            answers,
            batches,
            100_000 // READERS,
        ),
        [
            *(lambda key=key: dispatcher.register_graph(key, graphs[key]) for key in graphs),
            lambda: dispatcher.disable_mode(DispatchMode.CUDAGRAPH),
            lambda: dispatcher.enable_mode(DispatchMode.CUDAGRAPH),
            dispatcher.clear_cache,
        ],
    )
    assert 0 < stayed <= 100_000
    assert changes > len(graphs)


def test_every_call_under_changes_gets_eagers_answer() -> None:
    """Dispatch itself: graphs that pad, appear, are evicted for others and cleared, while 32 threads call."""
    entries = {decode(4): entry(4), decode(8): entry(8), decode(16): entry(16)}
    dispatcher = CudagraphDispatcher(lambda x: x * 2, max_cached_graphs=2)
    batches = [torch.randn(rows, 2) for rows in range(1, 18)]

    def read(number: int) -> int:
        for x in islice(cycle(batches), number, number + 1000):
            assert torch.equal(dispatcher.dispatch(decode(len(x)), x), x * 2)
        return 1000

    calls, changes = run_under_changes(
        read,
        [
            *(lambda key=key: dispatcher.register_graph(key, entries[key]) for key in (*entries, *entries)),
            dispatcher.clear_cache,
        ],
    )
    assert calls == dispatcher.stats.total == READERS * 1000
    assert changes > len(entries)
    assert dispatcher.stats.graph > 0
    assert dispatcher.num_graphs <= 2
    worker = dispatcher.workers[0]
    served = {id(found.route) for found in worker.graphs.values()}
    assert {id(group.route) for group in worker.server.graphs.groups.values()} <= served
    assert {id(found.entry) for found in worker.graphs.values()} == set(map(id, worker.cache))
