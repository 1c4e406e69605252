"""``CudagraphDispatcher``: runs each key by a registered graph, padded if need be, or eagerly, and counts why."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode, Reason
from graphdispatch.backends import get_backend
from graphdispatch.engines import (
    BatchDescriptor,
    CudagraphDispatcher,
    CUDAGraphEntry,
    CudagraphKeyDispatcher,
    CUDAGraphRegistry,
    CUDAGraphWrapper,
    DefaultDispatchPolicy,
    DispatchKey,
    DispatchMode,
    DispatchPolicy,
    EntryState,
)
from graphdispatch.errors import ConfigError
from graphdispatch.testing import MockCUDAGraph

from ..helpers import double, scripted

EAGER, FULL, PIECEWISE, HYBRID = DispatchMode.EAGER, DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE, DispatchMode.HYBRID
KEY, OTHER = DispatchKey(4, 4), DispatchKey(8, 8)


def eager(*args: Any, **kwargs: Any) -> str:
    """The runner that is always right."""
    return "eager"


def entry(rows: int = 4, fn: Any = double) -> CUDAGraphEntry:
    """A captured graph."""
    return CUDAGraphRegistry().capture(rows, 1, fn, {"x": (rows, 3)})


def over(*registered: tuple[DispatchKey, Any], runner: Any = double, **options: Any) -> CudagraphDispatcher:
    """A dispatcher with these graphs."""
    dispatcher = CudagraphDispatcher(runner, **options)
    for key, graph in registered:
        dispatcher.register_graph(key, graph)
    return dispatcher


def both(policy: DispatchPolicy | None = None) -> CudagraphDispatcher:
    """A dispatcher with a full and a piecewise graph for one key."""
    dispatcher = over((KEY, scripted("full")), runner=eager, policy=policy)
    dispatcher.register_graph(KEY, scripted("piecewise"), mode=PIECEWISE)
    return dispatcher


def serve(dispatcher: Any, key: DispatchKey = KEY, times: int = 1) -> None:
    """Calls that get the answer of ``double``."""
    for _ in range(times):
        x = torch.randn(key.num_tokens, 3)
        assert torch.equal(dispatcher.dispatch(key, x), x * 2)


class Chooses(DispatchPolicy):
    """Wants graphs for decode batches alone, always in one mode, and notes what it could have had."""

    def __init__(self, mode: DispatchMode) -> None:
        self.mode = mode
        self.offered: list[set[DispatchMode]] = []

    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Whether there is one."""
        return graph_available and not key.is_prefill

    def select_mode(self, key: DispatchKey, available_modes: Collection[DispatchMode]) -> DispatchMode:
        """The one mode."""
        self.offered.append(set(available_modes))
        return self.mode


def test_a_registered_key_is_replayed_and_another_runs_eagerly() -> None:
    """The graph's outputs are returned without the runner, which gets the arguments of other keys as they are."""
    graph = scripted()
    dispatcher = over((KEY, graph), runner=lambda *args, **kwargs: (args, kwargs))
    found = dispatcher.get_entry(KEY)
    before = found.last_used
    assert dispatcher.dispatch(KEY, 1) == "graph"
    assert graph.replays == 1
    assert (found.replay_count, found.last_used > before, found.mode) == (1, True, CUDAGraphMode.FULL)
    assert found.label == "4"
    assert repr(dispatcher).startswith("<CudagraphDispatcher 1 of ")
    assert dispatcher.dispatch(DispatchKey(4, 3), 1, b=2) == ((1,), {"b": 2})
    assert (dispatcher.stats.reasons, dispatcher.stats.fallbacks) == ({Reason.NOT_CAPTURED: 1}, 1)
    assert (dispatcher.stats.graph, dispatcher.stats.graph_ratio) == (1, 0.5)


