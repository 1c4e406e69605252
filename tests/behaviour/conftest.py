"""What the specification shares: each test through every front end that can express it, and faults."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from graphdispatch import Reason

from .features import able
from .front_end import Batch, FrontEnd, Open, one_tensor
from .front_ends import FRONT_ENDS
from .inject import Faults


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses ``opened``, ``settled`` or ``tried`` once for each front end that can express it."""
    if "front_end" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("front_ends").split(",")
        names = able(getattr(metafunc.function, "needs", ()))
        metafunc.parametrize("front_end", [name for name in names if chosen == [""] or name in chosen])


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Where the CPU backend shall fail; nowhere yet."""
    return Faults(monkeypatch)


@pytest.fixture
def opened(front_end: str) -> Iterator[Open]:
    """Open a callable behind the front end, without a call; it is closed after the test."""
    made: list[FrontEnd] = []

    def make(fn: Callable[..., Any], **options: Any) -> FrontEnd:
        made.append(FRONT_ENDS[front_end](fn, dynamic=options.pop("dynamic", {"x": 0}), **options))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


@pytest.fixture
def tried(opened: Open) -> Open:
    """Open a callable and call it until a graph serves whatever can be served (``graphed``: three calls)."""
    return lambda fn, batch=one_tensor, **options: opened(fn, **options).settle(batch)


@pytest.fixture
def settled(tried: Open) -> Open:
    """As ``tried``; the last call must have been a replay."""

    def make(fn: Callable[..., Any], batch: Batch = one_tensor, **options: Any) -> FrontEnd:
        step = tried(fn, batch, **options)
        if step.reason() is Reason.VERIFIED_NOW:  # one whose second batch ran other code is compared on a third
            step(*batch(step.order[-1]))
        refusal = getattr(step, "refusal", None)
        assert step.was_hit(), f"{step.name} did not serve: {step.reason()}; {refusal}"
        return step

    return make
