"""The core's profiler, which passes over what CodeTrace would: both note the same."""

import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphdispatch.errors import CaptureError
from graphdispatch.native.bound import CORE
from graphdispatch.state import trace as traced
from graphdispatch.state.trace import CodeTrace
from graphdispatch.state.walk import StateWalk

pytestmark = pytest.mark.skipif(CORE is None, reason="there is no core")


class Config:
    """An object that a format reads."""

    scale = 2.0
    shift = 1.0


class Block(torch.nn.Module):
    """Reads attributes, a global, and what a format names; hooks and inner functions run, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.config = Config()
        self.register_forward_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Some of all."""
        text = "{0.scale}".format(self.config), "{it.shift}".format_map({"it": self.config})
        return self.linear(x) * float(text[0]) + sum(float(part) for part in text) * FACTOR


FACTOR = 3.0


def notes_of(*calls: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """What a trace of some runs notes."""
    trace = CodeTrace(StateWalk(calls), **options)
    for call in calls:
        with trace:
            call()
    names = ("names", "library_names", "asked", "whole_types", "reads_whole", "is_blind", "seeds", "sets_generator")
    tables = {key: frozenset(found) for key, (_, found) in trace.variables.items()}
    return {name: getattr(trace, name) for name in names} | {"codes": trace.codes, "variables": tables}


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets traces do without the core from now on."""
    return lambda: monkeypatch.setattr(traced, "CORE", None)


def test_both_note_the_same(in_python: Callable[[], None]) -> None:
    """Names, code, variables, and a generator that is seeded."""
    block, x, generator = Block().eval(), torch.ones(2, 3), torch.Generator()
    calls: list[Callable[[], Any]] = [lambda: block(x), lambda: block(x), lambda: generator.manual_seed(1)]
    native = notes_of(*calls)
    in_python()
    assert native == notes_of(*calls)
    assert {"scale", "shift", "linear", "config"} <= native["names"]
    assert native["seeds"] is not None


def test_what_is_known_stays_in_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python hears of each function once."""
    block, x = Block().eval(), torch.ones(2, 3)
    heard: list[str] = []
    note = CodeTrace._note

    def listen(self: CodeTrace, frame: types.FrameType, event: str, arg: Any) -> None:
        heard.append(event)
        note(self, frame, event, arg)

    monkeypatch.setattr(CodeTrace, "_note", listen)
    trace = CodeTrace(StateWalk((block,)))
    counts = []
    for _ in range(3):
        heard.clear()
        with trace:
            block(x)
        counts.append(heard.count("call"))
    assert counts[0] > 5
    assert counts[1:] == [0, 0]


def test_an_error_of_the_note_ends_the_run() -> None:
    """Before code that would advance an iterator; nothing profiles the thread afterwards."""
    line = iter([1, 2])
    step = lambda: next(line)  # noqa: E731
    with pytest.raises(CaptureError), CodeTrace(StateWalk((step,)), spares_iterators=True):
        step()
    assert (sys.getprofile(), next(line)) == (None, 1)


def test_a_trace_within_a_trace() -> None:
    """The outer one notes what the inner one notes, and goes on after it."""
    outer, inner = CodeTrace(StateWalk(())), CodeTrace(StateWalk(()))

    def first() -> int:
        return 1

    def second() -> int:
        return 2

    with outer:
        with inner:
            first()
        second()
    assert sys.getprofile() is None
    assert {first.__code__, second.__code__} <= outer.codes
    assert first.__code__ in inner.codes
    assert second.__code__ not in inner.codes


@pytest.fixture
def profiled() -> Iterator[list[str]]:
    """The functions that a profiler of the user's has seen."""
    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None)
    yield seen
    sys.setprofile(None)


def test_a_profiler_of_the_user_goes_on(profiled: list[str]) -> None:
    """Within the trace and after it."""

    def seen_by_both() -> None: ...

    def seen_later() -> None: ...

    trace = CodeTrace(StateWalk(()))
    with trace:
        seen_by_both()
    seen_later()
    assert {"seen_by_both", "seen_later"} <= set(profiled)
    assert seen_by_both.__code__ in trace.codes


def test_a_profiler_goes_when_nobody_has_it() -> None:
    """It is freed with what it was given."""

    class Note:
        def __call__(self, *_: Any) -> None: ...

    assert CORE is not None
    profiler = CORE.Profiler(Note(), {}, frozenset())
    assert any(type(one) is Note for one in gc.get_objects())
    del profiler
    assert not any(type(one) is Note for one in gc.get_objects())


@pytest.mark.parametrize("given", [(None, [], frozenset()), (None, {}, set()), (None,)])
def test_wrong_inputs_are_refused(given: tuple[Any, ...]) -> None:
    """A TypeError says which."""
    assert CORE is not None
    with pytest.raises(TypeError):
        CORE.Profiler(*given)
