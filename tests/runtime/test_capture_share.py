"""When a size is captured: at its second miss within a window, and as the time of calls allows. What a batch takes
eagerly, and which batches a graph serves by that."""

import itertools
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.runtime import gain as gains
from graphdispatch.runtime.admission import Admission, CaptureBudget, Work
from graphdispatch.runtime.entry import CUDAGraphEntry
from graphdispatch.stats import Gain

from ..helpers import Clock, check_rows, double, with_options


@pytest.mark.parametrize(
    ("options", "misses", "now", "since"),
    [
        ((2,), [], 15, None),
        ((2,), [10], 15, 10),
        ((3,), [0, 100, 104], 110, 100),  # the last but one before now
        ((2, 50), [0], 50, 0),
        ((2, 50), [0], 51, None),  # beyond the window a miss counts no more
        ((1,), [0, 1], 1, 1),
    ],
)
def test_which_misses_count(options: tuple[int, ...], misses: list[int], now: int, since: int | None) -> None:
    """The latest of a key within the window, until it is captured: then it begins anew."""
    clock = Clock(0)
    admission = Admission(*options, clock=clock)
    for clock.now in misses:
        admission.look()
        admission.count_miss("key")
    clock.now = now
    admission.look()
    assert admission.since("key") == since
    assert len(admission._misses) == bool(misses and options[0] > 1)
    admission.forget("key")
    assert admission.since("key") == (now if options[0] == 1 else None)


def test_explain_is_no_use_of_a_graph() -> None:
    """It moves no window: a miss before it counts after it."""
    step = served([3])
    step._server.graphs.cache.admission.window = 2
    for _ in range(9):
        step.explain(torch.ones(3, 3))
    assert check_rows(step, 3) == [Reason.CAPTURED_NOW]


def test_memory_is_bounded_by_the_window() -> None:
    """Keys that last missed before it are forgotten."""
    clock = Clock(0)
    admission = Admission(2, 100, clock=clock)
    for clock.now in range(10_000):
        admission.look()
        admission.count_miss(clock.now)
    assert len(admission._misses) == 101


def served(sizes: Iterable[int], **options: object) -> Graphed[..., torch.Tensor]:
    """A step that was called once with a batch of each of these sizes, every answer compared with eager's."""
    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=tuple(range(1, 41)), **with_options(options))  # type: ignore[call-overload]
    check_rows(step, *sizes)
    step.check_integrity()
    return step


SCAN = [size for odd in range(4, 40) for size in (odd, 1, 2, 3)]
"""Odd sizes among usual ones."""


@pytest.mark.parametrize(
    ("sizes", "options", "kept", "evictions"),
    [
        ([*range(1, 11)] * 8, {"max_cached_graphs": 4}, [1, 2, 3, 4], 0),  # a cycle larger than the cache
        ([1, 2, 3] * 20 + [7, 8, 9] * 4, {"max_cached_graphs": 3}, [7, 8, 9], 3),
        ([1, 2, 3] * 4 + SCAN * 2, {"max_cached_graphs": 3}, [1, 2, 3], 0),
        ([1, 1, 2, 2, 1], {"max_cached_graphs": 1}, [2], 1),  # an evicted size begins anew
    ],
)
def test_new_habits_displace_old_ones(sizes: list[int], options: Any, kept: list[int], evictions: int) -> None:
    """When other sizes come from now on, the cache follows at their second miss within the window.

    Sizes that come twice, far apart, leave the graphs that are in use alone.
    """
    step = served(sizes, **options)
    assert [entry.size for entry in step.entries] == kept
    assert step.stats.evictions == evictions


