"""Captures made before batches need them: within budgets of time and memory, one at a time in pauses, other sizes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.engines import DispatchKey, Prewarmer, SizePredictor
from graphdispatch.errors import ConfigError
from graphdispatch.plan import Plan

SIZES = (1, 2, 4, 8, 16)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> torch.nn.Module:
    """Rows are independent of each other."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()


def make(model: torch.nn.Module, **options: Any) -> Graphed[..., Any]:
    """The model with the sizes of these tests."""
    return graphed(model, dynamic={"input": 0}, **({"sizes": SIZES} | options))


def serves(step: Graphed[..., Any], model: torch.nn.Module, rows: int) -> Reason:
    """The reason of a call of so many rows, whose answer is eager's."""
    x = torch.randn(rows, 8)
    torch.testing.assert_close(step(x), model(x))
    assert step.last_decision is not None
    return step.last_decision.reason


def test_the_report_says_what_was_captured(model: torch.nn.Module) -> None:
    """Largest first; all of it is served at once."""
    step = make(model)
    report = step.prewarm(torch.randn(4, 8))
    assert report.captured == {CUDAGraphMode.FULL: (16, 8, 4, 2, 1)}
    assert (report.left_out, report.memory_bytes) == ({}, step.memory_bytes)
    assert "5 FULL graphs captured: 16 8 4 2 1" in str(report)
    assert [serves(step, model, rows) for rows in (1, 3, 16)] == [Reason.EXACT, Reason.PADDED, Reason.EXACT]
    assert step.prewarm(torch.randn(4, 8)).captured == {CUDAGraphMode.FULL: ()}


def test_a_budget_of_time_leaves_sizes_for_later(model: torch.nn.Module) -> None:
    """Nothing is begun after the time is up; what was left out is captured as it comes."""
    step = make(model, options=CUDAGraphOptions(capture_after=1))
    report = step.prewarm(torch.randn(4, 8), max_seconds=1e-9)
    assert report.captured == {CUDAGraphMode.FULL: ()}
    assert [size for _, size in report.left_out] == [16, 8, 4, 2, 1]
    assert "max_seconds" in str(report)
    assert serves(step, model, 8) is Reason.CAPTURED_NOW


def test_a_size_that_cannot_be_captured_is_left_out_with_its_reason() -> None:
    """The report has the reason for programs beside the text for people; a budget is no failure."""
    report = graphed(lambda x: x * x.sum().item(), dynamic={"x": 0}, sizes=(2,)).prewarm(torch.randn(2, 8))
    assert report.reasons == {(CUDAGraphMode.FULL, 2): Reason.CAPTURE_UNSAFE}
    assert "item" in report.left_out[CUDAGraphMode.FULL, 2]
    assert make(torch.nn.Linear(8, 8)).prewarm(torch.randn(4, 8), max_seconds=1e-9).reasons == {}


@pytest.mark.parametrize("by_option", [True, False])
def test_a_budget_of_memory_is_kept(model: torch.nn.Module, by_option: bool) -> None:
    """Sizes that would pass the limit, which is the configured one too, are left out, and smaller ones captured."""
    free = make(model)
    free.prewarm(torch.randn(4, 8), sizes=(8,))
    limit = free.memory_bytes
    step = make(model, options=CUDAGraphOptions(memory_budget_bytes=limit)) if by_option else make(model)
    report = step.prewarm(torch.randn(4, 8), **({} if by_option else {"max_bytes": limit}))
    assert list(report.left_out) == [(CUDAGraphMode.FULL, 16)]
    assert report.captured == {CUDAGraphMode.FULL: (8, 4, 2, 1)}
    assert step.memory_bytes <= limit
    assert step.stats.evictions == 0
    assert f"{limit} bytes" in str(report)