def test_has_and_get_know_what_was_registered() -> None:
    """The very graph comes back; a full one goes before a piecewise one, and a newer one before an older one."""
    dispatcher = CudagraphDispatcher(eager)
    piecewise, full = scripted(), scripted()
    assert (dispatcher.has_graph(KEY), dispatcher.get_graph(KEY), dispatcher.get_entry(KEY)) == (False, None, None)
    dispatcher.register_graph(KEY, piecewise, mode=PIECEWISE)
    assert dispatcher.get_graph(KEY) is piecewise
    for graph in (scripted(), full):
        dispatcher.register_graph(KEY, graph)
        assert dispatcher.get_graph(KEY) is graph
    assert (dispatcher.has_graph(KEY), dispatcher.num_graphs) == (True, 2)


def test_a_disabled_mode_is_not_used() -> None:
    """Another mode of the key serves, or eager, which is no fallback; graphs serve again once it is enabled."""
    dispatcher = both()
    dispatcher.disable_mode(FULL)
    assert dispatcher.dispatch(KEY) == "piecewise"
    assert dispatcher.stats.piecewise == 1
    dispatcher.disable_mode(PIECEWISE)
    assert dispatcher.dispatch(KEY) == "eager"
    assert (dispatcher.stats.reasons, dispatcher.stats.fallbacks) == ({Reason.DISABLED: 1}, 0)
    dispatcher.enable_mode(FULL)
    assert dispatcher.dispatch(KEY) == "full"
    dispatcher.enable_mode(PIECEWISE)
    assert dispatcher.enabled_modes == frozenset(DispatchMode)


@pytest.mark.parametrize(("mode", "answer"), [(FULL, "full"), (PIECEWISE, "piecewise"), (EAGER, "eager")])
def test_in_hybrid_mode_the_policy_chooses(mode: DispatchMode, answer: str) -> None:
    """It picks among the modes that could serve the key, eager always among them; that is no fallback, and counted.

    Without it a full graph is the only kind that it is offered.
    """
    policy = Chooses(mode)
    dispatcher = both(policy)
    assert dispatcher.dispatch(KEY) == answer
    assert policy.offered == [{FULL, PIECEWISE, EAGER}]
    assert (dispatcher.stats.reasons[Reason.POLICY], dispatcher.stats.fallbacks) == (answer == "eager", 0)
    dispatcher.disable_mode(HYBRID)
    assert dispatcher.dispatch(KEY) == ("full" if mode is FULL else "eager")
    assert policy.offered[1:] == [{FULL, EAGER}]
    only_full = over((KEY, scripted("full")), runner=eager, policy=policy)
    assert only_full.dispatch(KEY) == ("full" if mode is FULL else "eager")  # a mode that was not offered is eager


@pytest.mark.parametrize("hybrid", [True, False])
def test_the_policy_decides_whether_graphs_serve_at_all(hybrid: bool) -> None:
    """``should_use_graph`` has its say, whatever ``select_mode`` would answer, and the default one has limits.

    So it is where ``HYBRID`` is disabled, and the policy does not choose the kind of graph.
    """
    prefill = KEY._replace(is_prefill=True)
    dispatcher = over((KEY, scripted()), (prefill, scripted()), runner=eager, policy=Chooses(FULL))
    if not hybrid:
        dispatcher.disable_mode(HYBRID)
    assert [dispatcher.dispatch(key) for key in (KEY, prefill)] == ["graph", "eager"]
    dispatcher.policy = DefaultDispatchPolicy(max_tokens_for_graph=3)
    assert dispatcher.dispatch(KEY) == "eager"
    assert dispatcher.stats.reasons == {Reason.POLICY: 2}
    dispatcher.policy = DefaultDispatchPolicy()
    assert dispatcher.dispatch(KEY) == "graph"


def test_other_addresses_run_eagerly() -> None:
    """A graph reads where it was captured to read: tensors are compared in nests, too, in the order of the call."""
    x, y = torch.zeros(3), torch.zeros(3)
    dispatcher = CudagraphDispatcher(eager)
    dispatcher.register_graph(KEY, scripted(), (x.data_ptr(), y.data_ptr()))
    assert dispatcher.dispatch(KEY, [x], 7, y={"y": y}) == "graph"
    assert [dispatcher.dispatch(KEY, *call) for call in ((y, x), (x,), ())] == ["eager"] * 3
    assert dispatcher.stats.reasons == {Reason.ADDRESS_CHANGED: 3}


