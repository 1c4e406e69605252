"""What a hit costs in calls, locks and memory, counted rather than timed."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

import graphdispatch
from graphdispatch.engines import BatchDescriptor

from ..behaviour.front_ends import FRONT_ENDS
from ..helpers import HAS_CORE, check_rows, make, serve_in_python

SIZE = 4
_PACKAGE = str(Path(graphdispatch.__file__).parent)


def settled(name: str = "graphed", latest: int = SIZE - 1) -> tuple[Any, Callable[[], Any]]:
    """A front end of a layer, which served ``latest`` rows, and a call of it that is a hit, padded if it pads."""
    front = FRONT_ENDS[name](torch.nn.Linear(3, 3).eval(), dynamic={"input": 0}, sizes=(SIZE,))
    for rows in (SIZE - 1, SIZE - 1, SIZE, SIZE - 1, latest):
        front(torch.randn(rows, 3))
    x = torch.randn(SIZE - 1, 3)
    return front.front, lambda: front._call((x,), {})


class Bound(NamedTuple):
    """A settled call, and how many functions of the package a hit of it may run below it, and how deep."""

    make: Callable[[], tuple[Any, Callable[[], Any]]]
    calls: int = 9
    depth: int = 3


BOUNDS = {
    "graphed": Bound(settled),
    "padding graphed": Bound(partial(settled, latest=SIZE)),
    "wrapper": Bound(partial(settled, "wrapper"), calls=11),  # two of which look up the class of the descriptor
    # Besides the hit, the batch is checked and placed by the configuration, and the device is timed.
    "manager": Bound(partial(settled, "execute_or_capture"), calls=49, depth=6),
}


IN_CORE = {
    "Server.serve_in_python",
    "ReplayPlan.run_in_python",
    "Server.may_need_gradients",
    "Signature.match",
    "StaticInputs.load",
}
"""What the core does itself in every hit, behind every front end."""


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits are served by Python."""
    serve_in_python(monkeypatch)


def own_calls(call: Callable[[], Any]) -> list[tuple[int, str]]:
    """The functions of the package that ``call`` runs, in order, each with its depth among them."""
    seen: list[tuple[int, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        # Comprehensions have frames of their own in some versions of Python and not in others.
        if event == "call" and is_own(frame) and not frame.f_code.co_name.startswith("<"):
            depth, outer = 0, frame.f_back
            while outer is not None:
                depth += is_own(outer)
                outer = outer.f_back
            seen.append((depth, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def is_own(frame: FrameType) -> bool:
    """Whether a frame runs a function of the package."""
    return frame.f_code.co_filename.startswith(_PACKAGE)


class CountedLock(threading._RLock):  # type: ignore[name-defined, misc]
    """A reentrant lock, in Python, that notes itself in a list whenever it is taken."""

    def __init__(self, taken: list["CountedLock"]) -> None:
        super().__init__()
        self._taken = taken

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._taken.append(self)
        return bool(super().acquire(blocking, timeout))

    def locked(self) -> bool:
        return bool(self._count)

    __enter__ = acquire


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[CountedLock]:
    """The locks that were taken, of all that are made in the test."""
    noted: list[CountedLock] = []
    for name in ("Lock", "RLock"):
        monkeypatch.setattr(threading, name, lambda: CountedLock(noted))
    return noted


@pytest.mark.skipif(not HAS_CORE, reason="the guards, too, are Python then")
@pytest.mark.usefixtures("in_python")
@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_a_hit_is_short(bound: Bound) -> None:
    """Below the call itself, a hit runs at most so many functions of the package, and at most so deep."""
    _, call = bound.make()
    below = [(depth, name) for depth, name in own_calls(call) if depth]
    assert "ReplayPlan.run_in_python" in {name for _, name in below}, "this is no hit"
    assert max(depth for depth, _ in below) <= bound.depth
    assert len(below) <= bound.calls, below


@pytest.mark.skipif(not HAS_CORE, reason="there is no core")
@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_a_hit_in_the_core_runs_no_python(bound: Bound) -> None:
    """Where there is a core, no front end's hit runs the Python that the core stands for."""
    _, call = bound.make()
    below = {name for depth, name in own_calls(call) if depth}
    assert "Server.step" not in below, "this is no hit"
    assert not below & IN_CORE


def test_a_hit_takes_one_lock(taken: list[CountedLock]) -> None:
    """It takes the pool's lock, once, and no other: so a hit goes on while another thread captures."""
    step, call = settled()
    wrapper, wrapped = settled("wrapper")
    for entry, run in ((step.entries[0], call), (wrapper.get_entry(BatchDescriptor(SIZE - 1)), wrapped)):
        replays = entry.replay_count
        taken.clear()
        run()
        assert taken == [entry.pool.lock]
        assert entry.replay_count == replays + 1


@pytest.mark.usefixtures("in_python")
def test_a_hit_makes_no_buffers() -> None:
    """A hit copies into the buffers that are there, and makes no memory but the output's copy."""
    step, call = settled()
    addresses, held = step.entries[0].input_addresses, step.memory_bytes
    with torch.profiler.profile() as profile:
        call()
    names = [event.name for event in profile.events()]
    assert names.count("aten::clone") == 1
    assert sum(name in ("aten::empty", "aten::empty_strided", "aten::zeros", "aten::full") for name in names) == 1
    assert (step.entries[0].input_addresses, step.memory_bytes) == (addresses, held)


def test_a_hit_of_modules_looks_at_nothing_in_each_call() -> None:
    """What its guard and its signature compare is enough: code of torch around modes compares errors, not arguments."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.LayerNorm(3)).eval()
    front = FRONT_ENDS["graphed"](model, dynamic={"input": 0}, sizes=(SIZE,))
    for rows in (SIZE, SIZE, SIZE, SIZE - 1, SIZE - 1):
        front(torch.randn(rows, 3))
    (group,) = front.front._route.groups
    assert [group.hits[rows].per_call for rows in (SIZE - 1, SIZE)] == [None, None]


def test_a_call_without_rows_becomes_a_hit() -> None:
    """Its graph serves every call, and no rows are to be shown of it."""
    step = make(dynamic={})
    check_rows(step, *[4] * 4)
    assert [list(group.hits) for group in step._route.groups] == [[1]]
