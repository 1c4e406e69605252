"""One capture: what it refuses and why, the garbage around it, and graphs that are recorded in the run that is
watched."""

import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from graphdispatch import CUDAGraphOptions, Graphed, Reason, eager_break, graphed
from graphdispatch.backends.cpu.backend import CPUGraph
from graphdispatch.proof.watch.effects import EffectRecorder

from ...behaviour.cases import Box
from ...helpers import Spy, assert_same, batch, catching, check_calls, check_rows, make

CACHE = torch.zeros(8, 3)


def _write_both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y.mul_(2)
    return x + 1


def _write_state(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    CACHE[4:].add_(1)
    return x + y


ALIASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], Any]]] = {
    "two halves, both written": (_write_both, lambda: torch.randn(8, 3).split(4)),
    "part of written state": (_write_state, lambda: (torch.randn(4, 3), CACHE[:4])),
}
"""Here the written elements are nobody else's, so that every value of a replay agrees with eager."""


@pytest.mark.parametrize("name", ALIASES)
def test_a_capture_from_arguments_that_share_written_memory_is_refused(name: str) -> None:
    """A graph would write to copies, which share no memory; the call runs eagerly, once, and says why."""
    fn, arguments = ALIASES[name]
    step = make(fn, dynamic={"x": 0, "y": 0}, sizes=(4,))
    states = x, y, _ = *arguments(), CACHE
    before = [state.clone() for state in states]
    got = step(x, y), *(state.clone() for state in states)
    assert step.last_decision.reason is Reason.ALIASED_ARGUMENTS
    assert "share with each other or with its own state" in step.last_decision.detail
    assert list(step.entries) == []
    for state, value in zip(states, before, strict=True):
        state.copy_(value)
    assert_same(got, (fn(x, y), *states))


def test_arguments_that_share_memory_which_is_only_read_are_captured() -> None:
    """Copies of memory that nobody writes are as good as the memory."""
    step = make(lambda x, y: x + y, dynamic={"x": 0, "y": 0})
    x = torch.randn(4, 3)
    assert torch.equal(step(x, x), x * 2)
    assert step.last_decision.reason is Reason.CAPTURED_NOW


Probe = Callable[[], bool]


def garbage() -> Probe:
    """Makes a cycle that nothing refers to; returns a function that tells whether it is still there."""
    cycle = Box()
    cycle.itself = cycle
    return partial(lambda ref: ref() is not None, weakref.ref(cycle))


@pytest.mark.parametrize("gc_disable", [True, False])
def test_prewarming_collects_after_the_last_capture(gc_disable: bool) -> None:
    """None is collected until the last capture is done."""
    is_kept, within = Spy(), Spy()

    def step(x: torch.Tensor) -> torch.Tensor:
        within.append(garbage())
        is_kept.append(not gc.isenabled() and all(is_there() for is_there in within))
        return x * 2

    if not gc_disable:
        gc.disable()  # Python itself collects nothing meanwhile
    try:
        options = CUDAGraphOptions(gc_disable=gc_disable)
        graphed(step, dynamic={"x": 0}, sizes=(2, 4), options=options).prewarm(torch.randn(2, 3))
        assert len(within) > 2
        assert all(is_kept)
        young: list[list[int]] = [[] for _ in range(5000)]  # more than the collector waits for
        assert any(is_there() for is_there in within) is not (gc_disable and bool(young))
    finally:
        gc.enable()


def _at_most_width(x: torch.Tensor) -> torch.Tensor:
    return torch.minimum(x, torch.tensor(x.size(-1), dtype=torch.float))  # made by TorchScript, unseen


def _all_above_three(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x > 3).all())
    return x * 2


def _row_of_table(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(3)[:2][(5 - x[:, 0]).int()]


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (torch.jit.script(_at_most_width), "that no operator of the call made"),
        (_all_above_three, "_assert_async"),
        (_row_of_table, "index"),
    ],
    ids=["refused", "asserted", "out of range"],
)
def test_an_error_that_the_callable_catches_is_one_for_a_graph(fn: Callable[..., torch.Tensor], said: str) -> None:
    """Else the graph would hold what the callable does instead, and agree with eager by chance at first."""
    step = graphed(catching(fn), dynamic={"x": 0}, sizes=(4,))
    reasons = check_calls(step, *(torch.full((4, 3), value) for value in (1.0, 2.0, 2.5, 2.0, 5.0)))
    assert {*reasons[1:]} == {Reason.CAPTURE_UNSAFE}
    assert said in step.explain(torch.ones(4, 3))


