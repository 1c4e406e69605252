"""Which registered graph serves which key: padding, kinds that stay apart, and the line that explains it."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode, Reason
from graphdispatch.backends import get_backend
from graphdispatch.engines import (
    CudagraphDispatcher,
    CUDAGraphEntry,
    CudagraphKeyDispatcher,
    CUDAGraphRegistry,
    DefaultDispatchPolicy,
    DispatchKey,
    DispatchMode,
    EntryState,
    StreamDispatcher,
)
from graphdispatch.errors import ConfigError
from graphdispatch.testing import MockCUDAGraph

FULL, PIECEWISE = DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice the input."""
    return x * 2


def decode(rows: int, seq_len: int = 0) -> DispatchKey:
    """A batch of one token for each request."""
    return DispatchKey(rows, rows, seq_len)


def prefill(tokens: int, reqs: int = 1) -> DispatchKey:
    """A batch with prefill."""
    return DispatchKey(tokens, reqs, is_prefill=True)


def entry(size: int) -> CUDAGraphEntry:
    """A graph of ``double`` that was compared with eager for every number of rows, and on a second batch."""
    made = CUDAGraphRegistry().capture(size - 1, 1, double, inputs={"x": torch.randn(size - 1, 3)}, size=size)
    assert made.proof is not None
    assert made.proof.is_complete
    dispatcher = over((decode(size), made))
    for rows in range(1, size):
        dispatcher.dispatch(decode(rows), torch.randn(rows, 3))
    assert made.state is EntryState.VERIFIED
    assert made.compared == set(range(1, size))
    return made


def foreign() -> MockCUDAGraph:
    """A graph that somebody else captured."""
    made = MockCUDAGraph("theirs")
    made.capture_begin()
    made.capture_end()
    return made


@pytest.fixture(scope="module")
def four() -> CUDAGraphEntry:
    """A graph of four rows."""
    return entry(4)


@pytest.fixture(scope="module")
def eight() -> CUDAGraphEntry:
    """A graph of eight rows."""
    return entry(8)


def over(*registered: tuple[DispatchKey, Any]) -> CudagraphDispatcher:
    """A dispatcher with these graphs."""
    dispatcher = CudagraphDispatcher(double)
    for key, graph in registered:
        dispatcher.register_graph(key, graph)
    return dispatcher


def serving(dispatcher: CudagraphDispatcher, key: DispatchKey) -> tuple[DispatchKey | None, Reason]:
    """The key of the graph that is chosen, and the reason."""
    found, decision = dispatcher.workers[0].choose(key, dispatcher.policy)
    return (found.key if found is not None else None), decision.reason


def test_a_smaller_batch_is_padded_to_the_next_graph(four: CUDAGraphEntry, eight: CUDAGraphEntry) -> None:
    """The nearest graph that holds the batch serves it, with eager's answer for its rows."""
    dispatcher = over((decode(8), eight), (decode(4), four))
    for rows, size in ((1, 4), (3, 4), (4, 4), (5, 8), (8, 8)):
        x = torch.randn(rows, 3)
        assert torch.equal(dispatcher.dispatch(decode(rows), x), x * 2)
        reason = Reason.EXACT if rows == size else Reason.PADDED
        assert serving(dispatcher, decode(rows)) == (decode(size), reason)
    assert (dispatcher.stats.graph, dispatcher.stats.eager) == (5, 0)


KEYS = [decode(8), decode(8, 128), prefill(8, 4), DispatchKey(8, 4)]


