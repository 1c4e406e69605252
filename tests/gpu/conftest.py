"""What the GPU tests share: the backend of the first GPU, a pool, and a way to record a piece of work."""

from collections.abc import Callable, Iterator

import pytest
import torch

from graphdispatch.backends import get_backend
from graphdispatch.backends.base import Graph
from graphdispatch.backends.cuda import CUDABackend
from graphdispatch.backends.cuda.pool import CUDAPool

Record = Callable[[Callable[[], object]], Graph]


@pytest.fixture
def cuda() -> CUDABackend:
    """The backend of the first GPU."""
    backend = get_backend("cuda", torch.device("cuda", 0))
    assert isinstance(backend, CUDABackend)
    return backend


@pytest.fixture
def pool(cuda: CUDABackend) -> Iterator[CUDAPool]:
    """A pool that is closed at the end."""
    made = cuda.make_pool()
    assert isinstance(made, CUDAPool)
    yield made
    made.close()


@pytest.fixture
def record(cuda: CUDABackend, pool: CUDAPool) -> Iterator[Record]:
    """Warm a piece of work up and capture it into ``pool``; the graphs are released at the end."""
    graphs: list[Graph] = []

    def record_one(work: Callable[[], object]) -> Graph:
        work()
        with cuda.begin_capture(pool) as capture:
            work()
        graphs.append(capture.graph)
        return capture.graph

    yield record_one
    for graph in graphs:
        graph.reset()
