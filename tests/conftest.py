"""What all tests share: one torch thread, the sizes of hypothesis runs, and the skip where there is no GPU."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "quick", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("quick"), derandomize=True, database=None)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=500)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "quick")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Keep results independent of the machine's cores, and leave those to whatever else runs."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where torch can use no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