@pytest.mark.parametrize("bad", [{"max_seconds": 0}, {"max_bytes": -1}, {"max_seconds": "soon"}, {"sizes": (3,)}])
def test_bad_limits(model: torch.nn.Module, bad: dict[str, Any]) -> None:
    """Each is named; nothing was captured, and the object goes on."""
    step = make(model)
    with pytest.raises(ConfigError, match=next(iter(bad))):
        step.prewarm(torch.randn(4, 8), **bad)
    assert step.entries == []
    serves(step, model, 4)


def test_the_progress_bar_shows_bytes(model: torch.nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    """One bar, which counts the graphs and tells the memory held."""
    pytest.importorskip("tqdm")
    make(model).prewarm(torch.randn(4, 8), progress=True)
    shown = capsys.readouterr().err
    assert "5/5" in shown
    assert "MiB" in shown


def test_an_estimate_leaves_no_trace(model: torch.nn.Module) -> None:
    """Nothing is captured or counted, and the figure is near what prewarm then takes."""
    step = make(model)
    expected = step.estimate_memory(torch.randn(4, 8))
    assert (step.entries, step.stats.captures, step.stats.calls) == ([], 0, 0)
    step.prewarm(torch.randn(4, 8))
    assert expected.low <= step.memory_bytes <= expected.high


def test_one_size_in_a_pause(model: torch.nn.Module) -> None:
    """An example is kept when asked for; a size is then captured without a call of it."""
    step = make(model)
    serves(step, model, 4)
    assert not step.capture_size(8)  # there is no example
    step.keep_examples()
    serves(step, model, 2)
    calls = step.stats.calls
    assert step.capture_size(8)
    assert step.capture_size(8)
    assert (step.stats.captures, step.stats.calls) == (1, calls)
    found = {serves(step, model, rows) for rows in (5, 6, 7, 8)}
    assert found <= {Reason.PADDED, Reason.EXACT}
    with pytest.raises(ConfigError, match="1 to 16"):
        step.capture_size(17)


def test_other_sizes_keep_the_graphs_that_stay(model: torch.nn.Module) -> None:
    """The table changes whole; a graph captured before its size came in serves at once; the others are released."""
    step = make(model)
    step.prewarm(torch.randn(4, 8))
    step.keep_examples()
    serves(step, model, 17)  # above the largest: still an example
    assert step.capture_size(12) is (12 in [entry.size for entry in step.entries])
    kept = {entry.size: entry for entry in step.entries}
    step.use_sizes((4, 12, 16))
    assert step.sizes == (4, 12, 16)
    assert all(kept[entry.size] is entry for entry in step.entries)
    assert {entry.size for entry in step.entries} >= {4, 16}
    for rows, size in ((2, 4), (4, 4), (13, 16), (16, 16)):
        serves(step, model, rows)  # a batch smaller than all before is compared
        assert serves(step, model, rows) in (Reason.PADDED, Reason.EXACT)
        assert step.last_decision is not None
        assert step.last_decision.size == size
    step.check_integrity()


def test_sizes_captured_ahead_serve_when_they_come_in(model: torch.nn.Module) -> None:
    """The order of a plan that changes while serving: capture first, then decide by the new sizes."""
    step = make(model, options=CUDAGraphOptions(capture_after=2))
    step.keep_examples()
    serves(step, model, 5)
    assert step.capture_size(12)
    step.use_sizes((4, 12, 16))
    assert serves(step, model, 11) is Reason.PADDED
    assert step.stats.captures == 1


def test_a_larger_largest_size_begins_anew(model: torch.nn.Module) -> None:
    """The buffers are too small then, so that all graphs go; bad sizes change nothing."""
    step = make(model, max_size=64)
    step.prewarm(torch.randn(4, 8))
    with pytest.raises(ConfigError, match="increasing"):
        step.use_sizes((4, 2))
    assert len(step.entries) == 5
    step.use_sizes((4, 32))
    assert step.entries == []
    step.prewarm(torch.randn(4, 8))
    assert serves(step, model, 30) is Reason.PADDED


class Clock:
    """Seconds by hand."""

    now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


class Slow:
    """A callable whose captures take 50 ms of the clock."""

    def __init__(self, step: Graphed[..., Any], clock: Clock) -> None:
        self.step, self.clock = step, clock

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Those of the callable."""
        return self.step.captured_sizes

    def capture_size(self, size: int) -> bool:
        """As the callable does, and 50 ms later."""
        self.clock.now += 0.05
        return self.step.capture_size(size)


def test_the_sizes_that_come_next_are_captured_in_pauses(model: torch.nn.Module) -> None:
    """While steps follow each other nothing is captured; in a pause the expected sizes are, as far as is allowed."""
    clock = Clock()
    prewarmer = Prewarmer(SizePredictor(SIZES), clock=clock, allowance_ms=170.0, budget=0.0)
    step = make(model, options=CUDAGraphOptions(capture_after=100))
    step.keep_examples()
    slow = Slow(step, clock)
    for rows in (2, 4, 2, 4, 2, 4, 2, 4, 2, 4):
        prewarmer.step_started(DispatchKey(rows, rows))
        serves(step, model, rows)
        prewarmer.step_ended()
        clock.now += 0.01
        assert prewarmer.capture_one(slow) is None
    assert step.captured_sizes == ()
    clock.now += 10.0
    found = [prewarmer.capture_one(slow) for _ in range(4)]
    assert sorted(found[:2], key=str) == [2, 4]
    assert found[2:] == [None, None]  # 120 ms are enough for two
    assert step.captured_sizes == (2, 4)
    assert serves(step, model, 4) in (Reason.EXACT, Reason.VERIFIED_NOW)


def test_a_callable_that_calls_itself_keeps_its_own_decision() -> None:
    """The latest decision is that of the call that ended last."""

    def outer(x: torch.Tensor, again: bool) -> Any:
        return step(x, False) if again else x * 2

    step = graphed(outer, dynamic={"x": 0}, sizes=(4,), options=CUDAGraphOptions(capture_after=9))
    step(torch.randn(5, 3), True)
    assert step.last_decision is not None
    assert step.last_decision.rows == 5


def test_a_plan_brings_the_sizes_of_each_mode(model: torch.nn.Module) -> None:
    """Uniform decode and mixed batches are padded to the sizes that were planned for them."""
    plan = Plan(
        mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        graphs={CUDAGraphMode.FULL: (3, 6), CUDAGraphMode.PIECEWISE: (5, 10, 12)},
    )
    is_decode = True
    step = graphed(
        model,
        dynamic={"input": 0},
        sizes=plan,
        mode="FULL_AND_PIECEWISE",
        uniform_decode=lambda *args, **kwargs: is_decode,
    )
    report = step.prewarm(torch.randn(4, 8))
    assert report.captured == {CUDAGraphMode.FULL: (6, 3), CUDAGraphMode.PIECEWISE: (12, 10, 5)}
    served = {}
    for is_decode in (True, False):
        for rows in (2, 4, 6, 7, 11):
            serves(step, model, rows)
            assert step.last_decision is not None
            served[is_decode, rows] = (step.last_decision.mode, step.last_decision.size)
    full, piecewise, none = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
    assert served == {
        (True, 2): (full, 3),
        (True, 4): (full, 6),
        (True, 6): (full, 6),
        (True, 7): (none, 7),
        (True, 11): (none, 11),
        (False, 2): (piecewise, 5),
        (False, 4): (piecewise, 5),
        (False, 6): (piecewise, 10),
        (False, 7): (piecewise, 10),
        (False, 11): (piecewise, 12),
    }
    step.use_sizes((6, 12))  # larger than any for decode: the buffers must grow
    assert step.sizes == (6, 12)
    step.prewarm(torch.randn(4, 8))
    for is_decode in (True, False):  # noqa: B007 (the closure reads it)
        assert serves(step, model, 11) is Reason.PADDED
