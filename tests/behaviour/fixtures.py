"""The fixtures of the suites that run through every door, and the hook that names the doors of each test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .door import Door
from .doors import DOORS
from .features import able

Batch = Callable[[int], tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def one_tensor(rows: int) -> tuple[Any, ...]:
    """The usual batch: one tensor of ``rows`` rows and three columns."""
    return (torch.randn(rows, 3),)


def choose_doors(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses ``opened``, ``settled`` or ``tried`` once for each door that can express it."""
    if "door" in metafunc.fixturenames:
        metafunc.parametrize("door", able(getattr(metafunc.function, "needs", ())))


@pytest.fixture
def opened(door: str) -> Iterator[Callable[..., Door]]:
    """Open a callable behind the door, without a call; it is closed after the test."""
    made: list[Door] = []

    def make(fn: Callable[..., Any], **options: Any) -> Door:
        made.append(DOORS[door](fn, dynamic=options.pop("dynamic", {"x": 0}), **options))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


@pytest.fixture
def tried(opened: Callable[..., Door]) -> Callable[..., Door]:
    """Open a callable and call it until a graph serves whatever can be served (``graphed``: three calls)."""

    def make(fn: Callable[..., Any], batch: Batch = one_tensor, **options: Any) -> Door:
        return opened(fn, **options).settle(batch)

    return make


@pytest.fixture
def settled(tried: Callable[..., Door]) -> Callable[..., Door]:
    """As ``tried``; the last call must have been a replay."""

    def make(fn: Callable[..., Any], batch: Batch = one_tensor, **options: Any) -> Door:
        step = tried(fn, batch, **options)
        refusal = getattr(step, "refusal", None)
        assert step.was_hit(), f"{step.name} did not serve: {step.reason()}; {refusal}"
        return step

    return make
