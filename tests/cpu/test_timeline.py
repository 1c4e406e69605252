"""The timeline: every call of the block is in the trace under its reason, and nothing of it stays behind."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch.memory.replay import ReplayPlan
from graphdispatch.serve.hits import Hit

from ..helpers import with_options

CALLS = (3, 3, 4, 3, 7, 7, 9, 3)


def served(**options: Any) -> gd.Graphed[..., Any]:
    """A callable with room for one graph."""
    layer = torch.nn.Linear(4, 4).eval().requires_grad_(False)
    return gd.graphed(layer, dynamic={"input": 0}, sizes=(4, 8), **with_options(options, max_cached_graphs=1))


def run(serve: Callable[..., Any], calls: tuple[int, ...] = CALLS) -> None:
    """Batches of these many rows."""
    for rows in calls:
        serve(torch.randn(rows, 4))


def events(trace: gd.Timeline, category: str) -> list[dict[str, Any]]:
    """The events of a category, by their beginning."""
    return [event for event in trace.to_dict()["traceEvents"] if event["cat"] == category]


def test_each_call_is_an_event_under_its_reason() -> None:
    """A hit is a replay; any other call has its reason, with what it did within; an eviction is a mark."""
    serve = served()
    with gd.timeline(serve) as trace:
        run(serve)
    stats = serve.stats
    assert stats.hits >= 1
    assert stats.evictions == 1
    assert Counter(event["name"] for event in events(trace, "call")) == {
        reason.value: number for reason, number in stats.reasons.items()
    }
    replays = events(trace, "replay")
    assert [(one["args"]["rows"], one["args"]["size"]) for one in replays] == [(3, 4)] * stats.hits
    work = events(trace, "capture")
    assert Counter(one["name"] for one in work)["capture"] == stats.captures == 2
    assert [one["args"] for one in events(trace, "eviction")] == [
        {
            "cause": "count",
            "freed_bytes": stats.last_evictions[0].freed_bytes,
            "replays": stats.last_evictions[0].replays,
        }
    ]
    for inner in work:
        around = [c for c in events(trace, "call") if c["ts"] <= inner["ts"]][-1]
        assert inner["ts"] + inner["dur"] <= around["ts"] + around["dur"]


def test_the_block_changes_no_answer_and_no_count() -> None:
    """The same calls with and without it count the same and answer the same."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4).eval().requires_grad_(False)
    plain, watched = (gd.graphed(layer, dynamic={"input": 0}, sizes=(4, 8)) for _ in range(2))
    batches = [torch.randn(rows, 4) for rows in CALLS * 2]
    with gd.timeline(watched):
        answers = [watched(batch) for batch in batches]
    assert all(torch.equal(plain(batch), answer) for batch, answer in zip(batches, answers, strict=True))
    one, other = plain.stats.to_dict(), watched.stats.to_dict()
    assert one | {"capture_time_ms": 0} == other | {"capture_time_ms": 0}