def test_a_view_that_cannot_be_made_is_no_such_error() -> None:
    """The geometry alone decides that, and it is the same for all batches."""

    def flat(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.t().view(-1)
        except RuntimeError:
            return x.t().reshape(-1)

    step = graphed(lambda x: x * 2 + flat(x)[-1] * 0, dynamic={"x": 0}, sizes=(4,))
    assert check_calls(step, *(torch.rand(4, 3) for _ in range(4)))[-1] is Reason.EXACT


def test_a_padded_write_that_cannot_be_saved_is_refused_though_the_callable_catches_that() -> None:
    """Else the padding's writes to state would stay."""
    state = torch.zeros(8, 3)

    def counted(x: torch.Tensor) -> torch.Tensor:
        with suppress(Exception):
            state[: len(x)].add_(1)
        return x * 2

    step = graphed(counted, dynamic={"x": 0}, sizes=(4,), options=CUDAGraphOptions(state_limit_bytes=state[:3].nbytes))
    reasons = check_calls(step, *torch.rand(4, 3, 3), fn=lambda x: x * 2)
    assert reasons[1] is Reason.STATE_TOO_LARGE
    assert state[:, 0].tolist() == [4, 4, 4, 0, 0, 0, 0, 0]


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number": lambda x: x.sum().item(),
    "places": lambda x: x.nonzero(),
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.numpy().sum(),
}


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_call_that_no_graph_holds_runs_once(read: Callable[[torch.Tensor], Any], rows: int) -> None:
    """What forbids a graph in the caller's own run ends the watch alone: no other run follows, what the call writes
    before it and after it is there once, and the reason has the line."""
    runs, state = Spy(), [torch.zeros(3), torch.zeros(3)]

    def plain(x: torch.Tensor, ticks: torch.Tensor) -> torch.Tensor:
        ticks.add_(1)
        read(x)
        ticks.mul_(2)
        return x.relu() + torch.rand(3) * ticks

    def fn(x: torch.Tensor) -> torch.Tensor:
        runs.append(len(runs))
        return plain(x, state[0])

    step, x = make(fn, sizes=(4,)), torch.randn(rows, 3)
    torch.manual_seed(0)
    got = step(x), torch.get_rng_state()
    torch.manual_seed(0)
    assert_same((*got, state[0]), (plain(x, state[1]), torch.get_rng_state(), state[1]))
    assert len(runs) == 1
    assert step.last_decision.reason is Reason.CAPTURE_UNSAFE
    assert "test_capture.py" in step.last_decision.detail


RUNS, COUNTED = Spy(), Box(count=0)


def _counts_in_a_recording(x: torch.Tensor) -> torch.Tensor:
    RUNS.append(1)
    COUNTED.count += len(RUNS) == 2
    return x * 2


def _raises_behind_a_break(x: torch.Tensor) -> torch.Tensor:
    RUNS.append(1)
    y = eager_break(torch.sin)(x * 2)
    if len(RUNS) == 3:
        raise ValueError
    return y * 2


GIVEN_UP: dict[str, tuple[Callable[..., torch.Tensor], str, Reason]] = {
    "state": (_counts_in_a_recording, "FULL", Reason.STATE_REBOUND),
    "pieces": (_raises_behind_a_break, "PIECEWISE", Reason.CAPTURE_FAILED),
    "outputs": (lambda x: (x * 2).repeat(2, 1)[: len(x) + 1], "FULL", Reason.OUTPUT_ROWS_UNKNOWN),
}


