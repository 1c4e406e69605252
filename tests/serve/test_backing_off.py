"""Keys whose graphs keep going before they were used enough are captured ever more rarely, and graphs that are over the
byte budget by themselves are not kept."""

from typing import Any

import pytest
import torch
from torch import nn

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.engines import (
    AdaptiveCUDAGraphWrapper,
    BatchDescriptor,
    CUDAGraphWrapper,
)
from graphdispatch.memory.admission import Admission
from graphdispatch.memory.cache import GraphCache
from graphdispatch.stats import EvictionReason

from ..sized import entry

FULL = CUDAGraphMode.FULL


def needs(admission: Admission, key: str = "key") -> int:
    """At how many further misses ``key`` is captured."""
    for count in range(1, 10_000):
        if admission.since(key) is not None:
            return count
        admission.count_miss(key)
    raise AssertionError("never captured")


def evicted(admission: Admission, *replays: int) -> Admission:
    """The same object, told of graphs that went after so many replays each."""
    for count in replays:
        admission.evicted("key", count)
    return admission


@pytest.mark.parametrize("after", [1, 2, 3])
def test_three_unused_graphs_double_what_the_next_one_needs(after: int) -> None:
    """And three more double it again; ``capture_after=1`` takes part."""
    found = [needs(evicted(Admission(after), *[0] * times)) for times in (0, 2, 3, 5, 6, 9)]
    assert found == [after, after, 2 * after, 2 * after, 4 * after, 8 * after]


def test_replays_make_up_for_graphs_that_fell_short() -> None:
    """Four replays pay for a graph; more of them pay for those before."""
    assert needs(evicted(Admission(), *[4] * 100)) == 2
    assert needs(evicted(Admission(), *[3] * 12)) == 4
    assert needs(evicted(Admission(), *[0] * 6, 4 + 12)) == 4
    assert needs(evicted(Admission(), *[0] * 6, 1000, 0, 0)) == 2


def test_the_misses_need_not_fall_into_the_window() -> None:
    """Only the last ``capture_after`` of them, so that a rare key comes back in the end, and no need is endless."""
    admission = evicted(Admission(window=4), *[0] * 1000)
    for _ in range((2 << 12) - 2):
        assert admission.still_to_wait("key")
        admission.count_miss("key")
        admission.count_miss("others")
        admission.count_miss("others")
    assert needs(admission) == 2


def test_what_is_remembered_of_keys_is_bounded() -> None:
    """The latest 4,096 keys whose graphs fell short; and ``clear`` forgets them."""
    admission = Admission()
    for key in range(5000):
        for _ in range(3):
            admission.evicted(key, 0)
    assert [admission.still_to_wait(key) for key in (903, 904, 4999)] == [0, 3, 3]
    admission.clear()
    assert admission.still_to_wait(4999) == 0


@pytest.mark.parametrize(
    ("reason", "counts"),
    [(reason, reason not in ("invalidated", "asleep", "dropped")) for reason in EvictionReason],
)
def test_what_the_user_asked_for_does_not_count(reason: EvictionReason, counts: bool) -> None:
    """Only graphs that went by themselves."""
    cache = GraphCache(1, admission=Admission())
    for _ in range(3):
        made = entry()
        cache.add("key", made)
        for victim in cache.retire(made, reason):
            victim.release()
    assert (cache.admission.still_to_wait("key") > 0) is counts


def model() -> nn.Module:
    """One whose graphs hold the most for their inputs and outputs."""
    return nn.Linear(64, 64).eval().requires_grad_(False)


def in_runs(step: Graphed[..., torch.Tensor], sizes: tuple[int, ...], length: int, rounds: int) -> None:
    """Each size so many times in a row, round after round; every answer is eager's."""
    batches = [torch.randn(size, 64) for _ in range(rounds) for size in sizes for _ in range(length)]
    with torch.no_grad():
        for x in batches:
            before = step.explain(x)
            captures = step.stats.captures
            assert torch.allclose(step(x), step.forward(x), atol=1e-5)
            assert step.last_decision.explain() == before
            assert (step.stats.captures > captures) is (step.last_decision.reason is Reason.CAPTURED_NOW)
    step.check_integrity()