def test_calls_that_are_refused_at_once_are_events_too() -> None:
    """Also where the refusal was found before the block; after it, they are refused at once again."""

    class Reading(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(x.sum())

    serve, plain = (gd.graphed(Reading(), dynamic={"x": 0}, max_size=8) for _ in range(2))
    with torch.no_grad():
        for one in (serve, plain):
            run(one, (4,) * 200)
        with gd.timeline(serve) as trace:
            run(serve, (4,) * 30)
        run(plain, (4,) * 30)
        assert [event["name"] for event in events(trace, "call")] == ["capture_unsafe"] * 30
        kinds = [[type(hit) for hit in one._graphs.groups.popitem()[1].hits.values()] for one in (serve, plain)]
        assert kinds[0] == []
        assert len(kinds[1]) == 1
    assert serve.stats.reasons == plain.stats.reasons


def test_calls_of_always_new_kinds_are_events_too() -> None:
    """Also where they were found to be such before the block; after it, they are refused at once again."""
    serve = gd.graphed(lambda x, tag: x * 2, dynamic={"x": 0}, max_size=8)
    x = torch.randn(4, 3)
    with torch.no_grad():
        for number in range(200):
            serve(x, number)
        (spelling,) = serve._decode.spellings.values()
        before = spelling.resting
        assert before is not None
        with gd.timeline(serve) as trace:
            for number in range(200, 230):
                serve(x, number)
        assert [event["name"] for event in events(trace, "call")] == ["signature_changes"] * 30
        assert spelling.resting is not None
        assert type(spelling.resting.core) is type(before.core)
        misses = before.misses[0]
        serve(x, -1)
    assert spelling.resting.misses[0] == misses + 1


def test_calls_that_no_graph_can_take_are_events_too() -> None:
    """Also where that was known before the block by how they look."""
    serve = gd.graphed(lambda x, odd: x * 2, dynamic={"x": 0}, max_size=8)
    x, odd = torch.randn(4, 3), object()
    with torch.no_grad():
        for _ in range(9):
            serve(x, odd)
        with gd.timeline(serve) as trace:
            for _ in range(5):
                serve(x, odd)
        serve(x, odd)
    assert [event["name"] for event in events(trace, "call")] == ["unguarded_argument"] * 5
    assert serve.stats.reasons == {gd.Reason.UNGUARDED_ARGUMENT: 15}


@pytest.mark.parametrize("raises", [True, False])
def test_nothing_stays_behind(raises: bool) -> None:
    """After the block, also one that an error ended, the server is as before, and calls are no events."""
    serve = served()
    before, capturer = dict(vars(serve._server)), serve._graphs._capturer
    try:
        with gd.timeline(serve) as trace:
            run(serve, (3, 3, 3, 3))
            if raises:
                raise KeyError
    except KeyError:
        pass
    after = dict(vars(serve._server))
    assert {name: value for name, value in after.items() if name not in ("_numbers", "_kinds", "_has_fitted")} == {
        name: value for name, value in before.items() if name not in ("_numbers", "_kinds", "_has_fitted")
    }
    assert serve._graphs._capturer is capturer
    noted = len(trace.to_dict()["traceEvents"])
    run(serve)
    assert len(trace.to_dict()["traceEvents"]) == noted


def test_the_saved_trace_is_what_viewers_read(tmp_path: Path) -> None:
    """Chrome's trace event format: complete events with a duration, marks with a scope, in the order of time."""
    serve = served()
    with gd.timeline(serve) as trace:
        run(serve)
    trace.save(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document == trace.to_dict()
    times = [event["ts"] for event in document["traceEvents"]]
    assert times == sorted(times)
    for event in document["traceEvents"]:
        assert {"name", "cat", "ph", "ts", "pid", "tid", "args"} <= event.keys()
        assert (event["ph"] == "X" and event["dur"] > 0) or (event["ph"] == "i" and event["s"] == "t")
    with pytest.raises(gd.ConfigError, match="cannot be written"):
        trace.save(tmp_path / "nowhere" / "trace.json")


def ranges(profile: torch.profiler.profile) -> list[tuple[str, str]]:
    """The ranges of the library in the order of their beginnings, each with the range around it."""
    found = [event for event in profile.events() or () if event.name.startswith("graphdispatch: ")]
    around = [event.cpu_parent.name if event.cpu_parent is not None else "" for event in found]
    return [(event.name[15:], name.removeprefix("graphdispatch: ")) for event, name in zip(found, around, strict=True)]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_parts_of_calls_are_ranges_of_the_profiler(mode: str) -> None:
    """Copy-in, replay and copy-out lie within the serving of a hit, captures and comparisons within other calls."""
    serve = served(mode=mode)
    with gd.timeline(serve), torch.profiler.profile(acc_events=True) as profile:
        run(serve)
    parts = [("serve", ""), ("copy-in", "serve"), ("replay", "serve"), ("copy-out", "serve")]
    found = ranges(profile)
    hits, stats = serve.stats.hits, serve.stats
    assert hits > 0
    assert [one for one in found if one in parts] == parts * hits
    assert Counter(one for one in found if one not in parts) == {
        ("call", ""): stats.calls - hits,
        ("capture", "call"): stats.captures,
        ("verify", "call"): stats.verifications,
    }


def test_captures_are_ranges_of_the_profiler_without_a_timeline() -> None:
    """And comparisons; a hit has no range then, nor has anything where no profiler is on."""
    serve = served()
    with torch.profiler.profile(acc_events=True) as profile:
        run(serve)
    stats = serve.stats
    assert stats.hits > 0
    assert Counter(ranges(profile)) == {("capture", ""): stats.captures, ("verify", ""): stats.verifications}


def test_ranges_change_no_answer_and_nothing_of_them_stays() -> None:
    """Calls in the block agree with eager, also one that writes its argument; prepared replays are as before then."""

    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    serve = gd.graphed(step, dynamic={"x": 0}, sizes=(4,))
    with gd.timeline(serve), torch.profiler.profile(acc_events=True) as profile:
        for rows in (4, 4, 4, 4, 3, 3, 3):
            mine, eager = (torch.arange(8.0).view(4, 2)[:rows].clone() for _ in range(2))
            assert torch.equal(serve(mine), step(eager))
            assert torch.equal(mine, eager)
    assert ranges(profile).count(("copy-out", "serve")) == serve.stats.hits > 0
    with torch.profiler.profile(acc_events=True) as after:
        serve(torch.ones(4, 2))
    assert ranges(after) == []
    entries = serve.entries
    assert {type(plan) for entry in entries for plan in entry._plans.values()} <= {ReplayPlan}
    hits = [hit for group in serve._graphs.groups.values() for hit in group.hits.values() if type(hit) is Hit]
    assert hits
    assert {type(hit.plan) for hit in hits} == {ReplayPlan}


def test_a_wrapper_is_watched_too_and_several_share_a_trace() -> None:
    """A graph by descriptor, beside another callable."""
    serve, wrapper = served(), gd.CUDAGraphWrapper(torch.nn.Linear(4, 4).eval().requires_grad_(False))
    with gd.timeline(serve, wrapper) as trace, gd.cudagraph_context(gd.CUDAGraphMode.FULL, gd.BatchDescriptor(2)):
        for _ in range(4):
            wrapper(torch.randn(2, 4))
            serve(torch.randn(3, 4))
    assert len(events(trace, "replay")) == serve.stats.hits + wrapper.get_stats().hits > 1


def test_the_latest_events_are_kept() -> None:
    """At most ``max_events``; the trace says how many it lost."""
    serve = served()
    with gd.timeline(serve, max_events=5) as trace:
        run(serve, (3,) * 20)
    assert len(trace.to_dict()["traceEvents"]) == 5
    assert trace.dropped > 10
    assert repr(trace) == f"<Timeline 5 events, {trace.dropped} dropped>"


def test_what_cannot_be_watched_is_refused() -> None:
    """Nothing, something else, a callable that a block watches already; and that block goes on."""
    serve = served()
    for nothing, told in (((), "needs something to watch"), ((torch.relu,), "watches what graphed"), ((3,), "got 3")):
        with pytest.raises(gd.ConfigError, match=told), gd.timeline(*nothing):
            pass
    with pytest.raises(gd.ConfigError, match="max_events"), gd.timeline(serve, max_events=0):
        pass
    with gd.timeline(serve) as trace:
        with pytest.raises(gd.ConfigError, match=r"watches .* already"), gd.timeline(serve):
            pass
        run(serve)
    assert len(events(trace, "call")) > 3


def test_several_dynamic_dimensions_are_told_as_text() -> None:
    """Batch and length, each."""
    dynamic = {"input": {0: "batch", 1: gd.Dim("length", sizes=[8])}}
    serve = gd.graphed(torch.nn.ReLU(), dynamic=dynamic, sizes=(2, 4))
    with gd.timeline(serve) as trace:
        for _ in range(4):
            serve(torch.randn(3, 5))
    assert {(one["args"]["rows"], one["args"]["size"]) for one in events(trace, "replay")} == {("3 x 5", "4 x 8")}
