"""What a break may do on its way: call served callables again, and use streams of its own."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdispatch import Graphed, Reason, eager_break, graphed
from graphdispatch.backends import get_backend
from graphdispatch.backends.base import Stream
from graphdispatch.engines import CUDAGraphWrapper
from graphdispatch.errors import ReplayError

from ..helpers import AT_ONCE
from ..pieces import FULL, ONE, PIECEWISE, agrees, graph_of, host_scale, pieces
from ..spy import Spy


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    """Graphs are for inference."""
    with torch.no_grad():
        yield


def recursive(**options: Any) -> Graphed[..., Tensor]:
    """A served model whose break calls the served model for its first row, unless that is all."""

    @eager_break
    def part(h: Tensor) -> Tensor:
        return h + served(x=h[:1] * 3) if len(h) > 1 else h * 2

    fn = lambda x: part(x + 1) * (x + 1) + x  # noqa: E731
    served: Graphed[..., Tensor] = graphed(fn, dynamic={"x": 0}, sizes=(1, 4), mode="PIECEWISE", **options)
    served.prewarm(x=torch.linspace(-1, 1, 12).view(4, 3))
    return served


def recursive_eagerly(x: Tensor) -> Tensor:
    """The right answer, without graphs."""
    h = x + 1
    return (h + recursive_eagerly(h[:1] * 3) if len(x) > 1 else h * 2) * h + x


# Calls of what is being replayed.


@pytest.mark.parametrize("strict", [False, True])
def test_a_break_may_call_what_it_is_a_part_of(strict: bool) -> None:
    """The inner call runs eagerly, since a replay would overwrite what the outer one goes on to read; both are right,
    and ``strict`` does not mind."""
    served = recursive(strict=strict)
    for rows in (4, 3, 1, 2, 4):
        x = torch.randn(rows, 3)
        wanted = recursive_eagerly(x)
        torch.testing.assert_close(served(x=x), wanted, rtol=0, atol=0 if rows in (1, 4) else 1e-6)
        assert served.last_decision is not None
        assert served.last_decision.reason.is_graph
    assert served.stats.reasons[Reason.INSIDE_REPLAY] == 4
    assert served.stats.hits == 5


def test_an_inner_call_waits_for_no_one() -> None:
    """A break runs with the pool's lock held, so that its calls must not want the lock under which graphs are made:
    whoever has that one may be waiting for the pool."""
    served = recursive()
    x = torch.randn(4, 3)
    results: list[Tensor] = []

    def serve() -> None:
        with torch.no_grad():
            results.append(served(x=x))

    with served._graphs.lock:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        thread.join(60)
    assert torch.equal(results[0], recursive_eagerly(x))


def test_a_call_from_another_thread_waits_its_turn() -> None:
    """A call that comes from elsewhere while a break runs is served by a graph, after the break's replay."""
    started: list[threading.Thread] = []
    other: list[tuple[Tensor, Reason]] = []
    y = torch.randn(4, 3)

    def elsewhere() -> None:
        with torch.no_grad():
            result = served(x=y)
        assert served.last_decision is not None
        other.append((result, served.last_decision.reason))

    @eager_break
    def part(x: Tensor) -> Tensor:
        if is_armed and not started:
            started.append(threading.Thread(target=elsewhere))
            started[0].start()
        return x * 2

    is_armed = False
    served = pieces(lambda x: part(x + 1) - x)
    is_armed = True
    x = torch.randn(4, 3)
    assert torch.equal(served(x=x), (x + 1) * 2 - x)
    started[0].join()
    ((result, reason),) = other
    assert torch.equal(result, (y + 1) * 2 - y)
    assert reason is Reason.EXACT


def test_only_the_thread_of_a_replay_is_inside_of_it() -> None:
    """A break's own thread is, and no other, also while the break runs."""
    found = Spy()

    @eager_break
    def part(x: Tensor) -> Tensor:
        ask = lambda: found.append(pool.is_inside_replay())  # noqa: E731
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        ask()
        return x * 2

    pool = get_backend("cpu").make_pool()
    served = pieces(lambda x: part(x + 1))
    pool = served.entries[0].pool
    found.clear()
    served(x=torch.randn(4, 3))
    assert found == [False, True]
    assert not pool.is_inside_replay()


def nested(pool_is_shared: bool) -> tuple[CUDAGraphWrapper, CUDAGraphWrapper]:
    """A PIECEWISE wrapper, and the FULL one that its break calls."""
    backend = get_backend("cpu")
    pools = [backend.make_pool()] * 2 if pool_is_shared else [backend.make_pool(), backend.make_pool()]
    inner = CUDAGraphWrapper(lambda x: (x * 3).sin() + x, FULL, backend=backend, pool=pools[0])

    @eager_break
    def part(x: Tensor) -> Tensor:
        return inner(x, batch_descriptor=ONE, cudagraph_runtime_mode=FULL) * 1  # type: ignore[no-any-return]

    outer = CUDAGraphWrapper(lambda x: part(x + 1) * (x - 1), PIECEWISE, backend=backend, pool=pools[1])
    for _ in range(3):
        x = torch.randn(4, 3)
        inner(x, batch_descriptor=ONE, cudagraph_runtime_mode=FULL)
        outer(x, batch_descriptor=ONE, cudagraph_runtime_mode=PIECEWISE)
    return outer, inner


