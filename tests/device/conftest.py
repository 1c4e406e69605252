"""Tests of the test device itself, without the library. They run where the device is loaded: ``make device-test``."""

import sys
from collections.abc import Iterator

import pytest

IS_LOADED = "queued_device" in sys.modules
collect_ignore_glob = [] if IS_LOADED else ["test_*.py"]


@pytest.fixture(autouse=True)
def whole_device() -> Iterator[None]:
    """No fault, delay or limit outlasts a test."""
    yield
    import queued_device

    queued_device.recover()
    queued_device.delays(0, 0)
    queued_device.limit_memory()
