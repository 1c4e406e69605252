"""What the tests on the CPU backend share: short collections."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """A collection looks at what the tests made, which is quick, and not at all that was imported before them."""
    gc.freeze()
    yield
    gc.unfreeze()
