"""``CudagraphDispatcher``: runs each key by a registered graph or eagerly, and counts why."""

import threading
from collections.abc import Collection
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason
from graphdispatch.backends import get_backend
from graphdispatch.engines import (
    BatchDescriptor,
    CudagraphDispatcher,
    CUDAGraphEntry,
    CUDAGraphRegistry,
    CUDAGraphWrapper,
    DefaultDispatchPolicy,
    DispatchKey,
    DispatchMode,
    DispatchPolicy,
)
from graphdispatch.errors import ConfigError
from graphdispatch.testing import MockCUDAGraph

EAGER, FULL, PIECEWISE, HYBRID = DispatchMode.EAGER, DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE, DispatchMode.HYBRID
KEY = DispatchKey(4, 4)


def eager(*args: Any, **kwargs: Any) -> str:
    """The runner that is always right."""
    return "eager"


def graph(outputs: Any = "graph", **script: Any) -> MockCUDAGraph:
    """A scripted graph that may be replayed."""
    made = MockCUDAGraph(outputs, **script)
    made.capture_begin()
    made.capture_end()
    return made


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice the input."""
    return x * 2


def real_entry() -> CUDAGraphEntry:
    """A captured graph of ``double`` for four rows."""
    return CUDAGraphRegistry().capture(4, 1, double, {"x": (4, 3)})


class Chooses(DispatchPolicy):
    """Always wants one mode, and notes what it could have had."""

    def __init__(self, mode: DispatchMode) -> None:
        self.mode = mode
        self.offered: list[set[DispatchMode]] = []

    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether there is one."""
        return graph_available

    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The one mode."""
        self.offered.append(set(available_modes))
        return self.mode


def test_a_registered_key_is_replayed() -> None:
    """The graph's outputs are handed out, and the runner is not called."""
    calls: list[int] = []
    dispatcher = CudagraphDispatcher(calls.append)
    scripted = graph()
    dispatcher.register_graph(KEY, scripted)
    assert dispatcher.dispatch(KEY, 1) == "graph"
    assert (scripted.replays, calls) == (1, [])
    assert (dispatcher.stats.graph, dispatcher.stats.graph_ratio) == (1, 1.0)


def test_another_key_runs_eagerly() -> None:
    """Keys are exact; the arguments reach the runner as they are."""
    dispatcher = CudagraphDispatcher(lambda *args, **kwargs: (args, kwargs))
    dispatcher.register_graph(KEY, graph())
    assert dispatcher.dispatch(DispatchKey(4, 3), 1, b=2) == ((1,), {"b": 2})
    assert dispatcher.stats.reasons == {Reason.NOT_CAPTURED: 1}
    assert dispatcher.stats.fallbacks == 1


def test_has_and_get_know_what_was_registered() -> None:
    """The very graph comes back; a full one goes before a piecewise one."""
    dispatcher = CudagraphDispatcher(eager)
    piecewise, full = graph(), graph()
    assert (dispatcher.has_graph(KEY), dispatcher.get_graph(KEY), dispatcher.get_entry(KEY)) == (False, None, None)
    dispatcher.register_graph(KEY, piecewise, mode=PIECEWISE)
    assert dispatcher.get_graph(KEY) is piecewise
    dispatcher.register_graph(KEY, full)
    assert dispatcher.get_graph(KEY) is full
    assert (dispatcher.has_graph(KEY), dispatcher.num_graphs) == (True, 2)


def test_registering_again_replaces() -> None:
    """Of one key and mode the last graph counts."""
    dispatcher = CudagraphDispatcher(eager, max_cached_graphs=1)
    dispatcher.register_graph(KEY, graph("old"))
    dispatcher.register_graph(KEY, graph("new"))
    assert (dispatcher.dispatch(KEY), dispatcher.num_graphs) == ("new", 1)


def test_the_least_recently_used_makes_room() -> None:
    """At capacity the graph that was longest not replayed goes."""
    dispatcher = CudagraphDispatcher(eager, max_cached_graphs=2)
    keys = [DispatchKey(tokens, 1) for tokens in (1, 2, 3)]
    for key in keys[:2]:
        dispatcher.register_graph(key, graph())
    dispatcher.dispatch(keys[0])
    dispatcher.register_graph(keys[2], graph())
    assert [dispatcher.has_graph(key) for key in keys] == [True, False, True]