@pytest.mark.parametrize("graph", [scripted(fail_replay_at=1), MockCUDAGraph()], ids=["refuses", "never captured"])
def test_a_graph_that_fails_is_dropped(graph: MockCUDAGraph) -> None:
    """A foreign graph that says that nothing has happened: the call runs eagerly, and the graph is not tried again."""
    dispatcher = over((KEY, graph), runner=eager)
    assert [dispatcher.dispatch(KEY), dispatcher.dispatch(KEY)] == ["eager", "eager"]
    assert not dispatcher.has_graph(KEY)
    assert dispatcher.stats.reasons == {Reason.REPLAY_FAILED: 1, Reason.NOT_CAPTURED: 1}


def test_positional_arguments_are_those_of_the_runner() -> None:
    """An entry that was captured without an argument in the middle does not take the next one for it."""

    def fn(a: torch.Tensor, b: torch.Tensor | None = None, c: torch.Tensor | None = None) -> torch.Tensor:
        return a * 10 if c is None else a + c

    made = CUDAGraphRegistry().capture(4, 1, fn, {"a": (4, 3), "c": (4, 3)})
    dispatcher = over((KEY, made), runner=fn)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    assert torch.equal(dispatcher.dispatch(KEY, x, y), x * 10)
    assert dispatcher.stats.reasons == {Reason.ARGUMENTS_CHANGED: 1}
    assert torch.equal(dispatcher.dispatch(KEY, x, c=y), x + y)
    assert torch.equal(dispatcher.dispatch(KEY, y, c=x), x + y)
    assert dispatcher.stats.graph


def test_the_buffers_of_another_owners_graph_are_left_to_it() -> None:
    """A capture of the dispatcher's own neither shares them, since another pool's lock guards them, nor frees them."""
    wrapper, of_four = CUDAGraphWrapper(double), BatchDescriptor(4)
    for _ in range(3):
        wrapper(torch.randn(4, 3), batch_descriptor=of_four, cudagraph_runtime_mode=CUDAGraphMode.FULL)
    made = wrapper.get_entry(of_four)
    dispatcher = over((KEY, made))
    serve(dispatcher)
    dispatcher.capture(OTHER, (torch.randn(4, 3),))
    own = dispatcher.get_entry(OTHER)
    assert own.inputs is not made.inputs
    dispatcher.clear_cache()
    x = torch.ones(4, 3)
    assert torch.equal(wrapper(x, batch_descriptor=of_four, cudagraph_runtime_mode=CUDAGraphMode.FULL), 2 * x)
    assert made.replay_count == 3


def decode(rows: int, seq_len: int = 0) -> DispatchKey:
    """A batch of one token for each request."""
    return DispatchKey(rows, rows, seq_len)


def prefill(tokens: int, reqs: int = 1) -> DispatchKey:
    """A batch with prefill."""
    return DispatchKey(tokens, reqs, is_prefill=True)


def compared(size: int) -> CUDAGraphEntry:
    """A graph of ``double`` that was compared with eager for every number of rows, and on a second batch."""
    made = CUDAGraphRegistry().capture(size - 1, 1, double, inputs={"x": torch.randn(size - 1, 3)}, size=size)
    dispatcher = over((decode(size), made))
    for rows in range(1, size):
        serve(dispatcher, decode(rows))
    assert made.state is EntryState.VERIFIED
    assert all(made.licence.may_hit(made, rows) for rows in range(1, size))
    return made


@pytest.fixture(scope="module")
def four() -> CUDAGraphEntry:
    """A graph of four rows."""
    return compared(4)


def serving(dispatcher: CudagraphDispatcher, key: DispatchKey) -> tuple[DispatchKey | None, Reason]:
    """The key of the graph that is chosen, and the reason."""
    _, found, decision, _ = dispatcher.choose(key)
    return (found.key if found is not None else None), decision.reason


