"""``AdaptiveCUDAGraphWrapper``: all of the wrapper, hot shapes, prewarming, and eviction by use and bytes."""

from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch import CUDAGraphMode, CUDAGraphOptions, MemoryBudget, Reason
from graphdispatch.engines import AdaptiveCUDAGraphWrapper, BatchDescriptor, CUDAGraphWrapper
from graphdispatch.errors import ConfigError

FULL = CUDAGraphMode.FULL


def double(x: torch.Tensor) -> torch.Tensor:
    """The runnable of most tests."""
    return x * 2


def make(**options: Any) -> AdaptiveCUDAGraphWrapper:
    """A wrapper around ``double``."""
    return AdaptiveCUDAGraphWrapper(double, **options)


def serve(wrapper: CUDAGraphWrapper, *sizes: int) -> None:
    """Call the wrapper with batches of these sizes, and compare every answer with eager's."""
    for rows in sizes:
        x = torch.randn(rows, 3)
        served = wrapper(x, batch_descriptor=BatchDescriptor(rows), cudagraph_runtime_mode=FULL)
        assert torch.equal(served, x * 2)
    wrapper.check_integrity()


def kept(wrapper: CUDAGraphWrapper) -> set[int]:
    """The sizes that have a graph."""
    return {descriptor.num_tokens for descriptor in wrapper.get_cached_descriptors()}


def test_it_is_a_wrapper() -> None:
    """It captures at the first call, replays, unwraps and counts as ``CUDAGraphWrapper`` does; and is public."""
    wrapper = gd.AdaptiveCUDAGraphWrapper(double, FULL, CUDAGraphOptions(), 100, 3)
    serve(wrapper, 4, 4, 4)
    stats = wrapper.get_stats()
    assert (stats.captures, stats.hits, stats.verifications) == (1, 1, 1)
    assert wrapper.unwrap() is double
    assert torch.equal(wrapper(torch.ones(2)), torch.full((2,), 2.0))
    wrapper.clear_cache()
    assert (wrapper.get_cached_descriptors(), wrapper.get_hot_shapes()) == ([], [])


def test_what_was_hardly_replayed_goes_first() -> None:
    """A graph below ``min_replays_to_keep`` goes before one above, be it ever so expensive to capture."""
    wrapper = make(max_cached_graphs=2, min_replays_to_keep=3)
    serve(wrapper, *[1] * 6, *[2] * 4)
    costly = wrapper.get_entry(BatchDescriptor(2))
    assert costly is not None
    costly.capture_time_ms = 1e9
    serve(wrapper, *[1] * 2, 3, 3)
    assert kept(wrapper) == {1, 3}


def test_with_nothing_to_keep_worth_alone_decides() -> None:
    """With ``min_replays_to_keep=0`` and equal use, what was used least recently goes."""
    wrapper = make(max_cached_graphs=2, min_replays_to_keep=0)
    serve(wrapper, 1, 2, 3, 3)
    assert kept(wrapper) == {2, 3}


def test_what_comes_once_displaces_nothing() -> None:
    """Without room, a descriptor runs eagerly at its first call, with a reason."""
    wrapper = make(max_cached_graphs=2)
    serve(wrapper, *[1, 2] * 5, *range(3, 30))
    assert kept(wrapper) == {1, 2}
    assert wrapper.get_stats().evictions == 0
    assert wrapper.get_stats().reasons[Reason.FIRST_SIGHTING] == 27


def test_a_cycle_does_not_thrash() -> None:
    """Of more descriptors in turn than there is room for, some keep their graphs for good."""
    wrapper = make(max_cached_graphs=3)
    serve(wrapper, *[1, 2, 3, 4, 5] * 10)
    stats = wrapper.get_stats()
    assert (stats.captures, stats.evictions) == (3, 0)
    assert stats.hits == 3 * (10 - 2)


def test_new_habits_displace_old_ones() -> None:
    """Descriptors that come from now on get the room of those that do not."""
    wrapper = make(max_cached_graphs=2)
    serve(wrapper, *[1, 2] * 10, *[7, 8] * 5)
    assert kept(wrapper) == {7, 8}


def test_bytes_are_limited() -> None:
    """Static inputs and outputs count, and what is out of use goes for them."""
    wrapper = make(options=CUDAGraphOptions(memory_budget_bytes=10_000), min_replays_to_keep=0)
    for width in (100, 100, 400, 400, 100, 1000):
        x = torch.randn(1, width)
        for _ in range(3):
            served = wrapper(x, batch_descriptor=BatchDescriptor(1, width), cudagraph_runtime_mode=FULL)
            assert torch.equal(served, x * 2)
        wrapper.check_integrity()
    assert BatchDescriptor(1, 1000) in wrapper.get_cached_descriptors()
    assert wrapper.get_stats().evictions > 0