CALLS_FOR_ONE = 10  # with a share of a tenth, where work takes as long as a call


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Python computes with the number of rows, so that each number has a run of its own."""
    return x * float(x.shape[0] > 0) + 0.0 * len(range(x.shape[0]))


def serve(fn: Callable[..., Any] = double, **options: Any) -> Graphed[..., Any]:
    """A served callable of whose calls each takes a second, and a capture or a comparison a second more."""
    options = {"capture_share": 1 / CALLS_FOR_ONE} | options
    step = graphed(fn, dynamic={"x": 0}, sizes=(1, 2, 3, 4, 8, 16), options=CUDAGraphOptions(**options))
    share = step._server.graphs.budget
    share.clock, pay = itertools.count().__next__, share.pay
    share.pay = lambda run, work: pay(lambda: (share.clock(), run())[1], work)
    return step


def settled(**options: Any) -> Graphed[..., Any]:
    """The same after two seconds of calls, with one graph."""
    step = serve(**options)
    assert check_rows(step, *[1] * 4) == [Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.EXACT]
    return step


def test_the_next_graph_waits_for_its_share() -> None:
    """Its capture does; once it is there, it serves."""
    step = settled()
    found = check_rows(step, *[3] * 60)
    until_captured = [Reason.FIRST_SIGHTING, *[Reason.CAPTURE_WAITS] * found.count(Reason.CAPTURE_WAITS)]
    assert found.count(Reason.CAPTURE_WAITS) >= CALLS_FOR_ONE - 3
    assert found[: len(until_captured)] == until_captured
    assert found[len(until_captured)] is Reason.CAPTURED_NOW
    assert set(found[len(until_captured) + 1 :]) <= {Reason.VERIFIED_NOW, Reason.EXACT}


def test_further_comparisons_wait_for_time() -> None:
    """Once a graph serves, others than the first ones are made as the time of calls allows."""
    step = serve(scaled)
    assert check_rows(step, *[16] * 4)[-1] is Reason.EXACT
    assert check_rows(step, 15, 14, 13) == [Reason.VERIFIED_NOW, Reason.CAPTURE_WAITS, Reason.CAPTURE_WAITS]
    assert "no time to compare" in step.explain(torch.randn(13, 3))
    assert Reason.VERIFIED_NOW in check_rows(step, *[16, 13] * 3 * CALLS_FOR_ONE)
    assert check_rows(step, 13) == [Reason.PADDED]


def test_what_waits_says_so() -> None:
    """``explain`` names the option and tells the calls until then, and ``strict`` lets such calls pass."""
    step = settled()
    check_rows(step, 3)
    text = step.explain(torch.randn(3, 3))
    check_rows(step, 3, 3)
    assert "raise capture_share" in text
    assert "time after some" in text
    assert text != step.explain(torch.randn(3, 3))
    assert Reason.CAPTURE_WAITS.leads_to_graph


@pytest.mark.parametrize("options", [{"capture_share": None}, {"capture_share": 4.0}, {"capture_after": 1}])
def test_nothing_waits_without_a_limit(options: dict[str, Any]) -> None:
    """Nor where captures are wanted at once, or where the limit is never reached."""
    step = serve(**options)
    assert Reason.CAPTURE_WAITS not in check_rows(step, *(1, 2, 3, 4) * 6)
    assert len(step.entries) == 4


def test_prewarm_does_not_wait() -> None:
    """Whatever was captured before; nor does ``verify_every``."""
    step = settled(verify_every=1)
    step.prewarm(torch.randn(1, 3))
    assert step.captured_sizes == (1, 2, 3, 4, 8, 16)
    assert check_rows(step, *[3] * 4) == [Reason.EXACT, Reason.VERIFIED_NOW] * 2


def test_all_that_wait_for_time_wait_together() -> None:
    """However many numbers of rows there are, each call brings the next look nearer."""
    step = settled(capture_share=0.01)
    check_rows(step, *range(9, 17), *range(9, 17))
    (group,) = step._route.groups
    waits = group.looks[Reason.CAPTURE_WAITS, 0]
    left = waits.left
    assert set(check_rows(step, *range(9, 17))) == {Reason.CAPTURE_WAITS}
    assert waits.left == left - 8


MS = 1e-3


class Service:
    """A budget with a clock of its own, and what its graphs have done so far."""

    def __init__(self, share: float | None = 0.1, first_capture_s: float = 0.0) -> None:
        self.now, self.replays, self.saved = 0.0, 0, 0.0
        self.budget = CaptureBudget(share, lambda: self.replays, lambda: self.saved)
        vars(self.budget).update(clock=lambda: self.now, first_capture_s=first_capture_s)

    def call(self, times: int, seconds: float = 4 * MS) -> None:
        """Eager calls."""
        for _ in range(times):
            started = self.budget.begin_eager()
            self.now += seconds
            self.budget.note_eager(started)

    def capture(self, seconds: float, *, is_good: bool = True) -> None:
        """A capture or a failed one, of so long beyond its eager run."""
        started = self.now

        def work() -> Any:
            self.now = started + seconds + 4 * MS
            return SimpleNamespace(entry=object() if is_good else None)

        self.budget.pay(work, Work.FIRST)

    def has_time(self, work: Work = Work.FURTHER, calls: int = 10**9, *, is_doubtful: bool = False) -> bool:
        """Whether nothing waits after so many calls of the size."""
        return self.budget.calls_until_time(work, calls, is_doubtful=is_doubtful) <= 0


@pytest.mark.parametrize(
    ("calls", "seconds", "is_soon"),
    [
        (2, 4 * MS, True),
        (2, 0.1 * MS, False),
        (2, 1 * MS, True),
        (1, 1 * MS, False),  # it loads and compiles: a later call may take a tenth of it
    ],
)
def test_the_first_capture_comes_soon(calls: int, seconds: float, is_soon: bool) -> None:
    """If it is expected to take no longer than sixty calls; else once calls of its size have taken as long."""
    service = Service(first_capture_s=15 * MS)
    service.call(calls, seconds)
    assert service.has_time(Work.FIRST, 1) is is_soon
    assert not Service(first_capture_s=1.0).has_time(Work.FIRST, 1)
    if seconds < 1 * MS:
        assert service.budget.calls_until_time(Work.FIRST, 1) == pytest.approx(149)
        assert not service.has_time(Work.FIRST, 149)
        assert service.has_time(Work.FIRST, 151)


def test_a_call_after_the_first_one_is_looked_at() -> None:
    """By what both take, the first capture is short enough to be made at once."""
    step = serve()
    step._server.graphs.budget.first_capture_s = 30
    assert check_rows(step, 2, 2, 2) == [Reason.FIRST_SIGHTING, Reason.CAPTURE_WAITS, Reason.CAPTURED_NOW]


def test_further_captures_wait_for_a_tenth_of_the_time() -> None:
    """The first one does not count."""
    service = Service()
    service.call(2)
    service.capture(100 * MS)
    assert service.has_time(Work.COMPARISON)
    service.budget._took_s[Work.FURTHER] = 100 * MS
    assert not service.has_time()
    service.call(int(service.budget.calls_until_time(Work.FURTHER, 10**9)) + 1)
    assert service.has_time()
    assert service.budget._served_s == pytest.approx(1.0, rel=0.01)
    service.capture(100 * MS)
    assert not service.has_time()


def test_a_capture_waits_until_its_size_would_have_saved_as_much() -> None:
    """By what the replays so far have saved on average, and a tenth of a call at least; first all of a call."""
    service = Service()
    service.call(1000)
    service.capture(100 * MS)
    service.budget._took_s[Work.FURTHER] = 40 * MS
    for replays, saved, calls in ((0, 0.0, 10), (100, 0.2, 20), (100, 0.0, 100), (100, -1.0, 100)):
        service.replays, service.saved = replays, saved
        assert not service.has_time(calls=calls - 1)
        assert service.has_time(calls=calls + 1) is (saved >= 0)


def test_what_graphs_save_pays_for_captures() -> None:
    """Besides the tenth; and replays count as time of calls, each as long as an eager one."""
    service = Service()
    service.call(2)
    service.capture(100 * MS)
    service.capture(100 * MS)
    assert not service.has_time()
    service.saved = 200 * MS
    assert service.has_time()
    service.saved, service.replays = 0.0, 500
    assert service.has_time()


def test_failures_use_up_nothing_that_others_need() -> None:
    """They have an account of their own, smaller than that of captures."""
    service = Service()
    service.call(10)
    for _ in range(3):
        service.capture(1.0, is_good=False)
    assert service.has_time()
    assert not service.has_time(is_doubtful=True)
    service.call(20_000)
    assert not service.has_time(is_doubtful=True)
    service.call(21_000)
    assert service.has_time(is_doubtful=True)


def learn(service: Service, seconds: float, reason: Reason = Reason.CAPTURED_NOW) -> None:
    """A capture of a prewarm that takes so long, and fails if it has another reason."""

    def work() -> Any:
        service.now += seconds
        return SimpleNamespace(entry=object() if reason is Reason.CAPTURED_NOW else None, reason=reason)

    service.budget.learn(work)


def test_a_prewarm_uses_up_nothing() -> None:
    """But shows how long captures take, good ones and others."""
    service = Service()
    service.call(100)
    learn(service, 1.0, Reason.CAPTURE_UNSAFE)
    assert service.has_time(Work.FIRST)
    assert not service.has_time(Work.FIRST, is_doubtful=True)
    learn(service, 0.03)
    assert service.has_time(Work.FIRST)
    learn(service, 0.05)
    assert not service.has_time(Work.FIRST)


def test_what_a_first_run_kept_a_prewarm_from_waits_for_little() -> None:
    """As many captures are made as it could not make, once calls have taken as long as that; until one fails once
    more."""
    service = Service()
    service.call(1)
    for _ in range(3):
        learn(service, 8 * MS, Reason.STATE_REBOUND)
    assert not service.has_time(Work.FIRST, is_doubtful=True)
    service.call(2)
    assert service.has_time(Work.FIRST, is_doubtful=True)
    service.capture(1.0)
    assert service.has_time(Work.FURTHER)
    service.capture(1.0, is_good=False)
    assert not service.has_time(Work.FURTHER)
    learn(service, 8 * MS, Reason.STATE_REBOUND)
    assert service.has_time(Work.FURTHER)
    learn(service, 10.0)
    assert not service.has_time(Work.FURTHER)


def test_a_batch_takes_what_the_ones_beside_it_take() -> None:
    """By its rows, until three runs of its own have shown more; the shortest run counts."""
    times = gains.EagerTimes()
    assert times.expected_s(4) is None
    for rows, seconds in ((8, 8.0), (2, 2.0), (8, 9.0)):
        times.note(rows, seconds)
    assert [times.expected_s(rows) for rows in (1, 2, 5, 8, 20)] == [2.0, 2.0, 5.0, 8.0, 8.0]
    for seconds in (1.5, 1.0, 1.25):
        times.note(5, seconds)
    assert times.expected_s(5) == 1.0
    assert times.is_sure(5)
    assert not times.is_sure(8)


@pytest.mark.parametrize(
    ("eager_ms", "replay_ms", "is_loss"),
    [(1.0, 0.5, False), (1.0, 1.04, False), (1.0, 1.06, True), (0.01, 0.05, False), (0.01, 0.2, True)],
)
def test_noise_is_no_loss(eager_ms: float, replay_ms: float, is_loss: bool) -> None:
    """A graph loses by a twentieth and 25 us, or by 100 us where calls are shorter than that."""
    assert gains.is_loss(Gain(eager_ms, replay_ms)) is is_loss
    assert gains.may_be_loss(Gain(eager_ms, replay_ms)) is (replay_ms >= 0.9 * eager_ms)


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A served callable whose graph of 8 takes 2 ms, eager 0.4 ms a row; and its group."""
    monkeypatch.setattr(gains.EagerTimes, "wants", lambda *_: False)
    step = graphed(double, dynamic={"x": 0}, sizes=(8,), options=CUDAGraphOptions(capture_share=None))
    step.prewarm(torch.ones(8, 3))
    (group,) = step._route.groups
    step.entries[0].gain, group.gain.times = Gain(3.2, 2.0), gains.EagerTimes()
    step.entries[0]._least_ms = math.inf  # of replays that the prewarm has timed
    for rows in (1, 8):
        for _ in range(3):
            group.gain.times.note(rows, 0.4 * MS * rows)
    group.hits.clear()
    return step