KEYS = [decode(8), decode(8, 128), prefill(8, 4), DispatchKey(8, 4)]


@pytest.mark.parametrize(
    ("key", "served"),
    [
        (decode(5), decode(8)),
        (decode(5, 100), decode(8, 128)),
        (decode(5, 128), decode(8, 128)),
        (decode(5, 129), None),
        (prefill(5, 1), prefill(8, 4)),
        (prefill(5, 4), prefill(8, 4)),
        (prefill(6, 5), None),
        (DispatchKey(6, 3), DispatchKey(8, 4)),
        (DispatchKey(6, 2), None),
        (DispatchKey(5, 2), None),
        (decode(9), None),
        (prefill(9), None),
    ],
)
def test_a_graph_serves_only_its_kind(four: CUDAGraphEntry, key: DispatchKey, served: DispatchKey | None) -> None:
    """Decode of one query length, prefill, and sequences of at most its length: each has its own graphs."""
    assert serving(over(*((one, four) for one in KEYS)), key)[0] == served


def test_the_policy_chooses_among_padded_graphs(four: CUDAGraphEntry) -> None:
    """What the tables offer in each mode, exact or padded, is what the policy may take."""
    dispatcher = over((decode(8), compared(8)), policy=DefaultDispatchPolicy(prefer_piecewise=True))
    dispatcher.register_graph(decode(4), four, mode=PIECEWISE)
    found = dispatcher.choose(decode(3)).found
    assert (found.key, found.mode) == (decode(4), PIECEWISE)
    dispatcher.disable_mode(PIECEWISE)
    assert serving(dispatcher, decode(3)) == (decode(8), Reason.PADDED)


X3, X4 = torch.ones(3, 3), torch.ones(4, 3)


@pytest.mark.parametrize(
    ("key", "args", "line"),
    [
        (decode(4), (X4,), "FULL graph, 4 rows"),
        (decode(3), (X3,), "FULL graph, 3 -> 4 rows, 25.0 % padding"),
        (
            decode(4),
            (X4.double(),),
            "eager, 4 rows: input 'x' must be a tensor of dtype torch.float32, got torch.float64",
        ),
        (decode(5), (), "eager, 5 rows: the batch is larger than the largest graph for it (4); capture a larger size"),
        (DispatchKey(6, 3), (), "eager, 6 rows: no graph is captured for uniform decode of this query length"),
        (DispatchKey(5, 2), (), "eager, 5 rows: the batch is mixed, and only uniform decode batches have graphs"),
        (decode(4, 7), (), "eager, 4 rows: no graph is captured for this key"),
        (decode(0), (), "eager: the batch has no rows"),
        (prefill(8, 2), (), "FULL graph, 8 rows"),
        (prefill(4, 2), (X4,), "eager, 4 rows: this call compares the graph with eager"),
        (prefill(6, 4), (), "eager, 6 rows: no graph is captured for this key"),
        (prefill(16), (X4,), "eager, 16 rows: a static argument, a weight or a captured variable has moved"),
    ],
)
def test_every_decision_explains_itself(four: CUDAGraphEntry, key: DispatchKey, args: Any, line: str) -> None:
    """One line for a hit and for each way to be none; nothing runs, nothing is counted."""
    dispatcher = over((decode(4), four), (prefill(8, 2), scripted()))
    dispatcher.register_graph(prefill(16), scripted(), [X3.data_ptr()])
    dispatcher.capture(prefill(4, 2), (torch.randn(4, 3),))
    assert dispatcher.explain(key, *args).startswith(line)
    assert dispatcher.stats.total == 0


