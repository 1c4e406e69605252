"""``CUDAGraphWrapper``: one graph for each descriptor, in one mode; the adaptive one chooses which graphs
to keep. ``cudagraph_context`` has the instructions of wrappers, per thread and per task."""

import asyncio
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, Reason
from graphdispatch.engines import AdaptiveCUDAGraphWrapper, BatchDescriptor, CUDAGraphWrapper, cudagraph_context
from graphdispatch.errors import ConfigError

from ..helpers import double, in_threads

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


def full(rows: int) -> dict[str, Any]:
    """What a FULL step of ``rows`` tokens passes."""
    return {"batch_descriptor": BatchDescriptor(rows), "cudagraph_runtime_mode": FULL}


def serve(wrapper: CUDAGraphWrapper, *sizes: int) -> None:
    """Call the wrapper with batches of these sizes, and compare every answer with eager's."""
    for rows in sizes:
        x = torch.randn(rows, 3)
        assert torch.equal(wrapper(x, **full(rows)), x * 2)
    wrapper.check_integrity()


def kept(wrapper: CUDAGraphWrapper) -> set[int]:
    """The sizes that have a graph."""
    return {descriptor.num_tokens for descriptor in wrapper.get_cached_descriptors()}


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, AdaptiveCUDAGraphWrapper])
def test_one_capture_one_comparison_then_hits(kind: type[CUDAGraphWrapper]) -> None:
    """From the third call on; the graphs go with ``clear_cache``, and the next call captures anew."""
    wrapper = kind(double, max_cached_graphs=3)
    serve(wrapper, 4, 4)
    assert repr(wrapper) == f"<{kind.__name__} FULL function: 1 graphs, 0 hits, 1 misses>"
    serve(wrapper, 4)
    stats = wrapper.get_stats()
    assert (stats.captures, stats.verifications, stats.hits) == (1, 1, 1)
    assert (stats.hit_rate, stats.graph_ratio) == (2 / 3, 1 / 3)  # a call that compares finds a graph, too
    wrapper.clear_cache()
    assert wrapper.get_cached_descriptors() == []
    assert not isinstance(wrapper, AdaptiveCUDAGraphWrapper) or wrapper.get_hot_shapes() == []
    serve(wrapper, 4)
    assert stats.captures == 2


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"cudagraph_runtime_mode": FULL},
        {"batch_descriptor": BatchDescriptor(4)},
        full(4) | {"cudagraph_runtime_mode": NONE},
        full(4) | {"cudagraph_runtime_mode": PIECEWISE},
    ],
)
def test_other_steps_pass_through(how: dict[str, Any]) -> None:
    """Without a mode or a descriptor, and in another mode, the runnable is called and nothing is counted."""
    wrapper = CUDAGraphWrapper(double)
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(wrapper(x, **how), x * 2)
    assert (wrapper.get_stats().calls, wrapper.get_cached_descriptors()) == (0, [])


def test_nested_wrappers_act_in_their_mode() -> None:
    """A FULL wrapper around PIECEWISE ones: each captures in its own mode, and only there."""
    inner = CUDAGraphWrapper(lambda x: x + 1, PIECEWISE)
    outer = CUDAGraphWrapper(lambda x, **how: inner(x, **how) * 2, FULL)
    whole = CUDAGraphWrapper(lambda x: inner(x) * 2, FULL)
    x = torch.randn(4, 3)
    for _ in range(3):
        assert torch.equal(whole(x, **full(4)), (x + 1) * 2)
    assert inner.get_cached_descriptors() == []
    how = {"batch_descriptor": BatchDescriptor(4), "cudagraph_runtime_mode": PIECEWISE}
    for _ in range(3):
        assert torch.equal(inner(x, **how) * 2, (x + 1) * 2)
    assert inner.get_cached_descriptors() == [BatchDescriptor(4)]
    assert outer.get_cached_descriptors() == []
    assert whole.get_cached_descriptors() == [BatchDescriptor(4)]


@pytest.mark.parametrize(("least", "left"), [(3, {1, 3}), (0, {2, 3})])
def test_what_was_hardly_replayed_goes_first(least: int, left: set[int]) -> None:
    """A graph below ``min_replays_to_keep`` goes before one above that was used longer ago; with 0 the latter does."""
    wrapper = AdaptiveCUDAGraphWrapper(double, max_cached_graphs=2, min_replays_to_keep=least)
    serve(wrapper, *[1] * 5, *[2] * 4, 3, 3)
    assert kept(wrapper) == left


def test_hot_shapes_are_counted_with_and_without_a_graph() -> None:
    """Every call of a descriptor counts, also those of graphs that were evicted since."""
    wrapper = AdaptiveCUDAGraphWrapper(double, max_cached_graphs=1)
    serve(wrapper, *[4] * 7, *[2] * 9, 1)
    assert kept(wrapper) == {2}
    assert wrapper.get_hot_shapes() == [(BatchDescriptor(2), 9), (BatchDescriptor(4), 7), (BatchDescriptor(1), 1)]
    assert wrapper.get_hot_shapes(top_k=1) == [(BatchDescriptor(2), 9)]