def test_clearing_forgets_graphs_and_keeps_counts() -> None:
    """The graphs belong to whoever registered them and are not released."""
    dispatcher = CudagraphDispatcher(eager)
    scripted = graph()
    dispatcher.register_graph(KEY, scripted)
    dispatcher.dispatch(KEY)
    dispatcher.clear_cache()
    assert (dispatcher.dispatch(KEY), dispatcher.num_graphs) == ("eager", 0)
    assert (dispatcher.stats.graph, dispatcher.stats.eager) == (1, 1)
    assert scripted.is_captured


def test_given_outputs_are_handed_out() -> None:
    """``outputs`` goes before the graph's own."""
    dispatcher = CudagraphDispatcher(eager)
    dispatcher.register_graph(KEY, graph("its own"), outputs=("given", 2))
    assert dispatcher.dispatch(KEY) == ("given", 2)


def test_entry_counts_replays() -> None:
    """Replay count and last use are the entry's."""
    dispatcher = CudagraphDispatcher(eager)
    dispatcher.register_graph(KEY, graph())
    entry = dispatcher.get_entry(KEY)
    assert entry is not None
    before = entry.last_used
    dispatcher.dispatch(KEY)
    assert (entry.replay_count, entry.last_used > before, entry.mode) == (1, True, CUDAGraphMode.FULL)


def test_a_disabled_mode_is_not_used() -> None:
    """Graphs stay registered and serve again once their mode is enabled; that is no fallback."""
    dispatcher = CudagraphDispatcher(eager)
    dispatcher.register_graph(KEY, graph())
    dispatcher.disable_mode(FULL)
    assert dispatcher.dispatch(KEY) == "eager"
    assert (dispatcher.stats.reasons, dispatcher.stats.fallbacks) == ({Reason.DISABLED: 1}, 0)
    dispatcher.enable_mode(FULL)
    assert dispatcher.dispatch(KEY) == "graph"
    assert dispatcher.enabled_modes == frozenset(DispatchMode)


def test_a_disabled_mode_leaves_the_other() -> None:
    """Without full graphs the piecewise one of the key serves."""
    dispatcher = CudagraphDispatcher(eager)
    dispatcher.register_graph(KEY, graph("full"))
    dispatcher.register_graph(KEY, graph("piecewise"), mode=PIECEWISE)
    dispatcher.disable_mode(FULL)
    assert dispatcher.dispatch(KEY) == "piecewise"
    assert dispatcher.stats.piecewise == 1


def test_eager_cannot_be_disabled() -> None:
    """Something must serve what no graph can."""
    with pytest.raises(ConfigError, match="EAGER cannot be disabled"):
        CudagraphDispatcher(eager).disable_mode(EAGER)


@pytest.mark.parametrize(("mode", "answer"), [(FULL, "full"), (PIECEWISE, "piecewise"), (EAGER, "eager")])
def test_hybrid_asks_the_policy(mode: DispatchMode, answer: str) -> None:
    """The policy picks among the modes that could serve the key, eager always among them."""
    policy = Chooses(mode)
    dispatcher = CudagraphDispatcher(eager, policy)
    dispatcher.register_graph(KEY, graph("full"))
    dispatcher.register_graph(KEY, graph("piecewise"), mode=PIECEWISE)
    assert dispatcher.dispatch(KEY) == answer
    assert policy.offered == [{FULL, PIECEWISE, EAGER}]


def test_an_eager_choice_of_the_policy_is_no_fallback() -> None:
    """It was wanted, and its reason says by whom."""
    dispatcher = CudagraphDispatcher(eager, Chooses(EAGER))
    dispatcher.register_graph(KEY, graph())
    dispatcher.dispatch(KEY)
    assert (dispatcher.stats.reasons, dispatcher.stats.fallbacks) == ({Reason.POLICY: 1}, 0)


def test_a_mode_that_is_not_there_runs_eagerly() -> None:
    """A policy that picks what was not offered gets eager."""
    dispatcher = CudagraphDispatcher(eager, Chooses(PIECEWISE))
    dispatcher.register_graph(KEY, graph())
    assert dispatcher.dispatch(KEY) == "eager"


def test_without_hybrid_the_policy_is_not_asked() -> None:
    """A full graph goes first, then piecewise."""
    policy = Chooses(EAGER)
    dispatcher = CudagraphDispatcher(eager, policy)
    dispatcher.register_graph(KEY, graph())
    dispatcher.disable_mode(HYBRID)
    assert dispatcher.dispatch(KEY) == "graph"
    assert policy.offered == []