def test_hot_shapes_are_counted_with_and_without_a_graph() -> None:
    """Every call of a descriptor counts, also those of graphs that were evicted since."""
    wrapper = make(max_cached_graphs=1)
    serve(wrapper, *[4] * 7, *[2] * 9, 1)
    assert kept(wrapper) == {2}
    assert wrapper.get_hot_shapes() == [(BatchDescriptor(2), 9), (BatchDescriptor(4), 7), (BatchDescriptor(1), 1)]
    assert wrapper.get_hot_shapes(top_k=1) == [(BatchDescriptor(2), 9)]


@pytest.mark.parametrize("top_k", [0, True, 1.5])
def test_top_k_is_checked(top_k: Any) -> None:
    """A number of shapes is a positive whole number."""
    with pytest.raises(ConfigError, match=f"top_k must be an integer >= 1, got {top_k!r}"):
        make().get_hot_shapes(top_k)


def test_prewarm_captures_before_the_first_call() -> None:
    """Each shape has its graph, largest first, compared with a second batch; the first real batch is served."""
    wrapper = make()
    shapes = [BatchDescriptor(2), 4, BatchDescriptor(3, 3)]
    done = wrapper.prewarm(shapes, lambda descriptor: torch.zeros(descriptor.num_tokens, 3))
    assert done == [BatchDescriptor(4), BatchDescriptor(3, 3), BatchDescriptor(2)]
    assert wrapper.get_cached_descriptors() == done
    assert (wrapper.get_stats().captures, wrapper.get_stats().calls, wrapper.get_hot_shapes()) == (3, 0, [])
    serve(wrapper, 4, 4, 2, 2)
    assert (wrapper.get_stats().captures, wrapper.get_stats().hits) == (3, 4)
    assert wrapper.prewarm([4], lambda descriptor: pytest.fail("it has its graph")) == [BatchDescriptor(4)]


A, B = torch.zeros(4), torch.ones(4)


@pytest.mark.parametrize(
    ("dummy", "args", "kwargs"),
    [((A, B), (A, B), {}), ({"x": A, "y": B}, (), {"x": A, "y": B}), (((A,), {"y": B}), (A,), {"y": B})],
    ids=["positional", "keyword", "both"],
)
def test_prewarm_takes_arguments_in_each_spelling(dummy: Any, args: Any, kwargs: Any) -> None:
    """A tuple, a mapping, or both; a call of the same spelling finds the graph."""
    wrapper = AdaptiveCUDAGraphWrapper(lambda x, y: x - y)
    assert wrapper.prewarm([4], lambda descriptor: dummy) == [BatchDescriptor(4)]
    out = wrapper(*args, batch_descriptor=BatchDescriptor(4), cudagraph_runtime_mode=FULL, **kwargs)
    assert torch.equal(out, A - B)
    assert wrapper.get_stats().captures == 1


def test_prewarm_leaves_no_effect() -> None:
    """What the dummy runs write is put back."""
    state = torch.zeros(1)

    def count(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return x + state

    wrapper = AdaptiveCUDAGraphWrapper(count)
    wrapper.prewarm([2, 4], lambda descriptor: torch.zeros(descriptor.num_tokens))
    assert state.item() == 0
    assert len(wrapper.get_cached_descriptors()) == 2


def test_prewarm_leaves_out_what_cannot_be_captured() -> None:
    """Such a shape stays eager, and the others have their graphs."""
    wrapper = AdaptiveCUDAGraphWrapper(lambda x: x * (x.sum().item() if len(x) == 3 else 2))
    done = wrapper.prewarm([2, 3, 4], lambda descriptor: torch.ones(descriptor.num_tokens))
    assert done == [BatchDescriptor(4), BatchDescriptor(2)]


def test_prewarm_of_too_many_shapes_is_refused() -> None:
    """It would evict what it has just captured."""
    with pytest.raises(ConfigError, match="prewarm of 3 shapes needs max_cached_graphs >= 3, got 2"):
        make(max_cached_graphs=2).prewarm([1, 2, 3], lambda descriptor: pytest.fail("nothing runs"))


def test_a_budget_is_shared() -> None:
    """Two wrappers with room for one graph together take turns."""
    budget = MemoryBudget(max_cached_graphs=1)
    first, second = make(options=CUDAGraphOptions(budget=budget)), make(options=CUDAGraphOptions(budget=budget))
    for _ in range(2):
        for wrapper in (first, second):
            serve(wrapper, *[4] * 4)
    assert budget.num_graphs == 1
    assert kept(second) == {4}