def test_prewarm_captures_before_the_first_call() -> None:
    """Each shape has its graph, largest first, compared with a second batch; the first real batch is served."""
    wrapper = AdaptiveCUDAGraphWrapper(double)
    shapes = [BatchDescriptor(2), 4, BatchDescriptor(3, 3)]
    done = wrapper.prewarm(shapes, lambda descriptor: torch.zeros(descriptor.num_tokens, 3))
    assert done == [BatchDescriptor(4), BatchDescriptor(3, 3), BatchDescriptor(2)]
    assert wrapper.get_cached_descriptors() == done
    assert (wrapper.get_stats().captures, wrapper.get_stats().calls, wrapper.get_hot_shapes()) == (3, 0, [])
    serve(wrapper, 4, 4, 2, 2)
    assert (wrapper.get_stats().captures, wrapper.get_stats().hits) == (3, 4)
    assert wrapper.prewarm([4], lambda descriptor: torch.zeros(4, 3)) == [BatchDescriptor(4)]
    assert wrapper.get_stats().captures == 3


A, B = torch.zeros(4), torch.ones(4)


@pytest.mark.parametrize(
    ("dummy", "args", "kwargs"),
    [((A, B), (A, B), {}), ({"x": A, "y": B}, (), {"x": A, "y": B}), (((A,), {"y": B}), (A,), {"y": B})],
    ids=["positional", "keyword", "both"],
)
def test_prewarm_takes_arguments_by_position_by_name_or_both(dummy: Any, args: Any, kwargs: Any) -> None:
    """A tuple, a mapping, or both; a call of the same form finds the graph."""
    wrapper = AdaptiveCUDAGraphWrapper(lambda x, y: x - y)
    assert wrapper.prewarm([4], lambda descriptor: dummy) == [BatchDescriptor(4)]
    out = wrapper(*args, batch_descriptor=BatchDescriptor(4), cudagraph_runtime_mode=FULL, **kwargs)
    assert torch.equal(out, A - B)
    assert wrapper.get_stats().captures == 1


def test_a_call_that_began_before_clear_cache_leaves_no_graph_behind() -> None:
    """It captures for a descriptor whose next call begins anew; the graph goes when that comes."""
    wrapper = CUDAGraphWrapper(double)
    x, route = torch.randn(4, 3), wrapper._routes[BatchDescriptor(4)]
    wrapper.clear_cache()
    wrapper._server.serve(route, (x,), {})
    assert kept(wrapper) == {4}
    wrapper.freeze()
    serve(wrapper, 4)
    wrapper.sleep()
    assert (kept(wrapper), wrapper.memory_bytes) == (set(), 0)


def test_a_call_that_began_before_sleep_captures_nothing() -> None:
    """It waits for the lock while ``sleep`` releases, and then runs eagerly."""
    wrapper = CUDAGraphWrapper(double)
    serve(wrapper, 4)
    closed = wrapper._server.closed

    def looking(route: Any) -> Any:
        found = closed(route)
        wrapper.sleep()
        return found

    wrapper._server.closed = looking  # type: ignore[method-assign]
    serve(wrapper, 4)
    assert (kept(wrapper), wrapper.memory_bytes) == (set(), 0)
    assert wrapper.get_stats().reasons[Reason.ASLEEP] == 1


def test_wrapper_reads_the_context() -> None:
    """A wrapper that is called without instructions takes those of the context; an argument goes before it."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2)
    with cudagraph_context(FULL, BatchDescriptor(4)):
        wrapper(torch.randn(4, 3))
        wrapper(torch.randn(4, 3), cudagraph_runtime_mode=NONE, batch_descriptor=BatchDescriptor(2))
        wrapper(torch.randn(4, 3), batch_descriptor=BatchDescriptor(8))
    assert wrapper.get_cached_descriptors() == [BatchDescriptor(4), BatchDescriptor(8)]


def captured_under() -> list[BatchDescriptor]:
    """Under which descriptor a wrapper captures that is called without instructions; none where it passes through."""
    wrapper = CUDAGraphWrapper(lambda x: x * 2)
    wrapper(torch.ones(4, 3))
    return wrapper.get_cached_descriptors()


def test_contexts_nest_and_end() -> None:
    """The inner block counts, then the outer one; an exception leaves none, and another thread has its own."""
    seen: list[object] = []

    def within() -> None:
        with cudagraph_context(FULL, BatchDescriptor(4)):
            with cudagraph_context(NONE):
                assert captured_under() == []
            assert captured_under() == [BatchDescriptor(4)]
            seen.extend(in_threads(captured_under))
            raise KeyError

    with pytest.raises(KeyError):
        within()
    assert captured_under() == []
    assert seen == [[]]


def test_task_has_its_own() -> None:
    """Two asyncio tasks that take turns inside their contexts keep them apart."""

    async def one(rows: int, mine: asyncio.Event, other: asyncio.Event) -> object:
        with cudagraph_context(FULL, BatchDescriptor(rows)):
            mine.set()
            await other.wait()
            return captured_under()

    async def both() -> list[object]:
        a, b = asyncio.Event(), asyncio.Event()
        return list(await asyncio.gather(one(1, a, b), one(2, b, a)))

    assert asyncio.run(both()) == [[BatchDescriptor(1)], [BatchDescriptor(2)]]


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "two modes": ((CUDAGraphMode.FULL_AND_PIECEWISE, BatchDescriptor(4)), {}, "mode must be NONE, PIECEWISE or FULL"),
    "no descriptor": ((FULL,), {}, "descriptor must be a BatchDescriptor in mode FULL"),
} | {
    f"{rows} rows": ((FULL, BatchDescriptor(8)), {"rows": rows}, "rows must be how many of the descriptor's 8 tokens")
    for rows in (0, 9, True, 1.5)
}


@pytest.mark.parametrize("name", WRONG)
def test_instructions_are_checked(name: str) -> None:
    """One step runs in one mode, a mode with graphs comes with a descriptor, and the real rows are some of its."""
    args, kwargs, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        cudagraph_context(*args, **kwargs).__enter__()