@pytest.mark.parametrize(
    ("sizes", "room", "most", "backed_off"), [((1, 2, 4, 8, 16, 32), 3, 80, 200), ((2, 4, 8), 1, 60, 100)]
)
def test_runs_of_more_sizes_than_fit_do_not_thrash(
    sizes: tuple[int, ...], room: int, most: int, backed_off: int
) -> None:
    """Sizes in runs of three, with room for half of them or for one; ``explain`` agrees with every call."""
    step = graphed(model(), dynamic={"input": 0}, sizes=sizes, options=CUDAGraphOptions(max_cached_graphs=room))
    in_runs(step, sizes, 3, 40)
    assert step.stats.captures < most
    assert step.stats.reasons[Reason.BACKING_OFF] > backed_off


class Drifts(nn.Module):
    """Depends on a number that is guarded, and that never comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """So many times the input."""
        return x * self.scale


def test_a_state_that_drifts_does_not_capture_without_end() -> None:
    """The reason is its own, says when it is captured again, and that is so; ``strict`` does not mind."""
    drifts = Drifts().eval()
    step = graphed(drifts, dynamic={"x": 0}, max_size=8, strict=True)
    x = torch.randn(4, 2)
    for i in range(200):
        drifts.scale = i // 2
        assert torch.equal(step(x), drifts(x))
    assert step.stats.captures < 20
    told = step.explain(x)
    assert "its last graphs went before they were used enough; it is captured again after " in told
    captures, more = step.stats.captures, int(told.split()[-3])
    for _ in range(more):
        step(x)
    assert step.stats.captures == captures
    step(x)
    assert step.stats.captures == captures + 1


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, AdaptiveCUDAGraphWrapper])
def test_a_wrapper_backs_off(kind: type[CUDAGraphWrapper]) -> None:
    """Though it captures at once while there is room, and forgets with ``clear_cache``."""
    drifts = Drifts().eval()
    wrapper = kind(drifts, FULL)
    for i in range(100):
        drifts.scale = i // 2
        wrapper(torch.randn(4, 2), batch_descriptor=BatchDescriptor(4), cudagraph_runtime_mode=FULL)
    assert wrapper.get_stats().captures < 20
    assert wrapper.get_stats().reasons[Reason.BACKING_OFF] > 70
    wrapper.clear_cache()
    captures = wrapper.get_stats().captures
    wrapper(torch.randn(4, 2), batch_descriptor=BatchDescriptor(4), cudagraph_runtime_mode=FULL)
    assert wrapper.get_stats().captures == captures + 1


def wide() -> nn.Module:
    """One whose graph of 64 rows is far over 100,000 bytes."""
    return nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64)).eval().requires_grad_(False)


@pytest.mark.parametrize("outputs", ["clone", "static", "ring:3"])
def test_a_graph_over_the_budget_is_not_kept(outputs: str) -> None:
    """It is captured once, its memory and buffers are given back, and the reason says how much it took."""
    step: Any = graphed(
        wide(), dynamic={"input": 0}, sizes=[64], options=CUDAGraphOptions(memory_budget_bytes=100_000), outputs=outputs
    )
    for _ in range(100):
        step(torch.randn(64, 64))
    assert (step.stats.captures, step.memory_bytes, step.entries) == (1, 0, [])
    assert step.stats.reasons[Reason.CACHE_FULL] == 99
    buffers = [group.buffers for group in step._graphs.groups.values()]
    assert all(one is None or one.nbytes == 0 for one in buffers)
    held = int(step.last_decision.explain().split("its graph holds ")[1].split()[0])
    assert held > 100_000
    assert "for which there is no room in memory_budget_bytes=100000" in step.explain(torch.randn(64, 64))
    step.check_integrity()
    step.invalidate()
    for _ in range(2):
        step(torch.randn(64, 64))
    assert step.stats.captures == 2


def test_a_graph_over_the_budget_takes_no_other_with_it() -> None:
    """What is kept goes on serving."""
    step = graphed(wide(), dynamic={"input": 0}, sizes=[1, 64], options=CUDAGraphOptions(memory_budget_bytes=100_000))
    for size in [1, 1, 1, 1, *[64] * 4, 1]:
        step(torch.randn(size, 64))
    assert [one.size for one in step.entries] == [1]
    assert step.stats.hits == 2
    assert step.memory_bytes <= 100_000
