"""Every footgun runs through each door that can express it; ``tests/doors/doors.py`` has the doors."""

import pytest

from ..doors.fixtures import _inference, choose_doors, opened, settled, tried

__all__ = ["_inference", "opened", "settled", "tried"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One run for each door."""
    choose_doors(metafunc)
