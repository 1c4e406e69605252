"""Graphs that are replaced, released or registered again while calls use them: the others are not touched."""

import threading
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Reason
from graphdispatch.backends import get_backend
from graphdispatch.engines import (
    CompositeDispatcher,
    CudagraphDispatcher,
    CUDAGraphEntry,
    CUDAGraphRegistry,
    DefaultDispatchPolicy,
    DispatchKey,
    DispatchMode,
    StreamDispatcher,
)
from graphdispatch.errors import ConfigError, ReplayError
from graphdispatch.testing import MockCUDAGraph

TIMEOUT_S = 30.0
"""Bound on every wait of a test: reached only where the code under test hangs, and then the test fails."""
KEY, OTHER = DispatchKey(4, 4), DispatchKey(8, 8)
TRUST = CUDAGraphOptions(verify=False)


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice the input."""
    return x * 2


def entry(rows: int = 4, fn: Any = double) -> CUDAGraphEntry:
    """A captured graph."""
    return CUDAGraphRegistry().capture(rows, 1, fn, {"x": (rows, 3)})


def scripted(outputs: Any = "graph", **script: Any) -> MockCUDAGraph:
    """A graph that may be replayed."""
    graph = MockCUDAGraph(outputs, **script)
    graph.capture_begin()
    graph.capture_end()
    return graph


def serve(dispatcher: CudagraphDispatcher, key: DispatchKey = KEY, times: int = 1) -> None:
    """Calls that get eager's answer."""
    for _ in range(times):
        x = torch.randn(key.num_tokens, 3)
        assert torch.equal(dispatcher.dispatch(key, x), x * 2)


def test_a_displaced_entry_keeps_its_buffers() -> None:
    """A dispatcher frees nothing of an entry that somebody else captured: its owner goes on replaying it."""
    dispatcher, first = CudagraphDispatcher(double, max_cached_graphs=1), entry()
    dispatcher.register_graph(KEY, first)
    serve(dispatcher, times=3)
    dispatcher.register_graph(OTHER, entry(8))
    x = torch.randn(4, 3)
    assert torch.equal(first.replay({"x": x}), x * 2)
    assert first.inputs.nbytes > 0


def test_an_entry_of_two_keys_goes_from_one_alone() -> None:
    """Another graph for one of its keys leaves it to serve the other."""
    dispatcher, twice = CudagraphDispatcher(double), entry()
    short, long = DispatchKey(4, 4, 64), DispatchKey(4, 4, 128)
    for key in (short, long):
        dispatcher.register_graph(key, twice)
        serve(dispatcher, key, 2)
    dispatcher.register_graph(short, entry())
    before = dispatcher.stats.graph
    serve(dispatcher, long, 2)
    assert dispatcher.stats.graph == before + 2
    assert dispatcher.num_graphs == 2


def test_a_call_that_chose_the_older_graph_does_not_bring_it_back() -> None:
    """It runs eagerly, makes no group that nobody would forget, and what it drops is not the newer graph."""
    dispatcher = CudagraphDispatcher(double)
    worker = dispatcher.workers[0]
    dispatcher.register_graph(KEY, entry())
    older, _ = worker.choose(KEY, dispatcher.policy)
    newer = entry()
    dispatcher.register_graph(KEY, newer)
    assert older is not None
    x = torch.randn(4, 3)
    assert torch.equal(worker.server.serve(older.route, (x,), {}), x * 2)
    assert worker.server.local.decision.reason is Reason.NOT_CAPTURED
    assert not worker.server.graphs.groups
    worker.drop(older)
    serve(dispatcher, times=2)
    dispatcher.register_graph(OTHER, scripted())
    assert (dispatcher.get_graph(KEY), dispatcher.stats.graph) == (newer, 1)


def test_registering_over_and_over_leaves_nothing_behind() -> None:
    """One key, one graph, one group, however often it is registered and called."""
    dispatcher, again = CudagraphDispatcher(double), entry()
    for _ in range(20):
        dispatcher.register_graph(KEY, again)
        serve(dispatcher)
    worker = dispatcher.workers[0]
    assert (dispatcher.num_graphs, len(worker.cache), len(worker.server.graphs.groups)) == (1, 1, 1)


def test_a_released_entry_is_not_registered() -> None:
    """It could never be replayed."""
    gone = entry()
    gone.release()
    with pytest.raises(ConfigError, match="graph must not be released"):
        CudagraphDispatcher(double).register_graph(KEY, gone)


def test_a_key_captured_again_is_guarded_as_before() -> None:
    """The older graph is released, and the newer one does not outlive the weights that it reads."""
    linear = torch.nn.Linear(3, 3).eval().requires_grad_(False)
    dispatcher = StreamDispatcher(linear, 1, backend=get_backend("cpu"), options=TRUST)
    dispatcher.capture(KEY, (torch.zeros(4, 3),))
    older = dispatcher.get_entry(KEY)
    dispatcher.capture(KEY, (torch.zeros(4, 3),))
    assert "evicted" in repr(older)
    x = torch.randn(4, 3)
    assert torch.equal(dispatcher.dispatch(KEY, x), linear(x))
    linear.weight = torch.nn.Parameter(torch.randn(3, 3), requires_grad=False)
    for _ in range(3):
        assert torch.equal(dispatcher.dispatch(KEY, x), linear(x))
    assert dispatcher.stats.graph == 1
    dispatcher.close()


