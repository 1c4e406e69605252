"""Every case here runs through each door that can express it."""

import pytest

from .fixtures import _inference, choose_doors, opened, settled, tried

__all__ = ["_inference", "opened", "settled", "tried"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One run for each door."""
    choose_doors(metafunc)
