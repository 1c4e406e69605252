"""Graphs are for inference: the tests of this folder run without gradients."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