def test_the_default_policy_has_limits() -> None:
    """A key past the limits runs eagerly although it has a graph."""
    dispatcher = CudagraphDispatcher(eager, DefaultDispatchPolicy(max_tokens_for_graph=3))
    dispatcher.register_graph(KEY, graph())
    assert dispatcher.dispatch(KEY) == "eager"


def test_other_addresses_run_eagerly() -> None:
    """A graph reads where it was captured to read; tensors that lie elsewhere would be ignored by it."""
    x, other = torch.zeros(3), torch.zeros(3)
    dispatcher = CudagraphDispatcher(eager)
    dispatcher.register_graph(KEY, graph(), [x.data_ptr()])
    assert [dispatcher.dispatch(KEY, x), dispatcher.dispatch(KEY, other), dispatcher.dispatch(KEY)] == [
        "graph", "eager", "eager",
    ]  # fmt: skip
    assert dispatcher.stats.reasons == {Reason.ADDRESS_CHANGED: 2}


def test_addresses_are_compared_in_nests() -> None:
    """Tensors in containers and keywords count, in the order of the call."""
    x, y = torch.zeros(3), torch.zeros(3)
    dispatcher = CudagraphDispatcher(eager)
    dispatcher.register_graph(KEY, graph(), (x.data_ptr(), y.data_ptr()))
    assert dispatcher.dispatch(KEY, [x], 7, y={"y": y}) == "graph"
    assert dispatcher.dispatch(KEY, [y], y={"y": x}) == "eager"


@pytest.mark.parametrize(
    "script", [{"fail_replay_at": 1}, {"on_replay": lambda: torch.zeros(2) + torch.zeros(3)}], ids=["refuses", "raises"]
)
def test_a_graph_that_fails_is_dropped(script: dict[str, Any]) -> None:
    """Whatever an idempotent foreign graph raises: the call runs eagerly, and the graph is not tried again."""
    dispatcher = CudagraphDispatcher(eager)
    scripted = graph(**script)
    dispatcher.register_graph(KEY, scripted, idempotent=True)
    assert [dispatcher.dispatch(KEY), dispatcher.dispatch(KEY)] == ["eager", "eager"]
    assert (dispatcher.has_graph(KEY), scripted.replays) == (False, 1)
    assert dispatcher.stats.reasons == {Reason.REPLAY_FAILED: 1, Reason.NOT_CAPTURED: 1}


def test_a_graph_that_was_not_captured_fails() -> None:
    """An empty graph has nothing to replay, and the call runs eagerly."""
    dispatcher = CudagraphDispatcher(eager)
    dispatcher.register_graph(KEY, MockCUDAGraph())
    assert dispatcher.dispatch(KEY) == "eager"


def test_an_error_of_the_runner_passes_through() -> None:
    """It is the caller's own."""

    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        CudagraphDispatcher(broken).dispatch(KEY)


@pytest.mark.parametrize("spelling", ["positional", "keyword"])
def test_an_entry_brings_its_inputs(spelling: str) -> None:
    """A captured entry copies the arguments in and hands out the answer for the real rows."""
    dispatcher = CudagraphDispatcher(double)
    dispatcher.register_graph(KEY, real_entry())
    for rows in (4, 4, 2, 2):
        x = torch.randn(rows, 3)
        answer = dispatcher.dispatch(KEY, x) if spelling == "positional" else dispatcher.dispatch(KEY, x=x)
        assert torch.equal(answer, x * 2)
    assert dispatcher.stats.graph == 2
    assert dispatcher.stats.reasons == {Reason.VERIFIED_NOW: 2}  # the second batch, and the first padded one


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.ones(5, 3), Reason.ABOVE_LARGEST_SIZE),
        (torch.ones(4, 3, dtype=torch.float64), Reason.ARGUMENTS_CHANGED),
        (torch.ones(4, 1), Reason.ARGUMENTS_CHANGED),
    ],
    ids=["rows", "dtype", "shape"],
)
def test_an_entry_refuses_what_does_not_fit(x: torch.Tensor, reason: Reason) -> None:
    """The call runs eagerly, and the graph stays."""
    dispatcher = CudagraphDispatcher(double)
    dispatcher.register_graph(KEY, real_entry())
    assert torch.equal(dispatcher.dispatch(KEY, x), x * 2)
    assert dispatcher.stats.reasons == {reason: 1}
    assert dispatcher.has_graph(KEY)


