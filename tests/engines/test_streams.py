"""Stream workers on a CPU whose streams are threads.

Overlap and order are shown with barriers and gates inside custom operators.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    create_dispatch_key,
)
from graphdispatch.errors import BackendError, ConfigError

from ..helpers import Spy, compiled_operator, scripted
from ..thread_streams import ThreadBackend

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
    """Makes dispatchers over streams that are threads; they are closed in the end, when nothing waits any more."""
    made: list[StreamDispatcher] = []

    def make(runner: Callable[..., Any] = model, num_streams: int = 2, **options: Any) -> StreamDispatcher:
        backend = get_backend(ThreadBackend.name)
        made.append(StreamDispatcher(runner, num_streams, **{"backend": backend, "options": TRUST} | options))
        return made[-1]

    HOOKS.clear()
    yield make
    for hook in HOOKS:
        hook.abort() if isinstance(hook, threading.Barrier) else hook.set()
    HOOKS.clear()
    for dispatcher in made:
        dispatcher.close()


@pytest.fixture
def workers(opened: Open) -> StreamDispatcher:
    """A dispatcher over two workers, with a graph for ``KEY`` on each."""
    dispatcher = opened()
    dispatcher.capture(KEY, (batch(0.0),))
    return dispatcher


@pytest.fixture
def gate(workers: StreamDispatcher) -> threading.Event:
    """A closed gate in the middle of every step from now on."""
    gate = threading.Event()
    HOOKS.append(gate)
    return gate


def test_two_workers_overlap(workers: StreamDispatcher) -> None:
    """Both steps are in the middle of their graphs at one time: each waits there for the other, in its own memory."""
    entries = [entry for _, entry in workers.entries]
    assert [found.pool for found in entries] == [worker.pool for worker in workers.workers]
    assert not set.intersection(*({*found.input_addresses} for found in entries))
    HOOKS.append(threading.Barrier(2))
    first, second = workers.submit(KEY, batch(1.0)), workers.submit(KEY, batch(5.0))
    assert torch.equal(first.result(), batch(4.0))
    assert torch.equal(second.result(), batch(12.0))
    assert {first.worker, second.worker} == {0, 1}
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda value: workers.dispatch(KEY, batch(value)), (1.0, 5.0), timeout=TIMEOUT_S)
    assert [answer[0, 0].item() for answer in answers] == [4.0, 12.0]


def test_steps_of_one_worker_keep_their_inputs(workers: StreamDispatcher, gate: threading.Event) -> None:
    """Steps that wait in one worker's queue load their own inputs when their turn comes, and own their outputs."""
    queued = [workers.submit(KEY, batch(float(v))) for v in range(6)]
    assert not any(one.is_done for one in queued)
    gate.set()
    assert [one.result()[0, 0].item() for one in queued] == [2.0 * (v + 1) for v in range(6)]
    assert all(one.is_done for one in queued)


def test_workers_take_turns(workers: StreamDispatcher, gate: threading.Event) -> None:
    """Steps go to each in turn."""
    assert sorted(workers.submit(KEY, batch(1.0)).worker for _ in range(6)) == [0, 0, 0, 1, 1, 1]
    assert "2 workers, 2 graphs" in repr(workers)
    gate.set()


def test_a_worker_waits_for_the_callers_stream(workers: StreamDispatcher) -> None:
    """A step reads its input only after what the caller's stream was given before."""
    gate = threading.Event()
    x = batch(0.0)
    stream = workers.backend.make_stream()
    stream.submit(lambda: (gate.wait(TIMEOUT_S), x.fill_(7.0)))
    with workers.backend.use_stream(stream):
        pending = workers.submit(KEY, x)
    gate.set()
    assert torch.equal(pending.result(), batch(16.0))
    stream.close()


def test_a_failing_callers_stream_fails_the_step_alone(workers: StreamDispatcher) -> None:
    """An error before the call comes out of its result, and the worker goes on serving."""
    stream = workers.backend.make_stream()
    stream.submit(lambda: {}["missing"])
    with workers.backend.use_stream(stream):
        pending = workers.submit(KEY, batch(1.0))
    with pytest.raises(KeyError):
        pending.result()
    with pytest.raises(KeyError):
        stream.close()
    for _ in range(2):
        assert torch.equal(workers.dispatch(KEY, batch(1.0)), batch(4.0))


def test_a_call_without_a_graph_runs_here_and_now(opened: Open) -> None:
    """Before there is one, and after ``close``, which may be called twice; the workers themselves then refuse."""
    dispatcher = opened()
    for _ in range(2):
        pending = dispatcher.submit(KEY, batch(1.0))
        assert (pending.worker, pending.is_done) == (None, True)
        assert torch.equal(pending.result(), batch(4.0))
        dispatcher.close()
    assert dispatcher.stats.reasons == {Reason.NOT_CAPTURED: 2}
    with pytest.raises(BackendError, match="this worker takes no more steps"):
        dispatcher.workers[0].launch(lambda: None, ())


def test_a_graph_evicted_while_queued_runs_eagerly_once(workers: StreamDispatcher, gate: threading.Event) -> None:
    """A step whose graph goes before its turn comes is run by the runner on the worker, once."""
    queued = [workers.submit(KEY, batch(1.0)) for _ in range(4)]
    clearing = threading.Thread(target=workers.clear_cache)
    clearing.start()
    gate.set()
    assert all(torch.equal(one.result(), batch(4.0)) for one in queued)
    clearing.join(TIMEOUT_S)
    assert workers.stats.total == 4
    assert workers.num_graphs == 0


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
    assert sorted(len(worker.graphs) for worker in workers.workers) == [2, 5]


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
    pending = dispatcher.submit(KEY)
    assert inside.wait(TIMEOUT_S)
    closes = threading.Thread(target=dispatcher.close, daemon=True)
    closes.start()
    while not dispatcher.workers[0].is_closed:
        pass
    gate.set()
    closes.join(TIMEOUT_S)
    assert not closes.is_alive()
    assert pending.result() == "served"


def test_a_worker_closed_behind_a_step_has_run_it_once(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is finished, and not run by the runner again."""
    count = torch.zeros(())

    def counts(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * 2

    dispatcher = opened(counts, 1)
    dispatcher.capture(KEY, (batch(0.0),))
    stream = dispatcher.workers[0].stream
    submit = stream.submit

    def closing(work: Callable[[], None]) -> None:
        submit(work)
        monkeypatch.undo()
        dispatcher.close()

    monkeypatch.setattr(stream, "submit", closing)
    x = torch.randn(2, 3)
    assert torch.equal(dispatcher.submit(KEY, x).result(), x * 2)
    assert (count.item(), dispatcher.stats.graph, dispatcher.stats.eager) == (1, 1, 0)


def test_a_worker_that_closes_as_a_step_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step runs eagerly, as those behind it, and is counted once."""
    dispatcher = StreamDispatcher(lambda x: x * 2, num_streams=1)
    key, x = create_dispatch_key(4, 4), torch.ones(4, 2)
    dispatcher.capture(key, (x,))
    (worker,) = dispatcher.workers
    launch = worker.launch

    def closing(*step: Any) -> Any:
        worker.close()
        return launch(*step)

    monkeypatch.setattr(worker, "launch", closing)
    assert torch.equal(dispatcher.submit(key, x).result(), x * 2)
    assert dispatcher.stats.reasons == {Reason.NOT_CAPTURED: 1}
