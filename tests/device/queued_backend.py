"""A plug-in of pytest: the library serves the test device, too, as it would another vendor's.

``GRAPHDISPATCH_TEST_DEVICE=queued`` has tests make their tensors there. ``GRAPHDISPATCH_TEST_DELAYS`` has each stream
sleep before each piece of work, at most so many microseconds.
"""

import os
from collections.abc import Iterator

import pytest
import queued_device

from graphdispatch.backends import register_backend
from graphdispatch.backends.accelerator import backend_of
from graphdispatch.backends.cuda import CUDABackend


@pytest.fixture(autouse=True)
def whole_device() -> Iterator[None]:
    """No fault, delay or limit outlasts a test, and no failed kernel."""
    queued_device.delays(1, int(os.environ.get("GRAPHDISPATCH_TEST_DELAYS", "0")))
    yield
    queued_device.recover()
    queued_device.delays(0, 0)
    queued_device.limit_memory()


# It says what CUDA says.
register_backend(queued_device.NAME, lambda: backend_of(queued_device.NAME, errors=CUDABackend.errors))
