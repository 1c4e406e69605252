"""What the GPU tests share: the backend of the first GPU, a pool, and a way to record a piece of work."""

from collections.abc import Callable, Iterator

import pytest
import torch

from graphdispatch.backends import Backend, Graph, Pool, get_backend

Record = Callable[[Callable[[], object]], Graph]


@pytest.fixture
def cuda() -> Backend:
    """The backend of the first GPU."""
    return get_backend("cuda", torch.device("cuda", 0))


@pytest.fixture
def pool(cuda: Backend) -> Pool:
    """A pool of its own."""
    return cuda.make_pool()


@pytest.fixture
def record(cuda: Backend, pool: Pool) -> Iterator[Record]:
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
