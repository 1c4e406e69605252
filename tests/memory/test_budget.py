"""``MemoryBudget``: limits over several caches and front ends; whose graph goes, and what its owner notices."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, CUDAGraphStats, Graphed, MemoryBudget, graphed
from graphdispatch.engines import BatchDescriptor, CUDAGraphConfig, CUDAGraphManager, CUDAGraphWrapper, EntryState
from graphdispatch.errors import ConfigError, IntegrityError
from graphdispatch.memory.cache import GraphCache

from ..sized import Sized, entry, filled, gone


def members(budget: MemoryBudget, count: int = 2) -> list[GraphCache]:
    """Caches that share the budget and have room of their own."""
    return [GraphCache(10, eviction="lru", budget=budget) for _ in range(count)]


def test_the_victim_may_be_another_members() -> None:
    """The least worth of all goes, and is recorded with its own cache."""
    budget = MemoryBudget(max_cached_graphs=2, eviction="lru")
    ours, theirs = members(budget)
    old = entry()
    theirs.add("old", old)
    ours.add("a", entry())
    (victim,) = ours.add("b", entry())
    victim.release()
    assert (victim.entry, len(ours), len(theirs), budget.num_graphs) == (old, 2, 0, 2)
    assert (ours.stats.evictions, theirs.stats.evictions) == (0, 1)


def test_bytes_are_summed_over_members() -> None:
    """As many go as the newcomer needs, from wherever."""
    budget = MemoryBudget(100, eviction="lru")
    ours, theirs = members(budget)
    first, second = entry(40), entry(40)
    theirs.add(0, first)
    ours.add(0, second)
    assert gone(ours.add(1, entry(50))) == [first]
    assert budget.nbytes == 90
    budget.check_integrity()


def test_a_members_own_limit_holds_besides() -> None:
    """One eviction for its own limit is enough for the budget too."""
    budget = MemoryBudget(max_cached_graphs=3, eviction="lru")
    theirs = GraphCache(10, eviction="lru", budget=budget)
    ours = GraphCache(1, eviction="lru", budget=budget)
    theirs.add(0, entry())
    theirs.add(1, entry())
    own = entry()
    ours.add(0, own)
    assert ours.has_room()
    assert gone(ours.make_room()) == [own]
    assert len(theirs) == 2


def test_no_room_in_the_budget_is_no_room() -> None:
    """A member below its own limit asks the others, whose graphs must be out of use as well."""
    budget = MemoryBudget(max_cached_graphs=1)
    ours, theirs = members(budget)
    held = entry()
    theirs.add(0, held)
    assert ours.is_full
    assert not ours.has_room(held.last_used)
    assert ours.has_room(held.last_used + 1)


def test_a_member_that_is_gone_does_not_count() -> None:
    """The budget keeps no cache alive."""
    budget = MemoryBudget(max_cached_graphs=1)
    ours, theirs = members(budget)
    theirs.add(0, entry())
    del theirs
    gc.collect()
    assert ours.make_room() == []
    assert budget.num_graphs == 0


def test_members_add_at_the_same_time() -> None:
    """Threads that fill several caches never exceed the budget, and every entry is kept or returned."""
    budget = MemoryBudget(100, 5)
    caches = members(budget, 4)
    returned: list[int] = []

    def fill(cache: GraphCache) -> None:
        count = 0
        for key in range(100):
            for victim in (*cache.make_room(), *cache.add(key % 7, entry(10 + key % 30, replays=key % 3))):
                victim.release()
                count += 1
            assert budget.num_graphs <= 5
        returned.append(count)

    threads = [threading.Thread(target=fill, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(returned) == 4
    assert sum(returned) + budget.num_graphs == 400
    assert sum(cache.stats.evictions for cache in caches) == sum(returned)
    for cache in caches:
        cache.check_integrity()


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ((0, None), "memory_budget_bytes must be at least 1 or None, got 0"),
        ((None, -2), "max_cached_graphs must be at least 1 or None, got -2"),
        ((1.5, None), "memory_budget_bytes must be at least 1 or None, got 1.5"),
    ],
)
def test_limits_are_checked(limits: tuple[Any, Any], named: str) -> None:
    """A limit is a positive whole number."""
    with pytest.raises(ConfigError, match=named):
        MemoryBudget(*limits)


def test_integrity_covers_all_members() -> None:
    """Too much in one member shows in another."""
    budget = MemoryBudget(100)
    ours, theirs = members(budget)
    (held,) = filled(theirs, 30)
    filled(ours, 30)
    held.graph = Sized(90)
    with pytest.raises(IntegrityError, match="120 bytes, more than memory_budget_bytes=100"):
        ours.check_integrity()


def test_repr_is_a_status_line() -> None:
    """Graphs, bytes and members."""
    budget = MemoryBudget(100, 4)
    ours, _ = members(budget)
    filled(ours, 30, 20)
    assert repr(budget) == "<MemoryBudget 2 of 4 graphs, 50 of 100 bytes, 2 caches>"
    assert repr(MemoryBudget()) == "<MemoryBudget 0 graphs, 0 bytes, 0 caches>"


def double(x: torch.Tensor) -> torch.Tensor:
    """What all front ends serve."""
    return x * 2


FrontEnd = tuple[Callable[[torch.Tensor], torch.Tensor], CUDAGraphStats]


def by_graphed(budget: MemoryBudget) -> FrontEnd:
    """``double`` behind ``graphed``."""
    step: Graphed[..., torch.Tensor] = graphed(
        double, dynamic={"x": 0}, sizes=(4,), options=CUDAGraphOptions(capture_after=1, budget=budget)
    )
    return step, step.stats


def by_wrapper(budget: MemoryBudget) -> FrontEnd:
    """``double`` behind a wrapper."""
    wrapper = CUDAGraphWrapper(double, options=CUDAGraphOptions(budget=budget))
    how = {"batch_descriptor": BatchDescriptor(4), "cudagraph_runtime_mode": CUDAGraphMode.FULL}
    return lambda x: wrapper(x, **how), wrapper.get_stats()


def by_manager(budget: MemoryBudget) -> FrontEnd:
    """``double`` behind a manager."""
    options = CUDAGraphOptions(capture_after=1, budget=budget)
    manager = CUDAGraphManager(CUDAGraphConfig(capture_sizes=(4,), options=options))
    return lambda x: manager.execute_or_capture(4, 1, double, {"x": x}), manager.stats


@pytest.mark.parametrize("make", [by_graphed, by_wrapper, by_manager])
def test_a_front_end_whose_graph_another_evicted_captures_anew(make: Callable[[MemoryBudget], FrontEnd]) -> None:
    """Two front ends that share room for one graph take turns, and every answer is eager's."""
    budget = MemoryBudget(max_cached_graphs=1)
    front_ends = [make(budget), by_graphed(budget)]
    for turn in (1, 2, 3):
        for serve, stats in front_ends:
            for _ in range(4):
                x = torch.randn(4, 3)
                assert torch.equal(serve(x), x * 2)
            assert (stats.captures, stats.hits) == (turn, 2 * turn)
            assert budget.num_graphs == 1
    budget.check_integrity()
    assert [stats.evictions for _, stats in front_ends] == [3, 2]


def test_an_evicted_graph_gives_its_memory_back() -> None:
    """Static inputs and outputs go with the last graph that uses them, and are there again for the next."""
    budget = MemoryBudget(max_cached_graphs=1, eviction="lru")
    step: Graphed[..., torch.Tensor] = graphed(
        lambda x: x * 2, dynamic={"x": 0}, sizes=(4,), options=CUDAGraphOptions(capture_after=1, budget=budget)
    )
    for width in (10, 5000, 20):
        for _ in range(4):
            x = torch.randn(4, width)
            assert torch.equal(step(x), x * 2)
        (held,) = step.entries
        assert held.state is EntryState.VERIFIED
        assert held.inputs.nbytes == x.nbytes
        assert step.memory_bytes < 3 * x.nbytes + 256
