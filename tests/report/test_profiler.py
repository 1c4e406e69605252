"""The parts of a call are ranges of torch's profiler while one is on in the thread, and cost nothing elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphdispatch as gd

from ..helpers import check_rows, frames_of, in_threads

PARTS = [(f"{part} decode 4", "serve decode") for part in ("copy-in", "replay", "copy-out")]
HIT = [("serve decode", ""), *PARTS]


def decode(x: torch.Tensor) -> torch.Tensor:
    """Two operators."""
    return torch.relu(x) * 2


def ranges(profile: Any) -> list[tuple[str, str]]:
    """The ranges of the library in the order of their beginnings, each with the range around it."""
    events = getattr(profile, "events", lambda: profile.function_events)()
    found = [event for event in events if event.name.startswith("graphdispatch: ")]
    around = [event.cpu_parent.name if event.cpu_parent is not None else "" for event in found]
    return [(event.name[15:], name.removeprefix("graphdispatch: ")) for event, name in zip(found, around, strict=True)]


def profiled(serve: Callable[..., Any], calls: int, rows: int = 3) -> list[tuple[str, str]]:
    """The ranges of so many calls of so many rows."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        for _ in range(calls):
            serve(torch.randn(rows, 4))
    return ranges(profile)


def settled(**options: Any) -> gd.Graphed[..., Any]:
    """A callable that serves three rows by a graph of four."""
    serve = gd.graphed(decode, dynamic={"x": 0}, sizes=(4,), **options)
    check_rows(serve, *[3] * 4, width=4)
    return serve


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_the_parts_of_a_hit_lie_within_its_serving(mode: str) -> None:
    """Copy-in, replay and copy-out, in this order, for each of three calls."""
    assert profiled(settled(mode=mode), 3) == HIT * 3


def test_captures_and_comparisons_lie_within_the_calls_that_made_them() -> None:
    """The first call runs eagerly, the second captures, the third compares."""
    serve = gd.graphed(decode, dynamic={"x": 0}, sizes=(4,))
    call, made = ("serve decode", ""), [one for one in profiled(serve, 3) if one[1] in ("", "serve decode")]
    assert made == [call, call, ("capture decode 4", "serve decode"), call, ("verify decode 4", "serve decode")]


def test_a_hit_without_the_native_core_has_the_same_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python serves all calls then."""
    serve = settled()
    monkeypatch.setattr("graphdispatch.runtime.server.Server.serve", lambda self, *call: self.serve_in_range(*call))
    monkeypatch.setattr("graphdispatch.runtime.replay.ReplayPlan.run", lambda self, *call: self.run_in_python(*call))
    assert profiled(serve, 2) == HIT * 2


def test_a_profile_changes_no_answer_and_no_count() -> None:
    """Also of a call that writes its argument."""
    plain, watched = (gd.graphed(lambda x: (x.add_(1), x * 2)[1], dynamic={"x": 0}, sizes=(4,)) for _ in range(2))
    for rows in (4, 4, 4, 4, 3, 3, 3):
        mine, theirs = (torch.arange(8.0).view(4, 2)[:rows].clone() for _ in range(2))
        expected = plain(theirs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            assert torch.equal(watched(mine), expected)
        assert torch.equal(mine, theirs)
    one, other = plain.stats.to_dict(), watched.stats.to_dict()
    assert one | {"capture_time_ms": 0} == other | {"capture_time_ms": 0}


def test_a_capture_sees_no_range_as_an_operator() -> None:
    """A served callable within a captured one: the graph holds what it holds without a profiler."""
    serve = gd.graphed(decode, dynamic={"x": 0}, sizes=(4,))

    def more(x: torch.Tensor) -> torch.Tensor:
        return serve(x) + 1

    more.__qualname__ = "more"
    options = gd.CUDAGraphOptions(capture_share=None)
    plain, watched = (gd.graphed(more, dynamic={"x": 0}, sizes=(4,), options=options) for _ in range(2))
    check_rows(plain, *[3] * 3, width=4)
    assert ("serve decode", "capture more 4") in profiled(watched, 3)
    graphs = [one.entries[0].graph for one in (plain, watched)]
    assert [[step.func for step in one.steps] for one in graphs] == [[step.func for step in graphs[0].steps]] * 2


def test_a_thread_without_a_profiler_takes_no_part_in_one() -> None:
    """After a profile, and while another thread has one on, a call is served as if there were none."""
    serve, x, seen = settled(), torch.randn(3, 4), []

    def call() -> None:
        seen.extend(frames_of(lambda: serve(x)))

    assert profiled(serve, 1) == HIT
    call()
    assert profiled(lambda _: in_threads(call), 1) == []
    assert serve.stats.hits == 4
    assert not {name for name in seen if "range" in name}
