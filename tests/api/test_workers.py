"""Stream workers on the CPU backend. Overlap and order are shown with barriers and gates inside custom operators."""

import threading
from collections.abc import Iterator

import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason
from graphdispatch.backends import get_backend
from graphdispatch.engines import (
    BatchDescriptor,
    CudagraphDispatcher,
    CUDAGraphWrapper,
    DefaultDispatchPolicy,
    DispatchKey,
    DispatchMode,
    StreamDispatcher,
)
from graphdispatch.errors import CaptureError, ConfigError
from graphdispatch.testing import MockCUDAGraph

from ..compiled_operators import compiled_operator
from ..spy import Spy

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


@pytest.fixture
def workers() -> Iterator[StreamDispatcher]:
    """A dispatcher over two workers, with a graph for ``KEY`` on each."""
    HOOKS.clear()
    dispatcher = StreamDispatcher(model, 2, backend=get_backend("cpu"), options=TRUST)
    dispatcher.capture(KEY, (batch(0.0),))
    yield dispatcher
    for hook in HOOKS:
        hook.abort() if isinstance(hook, threading.Barrier) else hook.set()
    HOOKS.clear()
    dispatcher.close()


@pytest.fixture
def gate(workers: StreamDispatcher) -> threading.Event:
    """A closed gate in the middle of every step from now on."""
    gate = threading.Event()
    HOOKS.append(gate)
    return gate


def test_a_step_gives_what_eager_gives(workers: StreamDispatcher) -> None:
    """Each worker's graph answers with the outputs of its own inputs."""
    assert [workers.dispatch(KEY, batch(v)).tolist() for v in (1.0, 2.0, 3.0)] == [
        model(batch(v)).tolist() for v in (1.0, 2.0, 3.0)
    ]
    assert workers.stats.graph == 3


def test_two_workers_overlap(workers: StreamDispatcher) -> None:
    """Both steps are in the middle of their graphs at one time: each waits there for the other."""
    HOOKS.append(threading.Barrier(2))
    first, second = workers.submit(KEY, batch(1.0)), workers.submit(KEY, batch(5.0))
    assert torch.equal(first.result(), batch(4.0))
    assert torch.equal(second.result(), batch(12.0))
    assert {first.worker, second.worker} == {0, 1}