@pytest.mark.parametrize("pool_is_shared", [False, True])
def test_a_break_may_call_another_graph(pool_is_shared: bool) -> None:
    """It is replayed where it has memory of its own, and runs eagerly where it shares the outer one's."""
    outer, inner = nested(pool_is_shared)
    hits, outer_hits = inner.get_stats().hits, outer.get_stats().hits
    misses = inner.get_stats().reasons[Reason.INSIDE_REPLAY]
    for _ in range(3):
        x = torch.randn(4, 3)
        h = x + 1
        got = outer(x, batch_descriptor=ONE, cudagraph_runtime_mode=PIECEWISE)
        assert torch.equal(got, ((h * 3).sin() + h) * (x - 1))
    assert inner.get_stats().hits == hits + (0 if pool_is_shared else 3)
    assert inner.get_stats().reasons[Reason.INSIDE_REPLAY] == (misses + 3 if pool_is_shared else 0)
    assert outer.get_stats().hits == outer_hits + 3


@pytest.mark.parametrize("as_is", [False, True])
def test_an_entry_refuses_a_replay_within_its_own(as_is: bool) -> None:
    """Where nothing can run eagerly instead it is an error; the outer call comes back from it with eager's answer."""
    errors: list[ReplayError] = []

    @eager_break
    def part(x: Tensor) -> Tensor:
        if is_armed and served.stats.hits and not errors:
            try:
                served.entries[0].replay(None if as_is else {"x": x})
            except ReplayError as error:
                errors.append(error)
                raise
        return x * 2

    is_armed = False
    served = pieces(lambda x: part(x + 1) - x)
    agrees(served, times=1)
    is_armed = True
    x = torch.randn(4, 3)
    assert torch.equal(served(x=x), (x + 1) * 2 - x)
    assert "during the replay of a graph that shares memory with this one" in str(errors[0])


def test_after_a_break_that_raised_calls_are_served_again() -> None:
    """The replay that the exception ended is over, also for whoever asks whether one is under way."""
    blown = [False]

    @eager_break
    def fuse(x: Tensor) -> Tensor:
        if blown[0]:
            raise ValueError("the fuse is blown")
        return x * 2

    served = pieces(lambda x: fuse(x + 1))
    blown[0] = True
    with pytest.raises(ValueError, match="the fuse is blown"):
        served(x=torch.randn(4, 3))
    blown[0] = False
    agrees(served)


# Streams.


@pytest.fixture
def side() -> Iterator[Stream]:
    """A stream with a thread of its own."""
    stream = get_backend("cpu").make_stream()
    yield stream
    stream.close()


def overlapped(side: Stream, attention: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A break that gives attention to a side stream, works itself meanwhile, and joins before it ends."""
    backend = get_backend("cpu")

    @eager_break
    def part(x: Tensor) -> Tensor:
        attended: list[Tensor] = []
        side.wait_stream(backend.current_stream())
        side.submit(lambda: attended.append(attention(x)))
        own = x * 2
        backend.current_stream().wait_stream(side)
        return own + attended[0]

    return lambda x: part(x + 1) * 2 - x


def test_a_break_may_overlap_streams(side: Stream) -> None:
    """Attention on a side stream, which reads values back, between two graphs: eager's answer, in every size."""
    served = pieces(overlapped(side, lambda x: x.sin() * float(x[0, 0])), sizes=(1, 4))
    assert [len(entry.graph.breaks) for entry in served.entries] == [1, 1]  # type: ignore[attr-defined]
    for rows in (4, 1, 3):
        agrees(served, rows=rows)


def test_what_a_side_stream_returns_is_served(side: Stream) -> None:
    """The very tensor that the side stream made may be the break's result."""

    @eager_break
    def part(x: Tensor) -> Tensor:
        made: list[Tensor] = []
        side.submit(lambda: made.append(host_scale(x)))
        side.synchronize()
        return made[0]

    agrees(pieces(lambda x: part(x + 1) * 2))


def test_what_a_side_stream_writes_is_written_once(side: Stream) -> None:
    """A call that captures or verifies leaves the effects of one run, those of its side streams included."""
    cache = torch.zeros(3)

    def attention(x: Tensor) -> Tensor:
        cache.add_(x[0])
        return x + cache

    fn = overlapped(side, attention)
    served = graphed(fn, dynamic={"x": 0}, sizes=(4,), mode="PIECEWISE", options=AT_ONCE)
    twin = torch.zeros(3)
    for _ in range(5):
        x = torch.randn(4, 3)
        got = served(x=x)
        h = x + 1
        twin += h[0]
        assert torch.equal(cache, twin)
        assert torch.equal(got, (h * 2 + (h + twin)) * 2 - x)
    assert served.stats.hits == 3
    assert len(graph_of(served).breaks) == 1


def test_an_error_on_a_side_stream_is_the_break_s(side: Stream) -> None:
    """It comes out where the break joins, passes through, and the next call is served."""
    blown = [False]

    def attention(x: Tensor) -> Tensor:
        if blown[0]:
            raise ValueError("no attention")
        return x

    served = pieces(overlapped(side, attention))
    blown[0] = True
    with pytest.raises(ValueError, match="no attention"):
        served(x=torch.randn(4, 3))
    with pytest.raises(ValueError, match="no attention"):
        side.synchronize()
    blown[0] = False
    agrees(served)