def test_a_graph_serves_where_it_is_faster(losing: Any) -> None:
    """Small batches stay eager, with both times and the remedy that fits the batch, and large ones are hits."""
    assert check_rows(losing, 8, 7, 6, 3, 2, 1) == [
        *(Reason.EXACT, Reason.PADDED, Reason.PADDED),
        *(Reason.NO_GAIN, Reason.NO_GAIN, Reason.NO_GAIN),
    ]
    text = losing.explain(torch.ones(2, 3))
    assert "the graph of 8 takes 2.000 ms, and an eager run of 2 rows 0.800 ms" in text
    assert "sizes=" in text

    # A nearer size is advised for a padded batch alone.
    losing.entries[0].gain = Gain(3.2, 4.0)
    losing.entries[0]._least_ms = 4.0
    assert "sizes=" in losing.explain(torch.ones(7, 3))
    assert "put more of the work into the call" in losing.explain(torch.ones(8, 3))


def test_a_batch_is_timed_again(losing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then the graph serves it once; where that shows that the graph is faster, it serves from then on."""
    is_loss = [True]
    for name in ("is_loss", "may_be_loss"):
        monkeypatch.setattr(gains, name, lambda _: is_loss[0])
    found = check_rows(losing, *[2] * 40)
    assert Reason.PADDED in found
    assert found.count(Reason.PADDED) < 10
    is_loss[0] = False
    found = check_rows(losing, *[2] * 200)
    assert set(found[100:]) == {Reason.PADDED}


def test_strict_serves_by_graphs_whatever_they_gain() -> None:
    """It promises a graph, and nobody judges what one gains."""
    step = graphed(double, dynamic={"x": 0}, sizes=(8,), strict=True)
    step.prewarm(torch.ones(8, 3))
    (group,) = step._route.groups
    step.entries[0].gain = Gain(3.2, 2.0)
    assert group.gain is None
    assert check_rows(step, 1) == [Reason.PADDED]


@pytest.mark.parametrize("is_short", [False, True])
def test_a_prewarm_makes_sure(is_short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where padding may make a graph slower, the smallest batch that it serves is timed; so is a batch smaller than all
    that were. A short replay of a full one is timed twice."""
    timed: list[int] = []
    replayed: list[int] = []
    replay = CUDAGraphEntry.time_replay
    monkeypatch.setattr(gains, "_SHORT_MS", 1e9 if is_short else 0.0)
    monkeypatch.setattr(gains, "may_be_loss", lambda _: True)
    monkeypatch.setattr(gains.EagerTimes, "wants", lambda *_: True)
    monkeypatch.setattr(gains.GainJudge, "timed", lambda judge, fn, rows: timed.append(rows) or fn)
    monkeypatch.setattr(
        CUDAGraphEntry, "time_replay", lambda entry, values, rows: replayed.append(rows) or replay(entry, values, rows)
    )
    step = graphed(double, dynamic={"x": 0}, sizes=(4, 8))
    step._graphs.clock = iter(range(10**6)).__next__
    for entry in (step.prewarm(torch.ones(8, 3)), *step.entries)[1:]:
        assert entry.gain is not None
    assert timed == [5, 1, 1]
    assert [rows for rows in replayed if rows in (4, 8)] == ([8, 4] if is_short else [])


def test_a_prewarm_times_only_what_the_callable_takes() -> None:
    """Lengths of an example may lie beyond the batches that are cut from it: in those they are shorter."""
    length = gd.Dim("length", sizes=[16, 32])
    step = graphed(
        lambda x, n: x.gather(1, (n - 1).view(-1, 1)).squeeze(1) * 2,
        dynamic={"x": {0: "batch", 1: length}, "n": 0},
        pad={"n": 1},
        sizes=(2, 4),
    )
    report = step.prewarm(torch.randn(4, 32), torch.tensor([32, 31, 30, 29]))
    assert len(report.captured) == 4


def test_what_waits_says_what_stands_against_it() -> None:
    """Where all captures of such calls have failed, their cause is the reason, also of sizes that were not tried."""

    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > -1e9 else x

    step = graphed(reads, dynamic={"x": 0}, sizes=(1, 2, 4), options=CUDAGraphOptions(capture_share=1e-9))
    step._server.graphs.budget.clock = iter(range(10**9)).__next__
    assert check_rows(step, 4, 4) == [Reason.FIRST_SIGHTING, Reason.CAPTURE_UNSAFE]
    assert check_rows(step, 2, 2, 1, 1)[1::2] == [Reason.CAPTURE_UNSAFE] * 2
    assert "item" in step.explain(torch.ones(2, 3))