@pytest.mark.parametrize("name", GIVEN_UP)
def test_a_recording_that_is_given_up_is_released(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, whoever holds the error; and what it changed is put back."""
    fn, mode, reason = GIVEN_UP[name]
    released, reset = list[int](), CPUGraph.reset
    monkeypatch.setattr(CPUGraph, "reset", lambda graph: (released.append(1), reset(graph))[1])
    RUNS.clear()
    step = make(fn, sizes=(4,), mode=mode)
    step(batch(3))
    assert step.last_decision.reason is reason, step.last_decision
    assert released == [1]
    assert COUNTED.count == 0


STATE = torch.zeros(8, 3)


def _write_the_third(x: torch.Tensor) -> torch.Tensor:
    STATE[2 : x.shape[0]] = x[2:]
    return x + 1


def _fill_reserved(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x)


def _write_nothing_yet(x: torch.Tensor) -> torch.Tensor:
    STATE[:, 3:].add_(1)
    return x + 1


WATCHED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any], bool]] = {
    "it leaves its answer alone": (lambda x: x.relu() * 2, {}, False),
    "it writes what it made": (lambda x: (x + 1).mul_(2), {}, False),
    "it writes state": (_write_the_third, {"padding_writes": "allow"}, True),
    "it writes no element of state": (_write_nothing_yet, {}, True),
    "it reserves memory": (_fill_reserved, {}, True),
}
"""Callables, with options, and whether a run that is like a graph's is watched."""


@pytest.mark.parametrize("name", WATCHED)
def test_a_run_like_a_graph_is_watched_where_it_may_leave_effects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it leaves its answer alone, so does the run of another batch that takes the same path: nothing of that has
    to be undone, or compared besides."""
    fn, options, is_watched = WATCHED[name]
    step, made = make(fn, sizes=(4,), **options), list[EffectRecorder]()
    step(torch.randn(4, 3))
    watching = EffectRecorder.watching
    monkeypatch.setattr(EffectRecorder, "watching", lambda self, *how: made.append(self) or watching(self, *how))
    x = torch.randn(4, 3)
    assert_same(step(x), fn(x))
    assert step.last_decision.reason is Reason.VERIFIED_NOW
    assert bool(made) is is_watched


SIZES = (2, 4, 8)


def counted(run: Callable[[], object]) -> int:
    """How often ``tanh`` runs, which a callable here does once. A mode that passes it on calls another within it."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return sum(event.name == "aten::tanh" and not _is_within(event) for event in found.events())


def _is_within(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None and parent.name != event.name:
        parent = parent.cpu_parent
    return parent is not None


def served(fn: Callable[..., Tensor], **options: Any) -> Graphed[..., Tensor]:
    """The callable with graphs of these sizes."""
    return graphed(fn, dynamic={"x": 0}, sizes=SIZES, options=CUDAGraphOptions(**options))


def step_of_flag(flag: Path) -> Graphed[..., Tensor]:
    """A callable that does something else while a file exists, which no guard sees."""

    path = str(flag)

    def fn(x: Tensor) -> Tensor:
        if os.path.exists(path):
            if not os.path.getsize(path):
                raise ValueError(path)
            return torch.tanh(x * 2) + 1
        return torch.tanh(x * 2)

    return served(fn)


def test_a_further_size_takes_two_runs() -> None:
    """The one that is watched and recorded, and the replay that is compared with it; a user may want more warm-ups. A
    callable that draws is not timed besides."""
    for warmups, runs in ((1, 2), (3, 5)):
        step = served(lambda x: torch.tanh(x * 2 + torch.rand(3)), warmup_iterations=warmups)
        step.prewarm(torch.randn(8, 3), sizes=[8])
        assert counted(partial(step.prewarm, torch.randn(8, 3), sizes=[4])) == runs
        assert step.captured_sizes == (4, 8)


def test_a_run_that_is_not_like_the_first_is_watched_closely(tmp_path: Path) -> None:
    """Its graph holds what the callable does now, and not what it did for another size."""
    flag = tmp_path / "flag"
    step, x = step_of_flag(flag), torch.randn(8, 3)
    step.prewarm(x, sizes=[8])
    flag.write_text("more")
    step.prewarm(x, sizes=[4])
    assert step.captured_sizes == (4, 8)
    assert torch.equal(step(x[:4]), torch.tanh(x[:4] * 2) + 1)


def test_a_call_that_is_not_like_the_first_has_the_next_one_watched(tmp_path: Path) -> None:
    """The caller's own run is not made again; the next one is watched closely, and captured."""
    flag = tmp_path / "flag"
    step, x = step_of_flag(flag), torch.randn(8, 3)
    step.prewarm(x, sizes=[8])
    flag.write_text("more")
    reasons = check_rows(step, *[4] * 4)
    assert reasons[1:3] == [Reason.CAPTURE_WAITS, Reason.CAPTURED_NOW], reasons
    assert step.captured_sizes == (4, 8)


def test_an_error_of_a_recorded_run_is_the_callables(tmp_path: Path) -> None:
    """It is the reason why there is no graph of that size, as it would be from a run that is not recorded."""
    flag = tmp_path / "flag"
    step, x = step_of_flag(flag), torch.randn(8, 3)
    step.prewarm(x, sizes=[8])
    flag.touch()
    (why,) = step.prewarm(x, sizes=[4]).left_out.values()
    assert "ValueError" in why
    flag.unlink()
    assert step.captured_sizes == (8,)
    step.prewarm(x, sizes=[4])
    assert check_rows(step, 8, 4) == [Reason.EXACT] * 2


@pytest.mark.parametrize("kind", [torch.float64, torch.int64])
def test_a_value_that_changes_from_run_to_run_is_seen(kind: torch.dtype) -> None:
    """The run that is recorded agrees with itself; so the graph serves no batch, not even the same one, before another
    run agreed. Of integers a prewarm makes no other batch."""
    step, x = served(lambda x: torch.tanh(x.double()) + time.perf_counter_ns()), torch.ones(8, 3, dtype=kind)
    step.prewarm(x, sizes=[8])
    latest = time.perf_counter_ns()
    for _ in range(4):
        assert latest < step(x).min()
        latest = time.perf_counter_ns()
    assert step.stats.hits == 0


def test_what_the_first_run_alone_makes_is_not_recorded() -> None:
    """A cache that nobody sees is filled by the first run; its graph is that of a second one, which reads the cache."""
    made = functools.lru_cache(lambda: torch.full((3,), 2.0))
    step = served(lambda x: torch.tanh(x * made()))
    step.prewarm(torch.randn(8, 3), sizes=[8])
    assert check_rows(step, 8) == [Reason.EXACT]
    made().fill_(3.0)
    assert check_rows(step, 8) == [Reason.EXACT]


def test_a_run_ends_before_it_changes_what_nobody_can_put_back() -> None:
    """Code that the caller's run left out may do so for the rows of the graph: it is not run there."""
    local = threading.local()
    local.count = 0

    def count() -> None:
        local.count += 1

    def fn(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 4:
            count()
        return x * 2

    step = make(fn, sizes=(4,))
    assert check_rows(step, 3) == [Reason.STATE_UNSEEN]
    assert local.count == 0
