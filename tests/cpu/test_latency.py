"""A policy that learns is told how long steps took, and acts on it."""

import pytest
import torch

from graphdispatch import (
    AdaptiveDispatchPolicy,
    CUDAGraphConfig,
    CudagraphDispatcher,
    CUDAGraphRegistry,
    DispatchMode,
    create_dispatch_key,
)

WIDE = 1 << 20


def first_columns(x: torch.Tensor) -> torch.Tensor:
    """Next to nothing to compute on a large input: what a graph saves is less than copying the input costs."""
    return x[:, :8].relu()


def test_a_model_for_which_graphs_lose_ends_on_eager() -> None:
    """On the real CPU backend the policy finds out that copying the input costs more than the graph saves."""
    registry = CUDAGraphRegistry(CUDAGraphConfig(backend="cpu"))
    key = create_dispatch_key(4, 4)
    x = torch.randn(4, WIDE)
    policy = AdaptiveDispatchPolicy(exploration=0.1)
    dispatcher = CudagraphDispatcher(first_columns, policy)
    dispatcher.register_graph(key, registry.capture(4, 1, first_columns, inputs={"x": x}))
    for _ in range(300):
        assert torch.equal(dispatcher.dispatch(key, x), first_columns(x))
    before = dispatcher.stats.eager
    for _ in range(50):
        dispatcher.dispatch(key, x)
    assert dispatcher.stats.eager - before >= 40
    assert policy.select_mode(key, (DispatchMode.CUDAGRAPH, DispatchMode.EAGER)) is DispatchMode.EAGER


def test_a_step_that_raises_is_not_recorded() -> None:
    """A policy learns from steps that ran to their end."""

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    policy = AdaptiveDispatchPolicy()
    dispatcher = CudagraphDispatcher(fail, policy)
    key = create_dispatch_key(1, 1)
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            dispatcher.dispatch(key, torch.ones(1))
    assert not policy.estimates(key)