def test_a_runner_may_register_while_it_is_compared() -> None:
    """Another thread that replaces the same graph at that time does not hang it, nor the other way round."""
    comparing = replaced = False
    inside, published = threading.Event(), threading.Event()

    def runner(x: torch.Tensor) -> torch.Tensor:
        nonlocal replaced
        if comparing and not replaced:
            replaced = True
            inside.set()
            while dispatcher.get_graph(KEY) is not newer:
                assert not published.wait(0.001)
            dispatcher.register_graph(OTHER, scripted())
        return x * 2

    dispatcher, newer = CudagraphDispatcher(runner), scripted()
    dispatcher.register_graph(KEY, entry())

    def replace() -> None:
        assert inside.wait(TIMEOUT_S)
        dispatcher.register_graph(KEY, newer)
        published.set()

    comparing = True
    threads = [threading.Thread(target=target, daemon=True) for target in (replace, lambda: serve(dispatcher))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert (dispatcher.get_graph(KEY), dispatcher.has_graph(OTHER)) == (newer, True)


def test_closing_does_not_wait_for_a_step_that_waits_for_it() -> None:
    """A step under way may register a graph; that hangs neither of the two."""
    inside, gate = threading.Event(), threading.Event()
    dispatcher = StreamDispatcher(double, 1, backend=get_backend("cpu"))

    def registers() -> None:
        inside.set()
        assert gate.wait(TIMEOUT_S)
        dispatcher.register_graph(OTHER, scripted())

    dispatcher.register_graph(KEY, scripted("served", on_replay=registers))
    pending = dispatcher.submit(KEY)
    assert inside.wait(TIMEOUT_S)
    closing = threading.Thread(target=dispatcher.close, daemon=True)
    closing.start()
    while not dispatcher.workers[0].is_closed:
        pass
    gate.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert pending.result() == "served"


def test_a_worker_closed_after_it_was_chosen_leaves_the_call_to_the_runner() -> None:
    """``submit`` never raises for that, and the call is counted once."""

    class Closes(DefaultDispatchPolicy):
        def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
            worker = dispatcher.workers[0]
            worker.is_closed = True
            worker.stream.close()
            return True

    dispatcher = StreamDispatcher(lambda x: "eager", 1, backend=get_backend("cpu"))
    dispatcher.register_graph(KEY, scripted())
    dispatcher.policy = Closes()
    assert dispatcher.dispatch(KEY, 1) == "eager"
    assert dispatcher.attempt(KEY, (1,), {}) == (False, None, Reason.NOT_CAPTURED)
    assert dispatcher.stats.reasons == {Reason.NOT_CAPTURED: 1}
    dispatcher.close()


def test_a_replay_error_of_the_runner_is_its_own() -> None:
    """It counts as the eager call that it was, and passes through."""

    def raises(*args: Any) -> None:
        raise ReplayError("mine")

    dispatcher = CudagraphDispatcher(raises)
    for _ in range(2):
        with pytest.raises(ReplayError, match="mine"):
            dispatcher.dispatch(KEY)
    assert dispatcher.stats.reasons == {Reason.NOT_CAPTURED: 2}


def test_a_call_counts_in_the_mode_its_graph_was_registered_in() -> None:
    """Whatever the entry itself is: the policy chose that mode."""
    dispatcher = CudagraphDispatcher(double)
    dispatcher.register_graph(KEY, entry(), mode=DispatchMode.PIECEWISE)
    serve(dispatcher, times=3)
    assert (dispatcher.stats.piecewise, dispatcher.stats.graph) == (2, 0)


def chain(first: CudagraphDispatcher) -> CompositeDispatcher:
    """A composite that goes on to a scripted graph for ``KEY``."""
    second = CudagraphDispatcher(double)
    second.register_graph(KEY, scripted("second"))
    composite = CompositeDispatcher()
    composite.add_dispatcher("first", first)
    composite.add_dispatcher("second", second)
    return composite


def test_a_graph_that_its_owner_released_is_no_failure() -> None:
    """The call goes on to the next member, and the first one is not quarantined."""
    first, gone = CudagraphDispatcher(double), entry()
    first.register_graph(KEY, gone)
    composite = chain(first)
    gone.release()
    assert composite.dispatch(KEY, torch.ones(4, 3)) == "second"
    assert composite.members[0].failures == 0
    assert composite.skips["first"] == {Reason.NOT_CAPTURED: 1}
    assert not first.has_graph(KEY)


def test_a_graph_released_under_a_waiting_call_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it one if its owner releases it between the decision and the replay."""
    first, gone = CudagraphDispatcher(double), entry()
    first.register_graph(KEY, gone)
    serve(first, times=3)
    composite, answers = chain(first), list[Any]()
    call = threading.Thread(target=lambda: answers.append(composite.dispatch(KEY, torch.ones(4, 3))), daemon=True)
    server, has_decided = first.workers[0].server, threading.Event()
    preview = server.preview

    def decide(*call: Any) -> Any:
        choice = preview(*call)
        has_decided.set()
        return choice

    monkeypatch.setattr(server, "preview", decide)
    with gone.pool.lock:  # where the replay waits
        call.start()
        assert has_decided.wait(TIMEOUT_S)
        gone.release()
    call.join(TIMEOUT_S)
    assert answers == ["second"]
    assert composite.members[0].failures == 0
