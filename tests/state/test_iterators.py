"""Runs for the graph's sake never advance an iterator, wherever it is held: nobody could put it back."""

import functools
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphdispatch import Reason, eager_break
from graphdispatch.state.iterators import progress

from ..python_objects import Box, served

LINE: Iterator[int] = iter(())
BOX = Box()
LOCAL = threading.local()


class Turns:
    """Holds an iterator as a class attribute."""

    line: Iterator[int] = iter(())


def _next_of_box() -> int:
    return next(BOX.line)


def _box() -> Any:
    return BOX


@functools.lru_cache(None)
def _cached_box() -> Any:
    return BOX


class _Guard:
    def __enter__(self) -> int:
        return next(LINE)

    def __exit__(self, *_: object) -> None:
        pass


def _imported() -> int:
    import turns_of_a_test  # type: ignore[import-not-found]

    return int(next(turns_of_a_test.box.line))


def _swallowed() -> int:
    try:
        return _next_of_box()
    except:  # noqa: E722
        return 1


TAKES: dict[str, Callable[[], int]] = {
    "global": lambda: next(LINE),
    "object in a global": lambda: next(BOX.line),
    "helper": _next_of_box,
    "getter": lambda: next(_box().line),
    "cached getter": lambda: next(_cached_box().line),
    "class": lambda: next(Turns.line),
    "thread's own": lambda: next(LOCAL.line),
    "import inside": _imported,
    "variables of the module": lambda: next(globals()["LINE"]),
    "own module": lambda: next(sys.modules[__name__].LINE),
    "evaluated": lambda: int(eval("next(LINE)")),
    "context manager": lambda: _Guard().__enter__(),
    "swallowed error": _swallowed,
}
MAKES: dict[str, Callable[[], Iterator[int]]] = {
    "list iterator": lambda: iter(list(range(1, 400))),
    "count": lambda: itertools.count(1),
    "map": lambda: map(int, range(1, 400)),
    "generator": lambda: (n for n in range(1, 400)),
}


@pytest.fixture(params=MAKES.values(), ids=MAKES.keys())
def line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """An iterator that begins with one, in all places."""
    made: Iterator[int] = request.param()
    for owner, name in ((sys.modules[__name__], "LINE"), (BOX, "line"), (LOCAL, "line"), (Turns, "line")):
        monkeypatch.setattr(owner, name, made, raising=False)
    module = types.ModuleType("turns_of_a_test")
    module.box = BOX  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "turns_of_a_test", module)
    return made


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES.keys())
def test_a_capture_ahead_of_traffic_advances_none(take: Callable[[], int], line: Iterator[int]) -> None:
    """It is refused before the code runs that names what holds the iterator."""
    step = served(lambda x: x * take())
    with torch.no_grad():
        step.prewarm(torch.ones(4, 3), sizes=(4,))
        assert not step.stats.captures
        assert next(line) == 1
        answers = [float(step(torch.ones(4, 1))[0]) for _ in range(4)]
    assert answers == [2.0, 3.0, 4.0, 5.0]
    assert step.stats.reasons[Reason.STATE_UNSEEN]


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES.keys())
def test_a_branch_of_padded_batches_advances_none(take: Callable[[], int], line: Iterator[int]) -> None:
    """The caller's own run leaves the iterator alone, and so does the run with padding."""
    step = served(lambda x: x * (take() if len(x) == 4 else 7))
    with torch.no_grad():
        for _ in range(3):
            assert float(step(torch.ones(3, 1))[0]) == 7.0
    assert next(line) == 1
    assert not step.stats.captures


@pytest.mark.parametrize("rows", [4, 3], ids=["full", "padded"])
def test_a_break_advances_it_once_for_each_call(line: Iterator[int], rows: int) -> None:
    """What runs in a break runs in each replay, and no capture runs it more often."""
    step = served(eager_break(lambda x: x * next(LINE)), mode="PIECEWISE")
    with torch.no_grad():
        assert [float(step(torch.ones(rows, 1))[0]) for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert step.stats.reasons[Reason.STATE_UNSEEN]


def test_a_break_of_padded_batches_advances_none(line: Iterator[int]) -> None:
    """Nor does a break that only the run with padding takes that far."""

    def advance(x: torch.Tensor) -> torch.Tensor:
        return x * next(LINE)

    step = served(eager_break(lambda x: advance(x) if len(x) == 4 else x * 7), mode="PIECEWISE")
    with torch.no_grad():
        assert [float(step(torch.ones(3, 1))[0]) for _ in range(4)] == [7.0] * 4
    assert next(line) == 1


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    **MAKES,
    "set": lambda: iter({1, 2, 3, 4}),
    "dict": lambda: iter({1: 2, 3: 4, 5: 6}.items()),
    "zip": lambda: zip(range(9), [1] * 9, strict=True),
    "enumerate": lambda: enumerate([7] * 9),
    "chain": lambda: itertools.chain([1], [1, 1]),
    "cycle": lambda: itertools.cycle([1, 1]),
    "islice": lambda: itertools.islice(itertools.count(), 5),
    "same again": lambda: (1 for _ in [0] * 9),
    "reversed": lambda: reversed([1, 1, 1]),
}


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS.keys())
def test_progress_shows_without_a_step(make: Callable[[], Iterator[Any]]) -> None:
    """It differs after each step, and only then."""
    iterator = make()
    for _ in range(2):
        before = progress(iterator)
        assert progress(iterator) == before
        next(iterator)
        assert progress(iterator) != before


def test_an_outer_profiler_goes_on(line: Iterator[int]) -> None:
    """A profiler of the user's is still there after a run that ended early."""
    seen: list[str] = []

    def profile(frame: types.FrameType, event: str, arg: Any) -> None:
        seen.append(event)

    step = served(lambda x: x * next(LINE))
    outer = sys.getprofile()
    sys.setprofile(profile)
    try:
        step.prewarm(torch.ones(4, 3), sizes=(4,))
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(outer)
    assert next(line) == 1
