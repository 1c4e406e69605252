"""Stream workers on the CPU: overlap of threads, shown with barriers inside custom operators; graphs that come and go.

``tests/device`` and ``tests/gpu`` have the order of streams.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason
from graphdispatch.backends import get_backend
from graphdispatch.engines import (
    BatchDescriptor,
    CUDAGraphWrapper,
    DispatchKey,
    StreamDispatcher,
)
from graphdispatch.errors import ConfigError, ReplayError

from ..helpers import Spy, compiled_operator, scripted

TIMEOUT_S = 30.0
"""Bound on every wait of a test: reached only where the code under test hangs, and then the test fails."""


KEY = DispatchKey(2, 2)


OTHER = DispatchKey(4, 4)


TRUST = CUDAGraphOptions(verify=False)


HOOKS = Spy()
"""What the operator below waits for; empty while graphs are captured."""


def wait(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x``, made once whatever is in ``HOOKS`` lets it pass."""
    for hook in list(HOOKS):
        assert hook.wait(TIMEOUT_S) is not False, "the gate was never opened"
    return x.clone()


@pytest.fixture(scope="module", autouse=True)
def _operator() -> Iterator[None]:
    with compiled_operator("meet(Tensor x) -> Tensor", wait):
        yield


def model(x: torch.Tensor) -> torch.Tensor:
    """A callable with an operator in its middle that is one call of a graph."""
    return torch.ops.graphdispatch_compiled.meet(x + 1) * 2


def batch(value: float, rows: int = 2) -> torch.Tensor:
    """An input."""
    return torch.full((rows, 3), value)


Open = Callable[..., StreamDispatcher]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes dispatchers, which are closed in the end, when nothing waits any more."""
    made: list[StreamDispatcher] = []

    def make(runner: Callable[..., Any] = model, num_streams: int = 2, **options: Any) -> StreamDispatcher:
        made.append(
            StreamDispatcher(runner, num_streams, **{"backend": get_backend("cpu"), "options": TRUST} | options)
        )
        return made[-1]

    HOOKS.clear()
    yield make
    for hook in HOOKS:
        hook.abort()
    HOOKS.clear()
    for dispatcher in made:
        dispatcher.close()


@pytest.fixture
def workers(opened: Open) -> StreamDispatcher:
    """A dispatcher over two workers, with a graph for ``KEY`` on each."""
    dispatcher = opened()
    dispatcher.capture(KEY, (batch(0.0),))
    return dispatcher


def test_two_workers_overlap(workers: StreamDispatcher) -> None:
    """Both steps are in the middle of their graphs at one time: each waits there for the other, in its own memory."""
    entries = [entry for _, entry in workers.entries]
    assert [found.pool for found in entries] == [worker.pool for worker in workers.workers]
    assert not set.intersection(*({*found.input_addresses} for found in entries))
    HOOKS.append(threading.Barrier(2))
    with ThreadPoolExecutor(2) as pool:
        submitted = list(pool.map(lambda value: workers.submit(KEY, batch(value)), (1.0, 5.0), timeout=TIMEOUT_S))
        answers = pool.map(lambda value: workers.dispatch(KEY, batch(value)), (1.0, 5.0), timeout=TIMEOUT_S)
    assert {one.worker for one in submitted} == {0, 1}
    assert [one.result()[0, 0].item() for one in submitted] == [4.0, 12.0]
    assert [answer[0, 0].item() for answer in answers] == [4.0, 12.0]


def test_a_call_that_its_graph_does_not_serve_runs_on_the_callers_stream(workers: StreamDispatcher) -> None:
    """Its runner may write memory of its own, and does not do so on two streams at once."""
    current, seen = workers.backend.current_stream, list[Any]()
    HOOKS.append(SimpleNamespace(wait=lambda timeout: seen.append(current()), abort=seen.clear))
    for _ in range(2):
        assert workers.dispatch(KEY, batch(1.0, rows=3)).shape == (3, 3)
        workers.submit(KEY, batch(1.0, rows=3)).result()
    assert workers.stats.reasons == {Reason.ARGUMENTS_CHANGED: 4}
    assert seen == [current()] * 4
    workers.dispatch(KEY, batch(1.0))
    assert seen[4:] == [workers.workers[0].stream]


def test_a_step_that_fails_fails_alone(workers: StreamDispatcher) -> None:
    """Its error comes out of its result, and its worker goes on serving."""
    workers.register_graph(OTHER, scripted(on_replay=lambda: {}["missing"]))
    pending = workers.submit(OTHER)
    for _ in range(2):
        assert torch.equal(workers.dispatch(KEY, batch(1.0)), batch(4.0))
    with pytest.raises(ReplayError, match="KeyError"):
        pending.result()


def test_a_call_without_a_graph_runs_here_and_now(opened: Open) -> None:
    """Before there is one, and after ``close``, which may be called twice."""
    dispatcher = opened()
    for _ in range(2):
        pending = dispatcher.submit(KEY, batch(1.0))
        assert (pending.worker, pending.is_done) == (None, True)
        assert torch.equal(pending.result(), batch(4.0))
        dispatcher.close()
    assert dispatcher.stats.reasons == {Reason.NOT_CAPTURED: 2}


def test_workers_that_write_one_state_are_refused(opened: Open) -> None:
    """A runner with state of its own cannot be captured on two workers since their steps would run at once."""
    state = torch.zeros(2, 3)
    dispatcher = opened(lambda x: state.add_(x) * 1, options=CUDAGraphOptions())
    with pytest.raises(ConfigError, match="workers 0 and 1 share memory that one of them writes"):
        dispatcher.capture(KEY, (batch(1.0),))
    assert dispatcher.num_graphs == 0


def test_a_wrappers_entry_serves_on_its_worker(workers: StreamDispatcher) -> None:
    """A wrapper on a worker's pool makes entries for that worker."""
    descriptor = BatchDescriptor(4)
    wrapper = CUDAGraphWrapper(model, options=TRUST, backend=workers.backend, pool=workers.workers[1].pool)
    wrapper(batch(1.0, 4), batch_descriptor=descriptor, cudagraph_runtime_mode=CUDAGraphMode.FULL)
    entry = wrapper.get_entry(descriptor)
    workers.register_graph(OTHER, entry)
    pending = workers.submit(OTHER, batch(2.0, 4))
    assert torch.equal(pending.result(), batch(6.0, 4))
    assert pending.worker == 1


