"""What the specification shares: each test through every front end that can express it, and the faulty backend."""

from collections.abc import Iterator

import pytest

from graphdispatch.backends import get_backend, register_backend
from graphdispatch.errors import BackendError

from .fixtures import choose_front_ends, opened, settled, tried
from .inject import DeviceFaults, Faults, FaultyBackend

__all__ = ["opened", "settled", "tried"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One run for each front end, of the tests that open one."""
    choose_front_ends(metafunc)


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    """A backend is registered once in a process."""
    register_backend("faulty", lambda: FaultyBackend)


@pytest.fixture
def backend() -> Iterator[FaultyBackend]:
    """The faulty backend, without faults yet."""
    FaultyBackend.in_use = True
    found = get_backend("faulty")
    found.faults = Faults()
    yield found
    FaultyBackend.in_use = False
    with pytest.raises(BackendError, match="no usable device"):
        get_backend("faulty")


@pytest.fixture
def faults(backend: FaultyBackend) -> Faults:
    """Where it shall fail."""
    return backend.faults


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DeviceFaults:
    """Faults of the CPU backend itself, on whichever thread it works."""
    return DeviceFaults(monkeypatch)
