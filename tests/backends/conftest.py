"""What the conformance tests share: every usable backend in turn, one that a plug-in registers among them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphdispatch.backends import Backend, Graph, Pool, available_backends, get_backend


@pytest.fixture(params=available_backends())
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each usable backend in turn."""
    return get_backend(request.param)


@pytest.fixture
def pool(backend: Backend) -> Pool:
    """A pool of its own."""
    return backend.make_pool()


@pytest.fixture
def draw(backend: Backend) -> Callable[..., torch.Tensor]:
    """Random numbers on the backend's device; four rows of three unless the caller wants others."""
    return lambda *shape: torch.randn(shape or (4, 3), device=backend.device)


@pytest.fixture
def record(backend: Backend, pool: Pool) -> Callable[..., tuple[Graph, Any]]:
    """Warm up as a capture must, and capture; the graph and the outputs in its memory."""

    def make(fn: Callable[[torch.Tensor], Any], x: torch.Tensor, into: Pool = pool) -> tuple[Graph, Any]:
        fn(x)
        with backend.begin_capture(into) as capture:
            out = fn(x)
        return capture.graph, out

    return make