def test_graphs_of_one_key_go_to_several_workers_unless_they_share_a_pool(workers: StreamDispatcher) -> None:
    """Foreign graphs of one key are spread, so that they may overlap; entries of one pool never could."""
    for index in range(2):
        workers.register_graph(OTHER, scripted(f"graph {index}"))
    assert {workers.dispatch(OTHER) for _ in range(2)} == {"graph 0", "graph 1"}
    wrapper = CUDAGraphWrapper(model, options=TRUST, backend=workers.backend, pool=workers.backend.make_pool())
    for rows in (5, 6, 7):
        wrapper(batch(1.0, rows), batch_descriptor=BatchDescriptor(rows), cudagraph_runtime_mode=CUDAGraphMode.FULL)
        workers.register_graph(DispatchKey(rows, rows), wrapper.get_entry(BatchDescriptor(rows)))
    assert sorted(Counter(found.worker.index for found in workers._registered.graphs).values()) == [2, 5]


@pytest.mark.parametrize("key", [KEY, OTHER], ids=["the same", "another"])
def test_the_older_graphs_of_a_worker_are_released(opened: Open, key: DispatchKey) -> None:
    """``max_cached_graphs`` holds for each worker, and what falls out, or is captured again, is released."""
    dispatcher = opened(max_cached_graphs=1)
    dispatcher.capture(KEY, (batch(0.0),))
    old = dispatcher.get_entry(KEY)
    dispatcher.capture(key, (batch(0.0, key.num_tokens),))
    assert "evicted" in repr(old)
    assert dispatcher.num_graphs == 2
    assert dispatcher.has_graph(KEY) is (key is KEY)


def test_graphs_come_and_go_under_threads(workers: StreamDispatcher) -> None:
    """Threads get eager's answers while graphs are captured, evicted and cleared underneath them."""
    stop = threading.Event()

    def serve(first: float) -> None:
        value = first
        while not stop.is_set():
            value += 1
            assert torch.equal(workers.dispatch(KEY, batch(value)), batch(2 * (value + 1)))

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(serve, 1000.0 * i) for i in range(4)]
        try:
            for _ in range(3):
                workers.capture(KEY, (batch(0.0),))
                assert torch.equal(workers.dispatch(KEY, batch(1.0)), batch(4.0))
                workers.clear_cache()
        finally:
            stop.set()
        for call in calls:
            call.result(TIMEOUT_S)
    assert workers.stats.graph >= 3


def test_a_key_captured_again_is_guarded_as_before(opened: Open) -> None:
    """The newer graph does not outlive the weights that it reads."""
    linear = torch.nn.Linear(3, 3).eval().requires_grad_(False)
    dispatcher = opened(linear, 1)
    for _ in range(2):
        dispatcher.capture(KEY, (batch(0.0),))
    x = torch.randn(2, 3)
    assert torch.equal(dispatcher.dispatch(KEY, x), linear(x))
    linear.weight = torch.nn.Parameter(torch.randn(3, 3), requires_grad=False)
    for _ in range(3):
        assert torch.equal(dispatcher.dispatch(KEY, x), linear(x))
    assert dispatcher.stats.graph == 1


def test_closing_does_not_wait_for_a_step_that_waits_for_it(opened: Open) -> None:
    """A step under way may register a graph; that hangs neither of the two."""
    inside, gate, dispatcher = threading.Event(), threading.Event(), opened(num_streams=1)

    def registers() -> None:
        inside.set()
        assert gate.wait(TIMEOUT_S)
        dispatcher.register_graph(OTHER, scripted())

    dispatcher.register_graph(KEY, scripted("served", on_replay=registers))
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(dispatcher.dispatch, KEY)
        assert inside.wait(TIMEOUT_S)
        closes = pool.submit(dispatcher.close)
        while dispatcher.has_graph(KEY):
            pass
        gate.set()
        closes.result(TIMEOUT_S)
        assert call.result(TIMEOUT_S) == "served"
