"""Call signatures beyond what is kept: none is locked out for good, and all are answered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Graphed, Reason
from graphdispatch.engines import BatchDescriptor, CUDAGraphConfig, CUDAGraphManager, CUDAGraphWrapper

from ..helpers import check_calls, make

ROWS = 4


def twice(x: torch.Tensor, other: Any = None) -> torch.Tensor:
    """It ignores its second argument."""
    return x * 2


def serve(fn: Callable[..., Any] = twice, **options: Any) -> Graphed[..., Any]:
    """A served callable that keeps few signatures; calls with other numbers of columns have other ones."""
    return make(fn, **{"sizes": (ROWS,), "max_signatures": 2} | options)


def call(step: Graphed[..., Any], columns: int, *others: Any) -> Reason:
    """The reason of one call, answered as eager answers."""
    return check_calls(step, (torch.randn(ROWS, columns), *others))[0]


def test_the_least_recently_used_signature_gives_way() -> None:
    """To one that comes twice; a signature that is in use keeps its graph."""
    step = serve()
    for columns in (3, 5, 3, 3):
        call(step, columns)
    assert [call(step, 7) for _ in range(2)] == [Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW]
    assert call(step, 3) is Reason.EXACT
    assert call(step, 5) is Reason.FIRST_SIGHTING
    assert len(step.entries) == 2
    assert step.memory_bytes == step.memory_report().total
    step.check_integrity()


def test_a_signature_without_a_graph_gives_way_first() -> None:
    """However recently it was used."""
    step = serve(capture_after=2)
    for columns in (3, 3, 3, 5):
        call(step, columns)
    for _ in range(2):
        call(step, 7)
    assert [call(step, columns) for columns in (7, 3)] == [Reason.VERIFIED_NOW, Reason.EXACT]


def test_signatures_that_come_once_displace_nothing() -> None:
    """However many they are, graphs stay, and one of them alone is remembered."""
    step = serve(max_signatures=2, capture_after=2)
    for columns in (3, 5) * 4:
        call(step, columns)
    reasons = [call(step, 3, number) for number in range(2000)]
    assert reasons[0] is Reason.FIRST_SIGHTING
    assert {*reasons[1:]} == {Reason.CONSTANT_CHANGES}
    assert (call(step, 3), call(step, 5)) == (Reason.EXACT, Reason.EXACT)
    assert (step.stats.captures, len(step._graphs.groups)) == (2, 3)


@pytest.mark.parametrize("fn", [twice, lambda x, other: x * 2 if x.sum().item() > -1e9 else x])
def test_a_cycle_over_more_signatures_than_the_limit_is_not_captured_without_end(fn: Callable[..., Any]) -> None:
    """Be they served or given up: each beyond the limit gives way before it comes again, and those within it have
    graphs."""
    step = serve(fn, max_signatures=4, capture_after=2, max_failures=1)
    for _ in range(20):
        for number in range(6):
            call(step, 3, number)
    assert step.stats.captures + step.stats.capture_failures <= 6
    assert (step.stats.hits > 5) is (fn is twice)
    assert len(step._graphs.groups) <= 5


FULL = CUDAGraphMode.FULL


def call_wrapper(wrapper: CUDAGraphWrapper, rows: int) -> None:
    """One call of its own descriptor, compared with eager."""
    x = torch.randn(rows, 3)
    got = wrapper(x, batch_descriptor=BatchDescriptor(rows), cudagraph_runtime_mode=FULL)
    assert torch.equal(got, x * 2)


def test_a_wrapper_remembers_so_many_descriptors() -> None:
    """Those without a graph make way; the graphs stay, and serve."""
    wrapper = CUDAGraphWrapper(twice, max_cached_graphs=4)
    graphs = wrapper._graphs
    graphs.max_groups = 8
    for rows in range(1, 30):
        call_wrapper(wrapper, rows)
    assert len(graphs.groups) <= 8 + 1
    kept = wrapper.get_cached_descriptors()
    assert len(kept) == 4
    for _ in range(2):
        for descriptor in kept:
            call_wrapper(wrapper, descriptor.num_tokens)
    assert wrapper.get_stats().hits >= 4


def test_a_manager_remembers_so_many_lengths() -> None:
    """Many sequence lengths share one guard, one server and one set of static inputs."""
    manager = CUDAGraphManager(
        CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4, options=CUDAGraphOptions(capture_after=1000))
    )
    x = torch.randn(4, 3)
    manager.execute_or_capture(4, 1, twice, {"x": x})
    latest = manager._callables[-1]
    latest.server.graphs.max_groups = 16
    for seq_len in range(1, 60):
        manager.execute_or_capture(4, seq_len, twice, {"x": x})
    assert len(latest.server.graphs.groups) <= 16 + 1
    assert len({id(group.inputs) for group in latest.server.graphs.groups.values()}) == 1


def test_captures_on_purpose_keep_to_the_limit() -> None:
    """Also of signatures that a call has come with before."""
    step = serve(max_signatures=2, capture_after=2)
    for columns in range(1, 9):
        call(step, columns)
        step.prewarm(torch.randn(4, columns))
        assert len(step._graphs.groups) <= 2


@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn])
@pytest.mark.parametrize("early", [torch.ones(4, 3), torch.ones(1, 1).expand(4, 3)], ids=["dense", "expanded"])
def test_a_tensor_without_strides(change: Callable[[torch.Tensor], torch.Tensor], early: torch.Tensor) -> None:
    """It is another layout, whatever the graph asks of its strides."""
    step = make(lambda x: x * 2)
    assert check_calls(step, early, early, early)[-1] is Reason.EXACT
    assert torch.equal(step(change(early)).to_dense(), early * 2)
    assert step.last_decision.reason is Reason.TENSOR_SUBCLASS