def test_threads_overlap(workers: StreamDispatcher) -> None:
    """Plain dispatches from two threads run on two workers at one time."""
    HOOKS.append(threading.Barrier(2))
    answers: dict[float, torch.Tensor] = {}

    def serve(value: float) -> None:
        answers[value] = workers.dispatch(KEY, batch(value))

    threads = [threading.Thread(target=serve, args=(value,), daemon=True) for value in (1.0, 5.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert {value: answer[0, 0].item() for value, answer in answers.items()} == {1.0: 4.0, 5.0: 12.0}


def test_workers_share_no_memory(workers: StreamDispatcher) -> None:
    """The graphs of one key on two workers have buffers and pools of their own."""
    first, second = (workers.get_entry(KEY, worker=index) for index in (0, 1))
    assert first is not None
    assert second is not None
    assert not {*first.input_addresses} & {*second.input_addresses}
    assert first.pool is workers.workers[0].pool
    assert second.pool is workers.workers[1].pool


def test_steps_of_one_worker_keep_their_inputs(workers: StreamDispatcher, gate: threading.Event) -> None:
    """Steps that wait in one worker's queue load their own inputs when their turn comes, and own their outputs."""
    queued = [workers.submit(KEY, batch(float(v))) for v in range(6)]
    gate.set()
    assert [one.result()[0, 0].item() for one in queued] == [2.0 * (v + 1) for v in range(6)]


def test_submit_does_not_wait(workers: StreamDispatcher, gate: threading.Event) -> None:
    """A submitted step is under way until the device has finished it."""
    pending = workers.submit(KEY, batch(1.0))
    assert not pending.is_done
    gate.set()
    pending.result()
    assert pending.is_done


def test_the_least_busy_worker_is_chosen(workers: StreamDispatcher, gate: threading.Event) -> None:
    """With a step under way on one worker the next goes to the other, and so on in turn."""
    assert sorted(workers.submit(KEY, batch(1.0)).worker for _ in range(2)) == [0, 1]
    assert [worker.busy for worker in workers.workers] == [1, 1]
    gate.set()
    workers.synchronize()
    assert [worker.busy for worker in workers.workers] == [0, 0]


def test_a_sticky_thread_keeps_its_worker() -> None:
    """With ``selection="sticky"`` all steps of a thread go to one worker, in order."""
    HOOKS.clear()
    sticky = StreamDispatcher(model, 2, selection="sticky", backend=get_backend("cpu"), options=TRUST)
    sticky.capture(KEY, (batch(0.0),))
    mine = [sticky.submit(KEY, batch(1.0)).worker for _ in range(4)]
    theirs: list[int | None] = []
    thread = threading.Thread(target=lambda: theirs.extend(sticky.submit(KEY, batch(1.0)).worker for _ in range(4)))
    thread.start()
    thread.join(TIMEOUT_S)
    sticky.close()
    assert len(set(mine)) == len(set(theirs)) == 1
    assert mine != theirs


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


def test_a_key_without_a_graph_runs_eagerly(workers: StreamDispatcher) -> None:
    """Without a graph the runner runs on the caller's thread, with the reason counted."""
    pending = workers.submit(OTHER, batch(1.0, rows=4))
    assert pending.worker is None
    assert torch.equal(pending.result(), batch(4.0, rows=4))
    assert workers.stats.reasons == {Reason.NOT_CAPTURED: 1}


def test_eager_calls_run_on_workers_if_the_caller_says_so() -> None:
    """Two of them overlap then, and each is counted once; a call that is being captured stays where it is."""
    HOOKS.clear()
    dispatcher = StreamDispatcher(model, 2, eager="worker", backend=get_backend("cpu"))
    HOOKS.append(threading.Barrier(2))
    queued = [dispatcher.submit(KEY, batch(value)) for value in (1.0, 5.0)]
    assert [one.result()[0, 0].item() for one in queued] == [4.0, 12.0]
    assert {one.worker for one in queued} == {0, 1}
    HOOKS.clear()
    with dispatcher.backend.watched():
        assert dispatcher.submit(KEY, batch(1.0)).worker is None
    assert dispatcher.stats.reasons == {Reason.NOT_CAPTURED: 3}
    dispatcher.close()
    assert torch.equal(dispatcher.dispatch(KEY, batch(1.0)), batch(4.0))


@pytest.mark.parametrize("wrong", [torch.zeros(1, 3), torch.zeros(2, 3, dtype=torch.float64)])
def test_other_arguments_run_eagerly(workers: StreamDispatcher, wrong: torch.Tensor) -> None:
    """An argument that would be broadcast or cast into the graph's buffer is not served by it."""
    assert torch.equal(workers.dispatch(KEY, wrong), model(wrong))
    assert workers.stats.reasons == {Reason.ARGUMENTS_CHANGED: 1}


def test_errors_of_the_runner_pass_through(workers: StreamDispatcher) -> None:
    """What the eager runner raises is raised by ``result`` and by ``dispatch``, unchanged."""
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        workers.dispatch(OTHER)
    assert workers.stats.eager == 1


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


def test_captures_leave_no_effects() -> None:
    """Capturing a runner that counts its calls in a tensor leaves the count alone; each step counts once."""
    count = torch.zeros(())

    def counting(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * 2

    dispatcher = StreamDispatcher(counting, 2, backend=get_backend("cpu"))
    dispatcher.capture(KEY, (batch(0.0),), workers=[1])
    assert count.item() == 0
    for value in (1.0, 2.0, 3.0):
        assert torch.equal(dispatcher.dispatch(KEY, batch(value)), batch(2 * value))
    dispatcher.close()
    assert count.item() == 3
    assert dispatcher.stats.reasons == {Reason.VERIFIED_NOW: 1}


def test_workers_that_write_one_state_are_refused() -> None:
    """A runner with state of its own cannot be captured on two workers unless the caller vouches for the rows."""
    state = torch.zeros(2, 3)

    def stateful(x: torch.Tensor) -> torch.Tensor:
        return state.add_(x) * 1

    dispatcher = StreamDispatcher(stateful, 2, backend=get_backend("cpu"))
    with pytest.raises(ConfigError, match="workers 0 and 1 share memory that one of them writes"):
        dispatcher.capture(KEY, (batch(1.0),))
    assert dispatcher.num_graphs == 0
    dispatcher.close()
    allowed = StreamDispatcher(stateful, 2, shared_writes="allow", backend=get_backend("cpu"))
    allowed.capture(KEY, (batch(1.0),))
    assert allowed.num_graphs == 2
    allowed.close()


def test_a_wrappers_entry_serves_on_its_worker(workers: StreamDispatcher) -> None:
    """A wrapper on a worker's pool makes entries for that worker; those of another worker's pool are refused."""
    descriptor = BatchDescriptor(4)
    wrapper = CUDAGraphWrapper(model, options=TRUST, backend=workers.backend, pool=workers.workers[1].pool)
    with torch.no_grad():
        wrapper(batch(1.0, 4), batch_descriptor=descriptor, cudagraph_runtime_mode=CUDAGraphMode.FULL)
    entry = wrapper.get_entry(descriptor)
    assert entry is not None
    with pytest.raises(ConfigError, match=r"in the same pool as one of worker 1"):
        workers.register_graph(OTHER, entry, worker=0)
    workers.register_graph(OTHER, entry, worker=1)
    pending = workers.submit(OTHER, batch(2.0, 4))
    assert torch.equal(pending.result(), batch(6.0, 4))
    assert pending.worker == 1


def test_input_addresses_choose_the_worker(workers: StreamDispatcher) -> None:
    """Foreign graphs of one key are told apart by the addresses that they read."""
    buffers = [batch(0.0, 4), batch(1.0, 4)]
    for index, buffer in enumerate(buffers):
        graph = MockCUDAGraph(outputs=f"worker {index}")
        graph.capture_begin()
        graph.capture_end()
        workers.register_graph(OTHER, graph, [buffer.data_ptr()], worker=index)
    assert [workers.dispatch(OTHER, buffer) for buffer in buffers] == ["worker 0", "worker 1"]
    assert torch.equal(workers.dispatch(OTHER, batch(1.0, 4)), batch(4.0, 4))
    assert workers.stats.reasons == {Reason.ADDRESS_CHANGED: 1}


def test_moved_weights_are_never_replayed() -> None:
    """After a weight moved its graphs are gone, and the call runs eagerly with the new weight."""
    linear = torch.nn.Linear(3, 3).eval().requires_grad_(False)
    dispatcher = StreamDispatcher(linear, 2, backend=get_backend("cpu"), options=TRUST)
    dispatcher.capture(KEY, (batch(0.0),))
    linear.weight = torch.nn.Parameter(linear.weight + 1, requires_grad=False)
    assert torch.equal(dispatcher.dispatch(KEY, batch(1.0)), linear(batch(1.0)))
    assert dispatcher.stats.graph == 0
    dispatcher.close()


def test_modes_and_policies_hold_on_all_workers(workers: StreamDispatcher) -> None:
    """A mode that is off, and a policy that says eager, keep every worker out."""
    workers.disable_mode(DispatchMode.CUDAGRAPH)
    workers.dispatch(KEY, batch(1.0))
    assert workers.stats.reasons == {Reason.DISABLED: 1}
    strict = StreamDispatcher(
        model, policy=DefaultDispatchPolicy(max_tokens_for_graph=1), backend=get_backend("cpu"), options=TRUST
    )
    strict.capture(KEY, (batch(0.0),))
    strict.dispatch(KEY, batch(1.0))
    assert strict.stats.reasons == {Reason.POLICY: 1}
    strict.close()


def test_a_capture_that_fails_leaves_no_graph() -> None:
    """A runner that no graph can hold raises ``CaptureError``, and the dispatcher goes on eagerly."""
    dispatcher = StreamDispatcher(lambda x: x * x.sum().item(), backend=get_backend("cpu"))
    with pytest.raises(CaptureError, match="reads a value back to the host"):
        dispatcher.capture(KEY, (batch(1.0),))
    assert dispatcher.num_graphs == 0
    assert torch.equal(dispatcher.dispatch(KEY, batch(1.0)), batch(6.0))
    dispatcher.close()


def test_the_older_graphs_of_a_worker_are_released() -> None:
    """``max_cached_graphs`` holds for each worker, and what falls out is released."""
    HOOKS.clear()
    dispatcher = StreamDispatcher(model, 2, max_cached_graphs=1, backend=get_backend("cpu"), options=TRUST)
    dispatcher.capture(KEY, (batch(0.0),))
    old = dispatcher.get_entry(KEY, worker=0)
    dispatcher.capture(OTHER, (batch(0.0, 4),))
    assert old is not None
    assert "evicted" in repr(old)
    assert dispatcher.num_graphs == 2
    assert not dispatcher.has_graph(KEY)
    dispatcher.close()


def test_graphs_come_and_go_under_threads(workers: StreamDispatcher) -> None:
    """Threads get eager's answers while graphs are captured, evicted and cleared underneath them."""
    wrong: list[float] = []
    stop = threading.Event()

    def serve(first: float) -> None:
        value = first
        while not stop.is_set():
            value += 1
            if not torch.equal(workers.dispatch(KEY, batch(value)), batch(2 * (value + 1))):
                wrong.append(value)

    threads = [threading.Thread(target=serve, args=(1000.0 * i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        workers.capture(KEY, (batch(0.0),))
        assert torch.equal(workers.dispatch(KEY, batch(1.0)), batch(4.0))
        workers.clear_cache()
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert wrong == []
    assert workers.stats.graph >= 20


def test_after_close_calls_run_eagerly(workers: StreamDispatcher) -> None:
    """A closed dispatcher still answers."""
    workers.close()
    workers.close()
    assert torch.equal(workers.dispatch(KEY, batch(1.0)), batch(4.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_streams": 0}, "num_streams must be an integer >= 1, got 0"),
        ({"selection": "random"}, "selection must be 'least_busy' or 'sticky', got 'random'"),
        ({"shared_writes": "maybe"}, "shared_writes must be 'refuse' or 'allow', got 'maybe'"),
        ({"max_cached_graphs": 0}, "max_cached_graphs must be an integer >= 1, got 0"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    """Each bad option is one clear error."""
    with pytest.raises(ConfigError, match=message):
        StreamDispatcher(model, **options)  # type: ignore[arg-type]


def test_a_worker_that_is_not_there_is_named(workers: StreamDispatcher) -> None:
    """Workers are numbered from zero."""
    with pytest.raises(ConfigError, match="worker must be an integer from 0 to 1, got 2"):
        workers.has_graph(KEY, worker=2)


def test_it_is_a_dispatcher(workers: StreamDispatcher) -> None:
    """Whatever takes a ``CudagraphDispatcher`` takes workers."""
    assert isinstance(workers, CudagraphDispatcher)
    assert workers.get_graph(KEY) is workers.get_entry(KEY)
    assert "2 workers, 2 graphs" in repr(workers)
