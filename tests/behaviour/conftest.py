"""What the specification shares: each test through every front end that can express it, and faults."""

import pytest

from .fixtures import choose_front_ends, opened, settled, tried
from .inject import Faults

__all__ = ["opened", "settled", "tried"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One run for each front end, of the tests that open one."""
    choose_front_ends(metafunc)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Where the CPU backend shall fail; nowhere yet."""
    return Faults(monkeypatch)
