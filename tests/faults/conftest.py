"""The faulty backend, without gradients."""

from collections.abc import Iterator

import pytest
import torch

from graphdispatch.backends import get_backend, register_backend
from graphdispatch.errors import BackendError

from .inject import Faults, FaultyBackend


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    """Graphs are for inference."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    """A backend is registered once in a process."""
    register_backend("faulty", lambda: FaultyBackend)


@pytest.fixture
def backend() -> Iterator[FaultyBackend]:
    """The faulty backend, without faults yet."""
    FaultyBackend.in_use = True
    found = get_backend("faulty")
    assert isinstance(found, FaultyBackend)
    found.faults = Faults()
    yield found
    FaultyBackend.in_use = False
    with pytest.raises(BackendError, match="no usable device"):
        get_backend("faulty")


@pytest.fixture
def faults(backend: FaultyBackend) -> Faults:
    """Where it shall fail."""
    return backend.faults