@pytest.mark.parametrize(
    ("asked", "served"),
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
def test_a_graph_serves_only_its_kind(four: CUDAGraphEntry, asked: DispatchKey, served: DispatchKey | None) -> None:
    """Decode of one query length, prefill, and sequences of at most its length: each kind has its own graphs."""
    assert serving(over(*((key, four) for key in KEYS)), asked)[0] == served


def test_a_decode_graph_never_serves_prefill(four: CUDAGraphEntry) -> None:
    """Nor the other way round, whatever the sizes: the runner may take another way for them."""
    assert serving(over((decode(8), four)), prefill(8, 8)) == (None, Reason.NOT_CAPTURED)
    assert serving(over((prefill(8, 8), four)), decode(8)) == (None, Reason.NOT_CAPTURED)


def test_a_graph_captured_elsewhere_serves_only_its_key(four: CUDAGraphEntry) -> None:
    """Nobody would fill its inputs up or cut its outputs; a smaller batch goes past it."""
    dispatcher = over((decode(4), foreign()), (decode(8), four))
    assert serving(dispatcher, decode(4)) == (decode(4), Reason.EXACT)
    assert serving(dispatcher, decode(3)) == (decode(8), Reason.PADDED)


def test_a_graph_whose_padding_nobody_compared_does_not_pad() -> None:
    """A model that mixes rows would give wrong answers: its graph serves full batches alone."""

    def mixes(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)

    dispatcher = CudagraphDispatcher(mixes)
    dispatcher.register_graph(decode(4), CUDAGraphRegistry().capture(4, 1, mixes, {"x": (4, 3)}))
    for rows in (4, 4, 3, 4):
        x = torch.randn(rows, 3)
        assert torch.allclose(dispatcher.dispatch(decode(rows), x), mixes(x), atol=1e-6)
    assert dispatcher.stats.graph == 2
    assert dispatcher.stats.reasons == {Reason.VERIFIED_NOW: 1, Reason.VERIFICATION_FAILED: 1}


def test_a_graph_that_fails_on_a_padded_batch_is_dropped() -> None:
    """It is found by its own key, not by that of the batch."""
    dispatcher, evicted = CudagraphDispatcher(double), entry(4)
    dispatcher.register_graph(decode(4), evicted)
    evicted.release()
    assert torch.equal(dispatcher.dispatch(decode(3), torch.ones(3, 3)), torch.full((3, 3), 2.0))
    assert dispatcher.num_graphs == 0


def test_the_policy_chooses_among_padded_graphs(four: CUDAGraphEntry, eight: CUDAGraphEntry) -> None:
    """What the tables offer in each mode, exact or padded, is what the policy may take."""
    dispatcher = CudagraphDispatcher(double, DefaultDispatchPolicy(prefer_piecewise=True))
    dispatcher.register_graph(decode(8), eight)
    dispatcher.register_graph(decode(4), four, mode=PIECEWISE)
    found, _ = dispatcher.workers[0].choose(decode(3), dispatcher.policy)
    assert found is not None
    assert (found.key, found.mode) == (decode(4), PIECEWISE)
    dispatcher.disable_mode(PIECEWISE)
    assert serving(dispatcher, decode(3)) == (decode(8), Reason.PADDED)


def test_workers_pad_too(four: CUDAGraphEntry) -> None:
    """A worker serves a smaller batch by a registered graph, and says where."""
    workers = StreamDispatcher(double, num_streams=2)
    try:
        workers.register_graph(decode(4), four, worker=1)
        x = torch.randn(3, 3)
        assert torch.equal(workers.dispatch(decode(3), x), x * 2)
        assert workers.explain(decode(3), x) == "FULL graph, 3 -> 4 rows, 25.0 % padding, on worker 1"
        assert workers.explain(decode(9)).startswith("eager, 9 rows: the batch is larger")
        assert workers.stats.graph == 1
    finally:
        workers.close()


@pytest.mark.parametrize("key", [DispatchKey(0, 1), 8])
def test_a_graph_needs_a_key_that_a_batch_can_have(key: Any) -> None:
    """A graph for no tokens, or for something else than a key, could never be served."""
    with pytest.raises(ConfigError, match="key must be a DispatchKey with num_tokens >= 1"):
        CudagraphDispatcher(double).register_graph(key, foreign())


X3, X4 = torch.ones(3, 3), torch.ones(4, 3)


@pytest.mark.parametrize(
    ("key", "args", "line"),
    [
        (decode(4), (X4,), "FULL graph, 4 rows"),
        (decode(3), (X3,), "FULL graph, 3 -> 4 rows, 25.0 % padding"),
        (
            decode(4),
            (X4.double(),),
            "eager, 4 rows: input 'x' must have shape (4, 3), torch.float32 on cpu, got (4, 3)",
        ),
        (decode(5), (), "eager, 5 rows: the batch is larger than the largest graph for it (4); capture a larger size"),
        (DispatchKey(6, 3), (), "eager, 6 rows: no graph is captured for uniform decode of this query length"),
        (DispatchKey(5, 2), (), "eager, 5 rows: the batch is mixed, and only uniform decode batches have graphs"),
        (decode(4, 7), (), "eager, 4 rows: no graph is captured for this key"),
        (decode(0), (), "eager: the batch has no rows"),
        (prefill(8, 2), (), "FULL graph, 8 rows"),
        (prefill(6, 4), (), "eager, 6 rows: no graph is captured for this key"),
        (prefill(16), (X4,), "eager, 16 rows: a static argument, a weight or a captured variable has moved"),
    ],
)
def test_every_decision_explains_itself(four: CUDAGraphEntry, key: DispatchKey, args: Any, line: str) -> None:
    """One line for a hit and for each way to be none; nothing runs, nothing is counted."""
    dispatcher = over((decode(4), four), (prefill(8, 2), foreign()))
    dispatcher.register_graph(prefill(16), foreign(), [X3.data_ptr()])
    assert dispatcher.explain(key, *args).startswith(line)
    assert dispatcher.stats.total == 0


def test_the_line_names_the_policy_a_disabled_mode_and_a_capture(four: CUDAGraphEntry) -> None:
    """The reasons that lie with the dispatcher and not with the batch."""
    dispatcher = over((decode(4), four))
    dispatcher.policy = DefaultDispatchPolicy(5)
    assert dispatcher.explain(decode(4), X4) == "eager, 4 rows: the dispatch policy chose eager"
    dispatcher.policy = DefaultDispatchPolicy()
    with get_backend("auto").watched():
        assert dispatcher.explain(decode(4), X4).startswith("eager, 4 rows: another capture is recording")
    dispatcher.disable_mode(FULL)
    assert dispatcher.explain(decode(4), X4).startswith("eager, 4 rows: graphs are switched off")


SEQ_LENS = st.sampled_from([0, 0, 16, 64])
DISPATCH_KEYS = st.builds(DispatchKey, st.integers(1, 12), st.integers(1, 12), SEQ_LENS, st.booleans())


@given(keys=st.sets(DISPATCH_KEYS, max_size=8), asked=DISPATCH_KEYS)
def test_a_registered_graph_has_room_for_what_it_serves(
    four: CUDAGraphEntry, keys: set[DispatchKey], asked: DispatchKey
) -> None:
    """Enough tokens, requests and sequence length, and the same kind; a key of its own is served exactly."""
    served, reason = serving(over(*((key, four) for key in keys)), asked)
    if asked in keys:
        assert (served, reason) == (asked, Reason.EXACT)
    elif served is not None:
        assert served in keys
        assert served.is_prefill is asked.is_prefill
        assert served.num_tokens >= asked.num_tokens
        assert served.num_reqs >= min(asked.num_reqs, asked.num_tokens)
        assert served.max_seq_len >= asked.max_seq_len
        assert bool(served.max_seq_len) is bool(asked.max_seq_len)


@given(sizes=st.sets(st.integers(1, 16), min_size=1, max_size=6), rows=st.integers(1, 17))
def test_decode_is_decided_as_by_the_key_dispatcher(four: CUDAGraphEntry, sizes: set[int], rows: int) -> None:
    """The dispatcher that runs graphs and the one that only decides agree on mode, size and reason."""
    keys = CudagraphKeyDispatcher(capture_sizes=sorted(sizes), max_num_reqs=16)
    keys.initialize_cudagraph_keys(CUDAGraphMode.FULL)
    dispatcher = over(*((decode(size), four) for size in sizes))
    _, decision = dispatcher.workers[0].choose(decode(rows), dispatcher.policy)
    wanted = keys.decide(rows, rows, query_len=1)
    assert (decision.mode, decision.size, decision.reason) == (wanted.mode, wanted.size, wanted.reason)
