"""The server behind every front end: what it keeps of calls, and how much of it."""

import pytest
import torch

import graphdispatch as gd
from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Reason
from graphdispatch.engines import BatchDescriptor, CUDAGraphConfig, CUDAGraphManager, CUDAGraphWrapper
from graphdispatch.errors import ConfigError

from ..helpers import AT_ONCE

FULL = CUDAGraphMode.FULL


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice the input."""
    return x * 2


def call(wrapper: CUDAGraphWrapper, rows: int) -> None:
    """One call of its own descriptor, compared with eager."""
    x = torch.randn(rows, 3)
    with torch.no_grad():
        got = wrapper(x, batch_descriptor=BatchDescriptor(rows), cudagraph_runtime_mode=FULL)
    assert torch.equal(got, x * 2)


def test_a_wrapper_remembers_so_many_descriptors() -> None:
    """Those without a graph make way; the graphs stay, and serve."""
    wrapper = CUDAGraphWrapper(double, max_cached_graphs=4)
    server, routes = wrapper._server, wrapper._routes
    server.max_groups = routes._most = 8
    for rows in range(1, 30):
        call(wrapper, rows)
    assert len(server.graphs.groups) <= 8
    assert len(routes) <= 8 + 1
    kept = wrapper.get_cached_descriptors()
    assert len(kept) == 4
    for _ in range(2):
        for descriptor in kept:
            call(wrapper, descriptor.num_tokens)
    assert wrapper.get_stats().hits >= 4


def test_a_manager_remembers_so_many_lengths() -> None:
    """Many sequence lengths share one guard, one server and one set of static inputs."""
    manager = CUDAGraphManager(
        CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4, options=CUDAGraphOptions(capture_after=1000))
    )
    x = torch.randn(4, 3)
    with torch.no_grad():
        manager.execute_or_capture(4, 1, double, {"x": x})
        latest = manager.registry.latest()
        latest.server.max_groups = latest.routes._most = 16
        for seq_len in range(1, 60):
            manager.execute_or_capture(4, seq_len, double, {"x": x})
    assert len(latest.server.graphs.groups) <= 16
    assert len(latest.routes) <= 16 + 1
    assert len({id(group.inputs) for group in latest.server.graphs.groups.values()}) == 1


def test_a_server_that_was_forgotten_captures_no_more() -> None:
    """A call that found its server just before ``sleep`` runs eagerly, and leaves nothing in the pool."""
    manager = CUDAGraphManager(CUDAGraphConfig(capture_sizes=(4,), max_batch_size=4, options=AT_ONCE))
    x = torch.randn(4, 3)
    with torch.no_grad():
        manager.execute_or_capture(4, 1, double, {"x": x})
        latest = manager.registry.latest()
        route = next(iter(latest.routes.values()))
        manager.sleep()
        assert torch.equal(latest.server.serve(route, (), {"x": x}), x * 2)
    assert latest.server.decision.reason is Reason.ASLEEP
    assert (manager.registry.num_graphs, manager.registry.memory_bytes) == (0, 0)


def test_nothing_is_prewarmed_while_asleep() -> None:
    """``sleep`` says that weights are elsewhere, so that a capture would hold their old memory."""
    step = gd.graphed(double, dynamic={"x": 0}, sizes=(4,))
    step.sleep()
    with pytest.raises(ConfigError, match=r"prewarm cannot capture now: .*sleep"):
        step.prewarm(torch.randn(2, 3))
    step.wake()
    assert step.prewarm(torch.randn(2, 3)).captured == {FULL: (4,)}
    wrapper = gd.AdaptiveCUDAGraphWrapper(double)
    wrapper.sleep()
    with pytest.raises(ConfigError, match=r"prewarm cannot capture now: .*sleep"):
        wrapper.prewarm([4], lambda descriptor: torch.randn(descriptor.num_tokens, 3))