def test_more_arguments_than_the_entry_takes_run_eagerly() -> None:
    """An argument that the graph would not see is not ignored."""
    dispatcher = CudagraphDispatcher(lambda x, y: x * y)
    dispatcher.register_graph(KEY, real_entry())
    assert torch.equal(dispatcher.dispatch(KEY, torch.ones(4, 3), 5), torch.full((4, 3), 5.0))
    assert dispatcher.stats.reasons == {Reason.ARGUMENTS_CHANGED: 1}


def test_an_evicted_entry_is_dropped() -> None:
    """Whoever owns the entry may release it; the call runs eagerly."""
    dispatcher = CudagraphDispatcher(double)
    entry = real_entry()
    dispatcher.register_graph(KEY, entry)
    entry.release()
    assert torch.equal(dispatcher.dispatch(KEY, torch.ones(4, 3)), torch.full((4, 3), 2.0))
    assert not dispatcher.has_graph(KEY)


def test_a_piecewise_entry_is_registered_as_such() -> None:
    """An entry knows its mode."""
    step = CUDAGraphWrapper(double, CUDAGraphMode.PIECEWISE, CUDAGraphOptions(verify=False))
    with torch.no_grad():
        step(torch.ones(4, 3), batch_descriptor=BatchDescriptor(4), cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
    entry = step.get_entry(BatchDescriptor(4))
    assert entry is not None
    dispatcher = CudagraphDispatcher(eager)
    dispatcher.register_graph(KEY, entry)
    assert dispatcher.get_entry(KEY, PIECEWISE) is entry
    assert dispatcher.get_entry(KEY) is None


def test_nothing_replays_inside_a_capture() -> None:
    """While the thread is captured the runner's operators are what belongs into that graph."""
    dispatcher = CudagraphDispatcher(eager)
    dispatcher.register_graph(KEY, graph())
    with get_backend("auto").watched():
        assert dispatcher.dispatch(KEY) == "eager"
    assert dispatcher.stats.reasons == {Reason.INSIDE_CAPTURE: 1}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((KEY, object()), r"graph must have a replay\(\) method"),
        ((KEY, graph(), None, EAGER), "mode must be CUDAGRAPH or PIECEWISE"),
        ((KEY, graph(), None, HYBRID), "mode must be CUDAGRAPH or PIECEWISE"),
    ],
)
def test_registering_checks_its_arguments(arguments: tuple[Any, ...], named: str) -> None:
    """What could not be replayed, or not chosen, is refused at once."""
    key, made, pointers, mode = (*arguments, None, None)[:4]
    with pytest.raises(ConfigError, match=named):
        CudagraphDispatcher(eager).register_graph(key, made, pointers, mode=mode or FULL)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((None,), "eager_runner must be callable, got None"),
        ((eager, None, 0), "max_cached_graphs must be an integer >= 1"),
    ],
)
def test_a_dispatcher_checks_its_arguments(arguments: tuple[Any, ...], named: str) -> None:
    """Without a runner or room there is no dispatcher."""
    with pytest.raises(ConfigError, match=named):
        CudagraphDispatcher(*arguments)


def test_threads_may_register_and_dispatch() -> None:
    """However they interleave, each call is answered and counted, and the limit holds."""
    dispatcher = CudagraphDispatcher(eager, max_cached_graphs=3)
    answers: list[Any] = []

    def work(offset: int) -> None:
        for step in range(60):
            key = DispatchKey(1 + (step + offset) % 5, 1)
            if step % 3 == 0:
                dispatcher.register_graph(key, graph())
            answers.append(dispatcher.dispatch(key))

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) <= {"graph", "eager"}
    assert (len(answers), dispatcher.stats.total) == (240, 240)
    assert dispatcher.num_graphs <= 3


def test_repr_is_a_status_line() -> None:
    """Graphs, limit and counts."""
    dispatcher = CudagraphDispatcher(eager, max_cached_graphs=8)
    dispatcher.register_graph(KEY, graph())
    dispatcher.dispatch(KEY)
    assert repr(dispatcher) == (
        "<CudagraphDispatcher 1 of 8 graphs, <DispatchStats 1 calls: 1 graph, 0 piecewise, 0 eager (0 fallbacks)>>"
    )
