"""What runs for the graph's sake change is put back, by whatever way they come to it; the rest stays."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from graphdispatch import eager_break
from graphdispatch.state.trace import CodeTrace
from graphdispatch.state.walk import StateWalk

from ..python_objects import Box, served


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Engine:
    """Serves steps, while other threads use it, too."""

    def __init__(self) -> None:
        self.queue: list[int] = []
        self.busy = False

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.busy = True
        y = x + len(x) if len(x) < 4 else x + x.sum().item()
        self.busy = False
        return y


Case = tuple[Callable[..., Any], Callable[[], Any], dict[str, Any]]
LATEST: list[Any] = [None]
NEWEST: Any = None


class Part:
    """Counts rows in a dict."""

    def __init__(self) -> None:
        self.table = {"last": 3}

    def note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        """A forward hook."""
        self.table["last"] = len(output)


def _by_an_alias() -> Case:
    net, part = nn.ReLU(), Part()
    net.register_forward_hook(part.note)
    net.a_name_that_no_code_spells = part  # type: ignore[assignment]
    return lambda x: net(x * 2), lambda: part.table["last"], {}


def _in_a_break() -> Case:
    box = Box(last=3)

    def note(x: torch.Tensor) -> torch.Tensor:
        box.last = len(x)
        return x * 2

    return eager_break(note), lambda: box.last, {"mode": "PIECEWISE"}


def _a_global() -> Case:
    def fn(x: torch.Tensor) -> torch.Tensor:
        globals()["NEWEST"] = len(x)
        LATEST[0] = len(x)
        return x * 2

    globals()["NEWEST"] = LATEST[0] = 3
    return fn, lambda: (NEWEST, LATEST[0]), {}


def _by_a_computed_name() -> Case:
    class Own:
        def __init__(self) -> None:
            self._last = 3

        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self, f"_{name}", value)

    part = Own()
    part.__dict__.update(_last=3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        part.last = len(x)
        return x * 2

    return fn, lambda: part._last, {}


def _in_a_tuple() -> Case:
    inner = [3]
    box = Box(a_name_that_no_code_spells=inner, pair=(inner, 1))

    def fn(x: torch.Tensor) -> torch.Tensor:
        box.pair[0][0] = len(x)
        return x * 2

    return fn, lambda: list(inner), {}


PADDED_ONLY: dict[str, Callable[[], Case]] = {
    "alias": _by_an_alias,
    "break": _in_a_break,
    "global": _a_global,
    "computed name": _by_a_computed_name,
    "tuple": _in_a_tuple,
}


@pytest.mark.parametrize("make", PADDED_ONLY.values(), ids=PADDED_ONLY.keys())
def test_what_only_the_run_with_padding_changes_is_put_back(make: Callable[[], Case]) -> None:
    """The caller's run leaves all as it was (three rows again), and the run of four rows writes another number."""
    fn, state, options = make()
    step, before = served(fn, capture_after=1, **options), state()
    for _ in range(2):
        step(torch.randn(3, 3))
        assert state() == before
    assert not step.stats.hits


def test_attributes_are_put_back_one_by_one() -> None:
    """Of one object: what the callable's code names, beside what another thread sets meanwhile."""
    engine = Engine()
    walk = StateWalk(engine.step)
    with CodeTrace(walk) as trace:
        engine.step(torch.randn(3, 3))
    engine.__dict__.update(added=1, busy=True)
    walk.restore(names=trace.touched)
    assert not engine.busy
    assert vars(engine)["added"] == 1


def test_a_warm_up_that_fails_leaves_nothing() -> None:
    """The first of two runs before a prewarm changes a counter, and the second one fails for it."""
    model = nn.Linear(4, 4)

    def fn(x: torch.Tensor) -> torch.Tensor:
        model.count += 1  # type: ignore[operator, assignment]
        torch._assert_async(torch.tensor(model.count < 2))
        return x * 2

    model.count = 0  # type: ignore[assignment]
    step = served(fn)
    step.prewarm(torch.randn(3, 4))
    assert model.count == 0