def test_the_line_names_the_policy_a_disabled_mode_and_a_capture(four: CUDAGraphEntry) -> None:
    """The reasons that lie with the dispatcher and not with the batch."""
    dispatcher = over((decode(4), four), policy=DefaultDispatchPolicy(5))
    assert dispatcher.explain(decode(4), X4) == "eager, 4 rows: the dispatch policy chose eager"
    dispatcher.policy = DefaultDispatchPolicy()
    with get_backend("auto").watched():
        assert dispatcher.explain(decode(4), X4).startswith("eager, 4 rows: another capture is recording")
    dispatcher.disable_mode(FULL)
    assert dispatcher.explain(decode(4), X4).startswith("eager, 4 rows: graphs are switched off")


@given(sizes=st.sets(st.integers(1, 16), min_size=1, max_size=6), rows=st.integers(1, 17))
def test_decode_is_decided_as_by_the_key_dispatcher(four: CUDAGraphEntry, sizes: set[int], rows: int) -> None:
    """The dispatcher that runs graphs and the one that only decides agree on mode, size and reason."""
    keys = CudagraphKeyDispatcher(capture_sizes=sorted(sizes), max_num_reqs=16)
    keys.initialize_cudagraph_keys(CUDAGraphMode.FULL)
    dispatcher = over(*((decode(size), four) for size in sizes))
    decision = dispatcher.choose(decode(rows)).decision
    wanted = keys.decide(rows, rows, query_len=1)
    assert (decision.mode, decision.size, decision.reason) == (wanted.mode, wanted.size, wanted.reason)


def test_an_entry_of_two_keys_goes_from_one_alone() -> None:
    """Another graph for one of its keys leaves it to serve the other."""
    twice, short, long = entry(), DispatchKey(4, 4, 64), DispatchKey(4, 4, 128)
    dispatcher = over((short, twice), (long, twice))
    for key in (short, long):
        serve(dispatcher, key, 2)
    dispatcher.register_graph(short, entry())
    before = dispatcher.stats.graph
    serve(dispatcher, long, 2)
    assert dispatcher.stats.graph == before + 2
    assert dispatcher.num_graphs == 2


def test_registering_over_and_over_leaves_nothing_behind() -> None:
    """One key, one graph, one group, however often it is registered and called; a released entry is refused."""
    dispatcher, again = CudagraphDispatcher(double), entry()
    for _ in range(20):
        dispatcher.register_graph(KEY, again)
        serve(dispatcher)
    worker = dispatcher.workers[0]
    assert (dispatcher.num_graphs, len(worker.server.graphs.groups)) == (1, 1)
    again.release()
    with pytest.raises(ConfigError, match="graph must not be released"):
        dispatcher.register_graph(KEY, again)


@pytest.mark.parametrize("given", [[torch.zeros(2)], ["0x10"], "16", 16], ids=["tensors", "texts", "a text", "one"])
def test_addresses_that_are_none_are_refused(given: Any) -> None:
    """At once, and not at the first call."""
    with pytest.raises(ConfigError, match="input_ptrs must be addresses"):
        CudagraphDispatcher(double).register_graph(KEY, scripted(), input_ptrs=given)


def test_an_entry_of_another_function_is_compared_with_the_runner() -> None:
    """Whatever code the runner is: a graph that answers otherwise serves nothing."""
    dispatcher = over((KEY, entry()), runner=lambda x: x * 2 + 1)
    for x in torch.randn(4, 4, 3):
        assert torch.equal(dispatcher.dispatch(KEY, x), x * 2 + 1)
    assert dispatcher.stats.reasons[Reason.VERIFICATION_FAILED]


def test_the_least_recently_used_makes_room() -> None:
    """At capacity the graph that was longest not replayed goes; one that replaces another needs no room."""
    keys = [DispatchKey(tokens, 1) for tokens in (1, 2, 3)]
    dispatcher = over(*((key, scripted()) for key in keys[:2]), runner=eager, max_cached_graphs=2)
    dispatcher.register_graph(keys[0], scripted("newer"))
    assert (dispatcher.num_graphs, dispatcher.dispatch(keys[0])) == (2, "newer")
    dispatcher.register_graph(keys[2], scripted())
    assert [dispatcher.has_graph(key) for key in keys] == [True, False, True]
