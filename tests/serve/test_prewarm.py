"""Captures made before batches need them: within budgets of time and memory, one at a time in pauses, other sizes."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, Graphed, Pad, Reason, graphed
from graphdispatch.backends import Pool, get_backend
from graphdispatch.demo.decoder import PRESETS, Decoder
from graphdispatch.engines import named_sizes
from graphdispatch.errors import CaptureError, ConfigError
from graphdispatch.memory.cache import EntryMemory, MemoryReport
from graphdispatch.serve.prewarm import _extrapolate

SIZES = (1, 2, 4, 8, 16)


@pytest.fixture
def model() -> torch.nn.Module:
    """Rows are independent of each other."""
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()


def make(model: torch.nn.Module, **options: Any) -> Graphed[..., Any]:
    """The model with the sizes of these tests."""
    return graphed(model, dynamic={"input": 0}, **({"sizes": SIZES} | options))


def serves(step: Graphed[..., Any], model: torch.nn.Module, rows: int) -> Reason:
    """The reason of a call of so many rows, whose answer is eager's."""
    x = torch.randn(rows, 8)
    torch.testing.assert_close(step(x), model(x))
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


@pytest.mark.parametrize("fn", [lambda input: input + input.long(), lambda input: input * 2.0], ids=["limited", "any"])
@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_one_size_ahead_is_proven_with_enough_batches(fn: Callable[..., Any], kind: torch.dtype) -> None:
    """Where a proof takes its numbers from batches, too: a padded one is served once ``freeze`` forbids comparisons."""
    step = graphed(fn, dynamic={"input": 0}, sizes=[8])
    step.prewarm((torch.rand(4, 3) * 9).to(kind))
    step.freeze()
    x = (torch.rand(1, 3) * 9).to(kind)
    assert torch.equal(step(x), fn(x))
    assert step.last_decision.reason is Reason.PADDED


class Lazy(torch.nn.Module):
    """Makes a table at the first call of each size; with ``keeps`` it keeps its input, too."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps, self.kept, self.made = keeps, None, 0
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The input, scaled."""
        if self.keeps:
            self.kept = input
        if len(input) not in self.tables:
            self.tables[len(input)] = torch.full((8,), 2.0)
            self.made += 1
        return input * self.tables[len(input)]


def test_what_the_first_run_alone_makes_stays() -> None:
    """Tables of each size are made once; graphs that were made before a later table was there are captured anew."""
    model = Lazy(keeps=False)
    step = graphed(model, dynamic={"input": 0}, sizes=(1, 2))
    assert step.prewarm(torch.randn(2, 8)).captured == {CUDAGraphMode.FULL: (2, 1)}
    assert model.made == 2
    assert [serves(step, model, rows) for rows in (2, 1, 2)] == [Reason.EXACT] * 3


def test_what_every_run_changes_is_put_back() -> None:
    """An input that is kept is another one in each run."""
    model = Lazy(keeps=True)
    step = graphed(model, dynamic={"input": 0}, sizes=(1, 2))
    report = step.prewarm(torch.randn(2, 8))
    assert set(report.reasons.values()) == {Reason.STATE_REBOUND}
    assert (model.kept, model.made, model.tables) == (None, 0, {})


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


def test_one_size_in_a_pause(model: torch.nn.Module) -> None:
    """The example of a prewarm is kept; a size is then captured without a call of it."""
    step = make(model)
    serves(step, model, 4)
    assert not step.capture_size(8)  # there is no example
    step.prewarm(torch.randn(2, 8), sizes=())
    calls = step.stats.calls
    assert step.capture_size(8)
    assert step.capture_size(8)
    assert (step.stats.captures, step.stats.calls) == (1, calls)
    found = {serves(step, model, rows) for rows in (5, 6, 7, 8)}
    assert found <= {Reason.PADDED, Reason.EXACT}
    with pytest.raises(ConfigError, match=r"size must be one of \(1, 2, 4, 8, 16\), got 17"):
        step.capture_size(17)


LADDER = sorted(named_sizes("vllm", 64), reverse=True)


def constants(x: torch.Tensor) -> torch.Tensor:
    """A constant of each size's own, in proportion to it."""
    return x * torch.arange(len(x) * 8.0).view(-1, 8)


def decoder() -> tuple[Decoder, Graphed[..., Any], dict[str, torch.Tensor]]:
    """The demo's decoder, what serves it, and rows in places of their own."""
    model = Decoder(PRESETS["tiny"], slots=8)
    row = torch.arange(LADDER[0])
    example = {"token_ids": torch.zeros_like(row), "slots": row // 64, "positions": row % 64}
    options, pad = CUDAGraphOptions(padding_writes="allow"), {"slots": Pad.value(model.scratch_slot)}
    step = graphed(model, dynamic=dict.fromkeys(example, 0), pad=pad, sizes=LADDER[::-1], options=options)
    return model, step, example


@pytest.mark.parametrize("fn", [None, constants, lambda x: x.cumsum(0)], ids=["decoder", "constants", "ascending"])
def test_an_estimate_is_near_what_is_measured(fn: Callable[..., Any] | None) -> None:
    """From two captures follows, within 15 %, what all sizes hold."""
    if fn is None:
        _, step, example = decoder()
    else:
        step, example = graphed(fn, dynamic={"x": 0}, sizes=LADDER[::-1]), {"x": torch.randn(LADDER[0], 8)}
    estimate = step.estimate_memory(**example)
    step.prewarm(**example)
    assert estimate.total == pytest.approx(step.memory_bytes, rel=0.15)
    assert list(estimate.per_size) == LADDER
    assert json.loads(json.dumps(estimate.to_dict()))["total"] == estimate.total


def test_an_estimate_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """State, random numbers, statistics, cache and pool are as before; nothing was counted, and the pool of the trial
    was closed, without which a device would not give it back."""
    closed: list[Pool] = []
    monkeypatch.setattr(type(get_backend("cpu").make_pool()), "close", lambda pool: closed.append(pool))
    model, step, example = decoder()
    cache, rng = model.cache_keys.normal_().clone(), torch.get_rng_state()
    step.estimate_memory(**example)
    assert torch.equal(model.cache_keys, cache)
    assert torch.equal(torch.get_rng_state(), rng)
    assert (step.memory_bytes, step.entries, step.stats.captures, step.stats.calls) == (0, [], 0, 0)
    assert [pool is step._graphs.pool for pool in closed] == [False]
    (group,) = step._graphs.groups.values()
    assert (group.entries, len(group.failures), group.misses.total()) == ({}, 0, 0)


def test_what_cannot_be_captured_has_no_estimate() -> None:
    """The error has the reason of the capture, and names the size."""
    step = graphed(lambda x: x * x.sum().item(), dynamic={"x": 0}, sizes=(32, 64))
    with pytest.raises(CaptureError, match=r"no graph of 64 rows, so no estimate: .*item") as caught:
        step.estimate_memory(torch.randn(64, 8))
    assert caught.value.reason is Reason.CAPTURE_UNSAFE
    with pytest.raises(ConfigError, match="sizes must be one or more sizes of at least 1 row"):
        step.estimate_memory(torch.randn(64, 8), sizes=())
    assert step.stats.capture_failures == 0


def report(*entries: EntryMemory, pool: int) -> MemoryReport:
    """What a trial measured, with 100 bytes of static inputs."""
    own, driver = (sum(getattr(entry, what) for entry in entries) for what in ("own", "driver"))
    return MemoryReport(entries, pool, 100, own, driver)


def test_what_the_driver_does_once_is_not_expected_again() -> None:
    """A large first share of the driver counts for the first alone."""
    first, second = EntryMemory(8, "FULL", 0, 900, 8), EntryMemory(4, "FULL", 0, 30, 4)
    estimate = _extrapolate([8, 4, 2], [report(first, pool=1000), report(second, first, pool=1000)])
    assert estimate.per_size == {8: 900, 4: 30, 2: 30}
    assert estimate.total == 100 + 1000 + 900 + 30 + 30


def test_a_growing_pool_is_expected_to_follow_the_rows() -> None:
    """What the second size adds to the pool, smaller ones add in proportion."""
    first, second = EntryMemory(8, "FULL", 80, 0, 8), EntryMemory(4, "FULL", 40, 0, 4)
    estimate = _extrapolate([8, 4, 2], [report(first, pool=1000), report(second, first, pool=1600)])
    assert estimate.per_size == {8: 80, 4: 640, 2: 20 + 300}


def surprise(x: torch.Tensor) -> torch.Tensor:
    """For batches below the two largest sizes, a constant that their graphs do not have."""
    return x + (0 * torch.arange(2.0**15)[:8] if len(x) <= 4 else 0)


def needs_large(x: torch.Tensor) -> torch.Tensor:
    """No graph can hold it at the largest size."""
    return surprise(x) if len(x) < 16 else x * x.sum().item()


def prewarmed(
    fn: Callable[..., Any], sizes: Sequence[int], budget: int | None
) -> tuple[tuple[int, ...], list[int], int]:
    """The sizes that a prewarm captures within a budget, those that do not fit, and the bytes held."""
    step = graphed(fn, dynamic={"x": 0}, sizes=sorted(sizes), backend="cpu")
    done = step.prewarm(x=torch.randn(max(sizes), 8), max_bytes=budget)
    left_out = [size for (_, size), why in done.left_out.items() if "would not fit" in why]
    return done.captured[CUDAGraphMode.FULL], left_out, done.memory_bytes


def test_capturing_stops_before_the_budget() -> None:
    """What is held stays within the budget, most of which is used, and the sizes that did not fit are named."""
    *_, budget = prewarmed(constants, LADDER, None)
    budget = budget * 2 // 3
    captured, left_out, held = prewarmed(constants, LADDER, budget)
    assert sorted([*captured, *left_out], reverse=True) == LADDER
    assert left_out
    assert 0.8 * budget < held <= budget


def test_a_graph_that_takes_more_than_was_expected_goes_again() -> None:
    """What is held stays within the budget, though the graph before it took far less."""
    *_, enough = prewarmed(surprise, (8, 4), None)
    step = graphed(surprise, dynamic={"x": 0}, sizes=(4, 8), backend="cpu")
    done = step.prewarm(x=torch.randn(8, 8), max_bytes=enough - 2**14)
    assert done.captured == {CUDAGraphMode.FULL: (8,)}
    assert "does not fit" in done.left_out[CUDAGraphMode.FULL, 4]
    assert step.memory_bytes <= enough - 2**14


@pytest.mark.parametrize("fn", [surprise, needs_large])
def test_captures_correct_what_is_expected(fn: Callable[..., Any]) -> None:
    """After a size that took far more than was expected, or without an estimate, the next one must have room for as
    much."""
    sizes = [16, 8, 4, 2, 1]
    *_, enough = prewarmed(fn, sizes, None)
    without_last = prewarmed(fn, sizes[:-1], None)[2]
    assert enough - without_last > 2**15
    captured, left_out, held = prewarmed(fn, sizes, (enough + without_last) // 2)
    assert captured[-2:] == (4, 2)
    assert left_out == [1]
    assert held == without_last


def test_hits_go_on_behind_an_estimate(model: torch.nn.Module) -> None:
    """A trial captures on graphs of its own, and calls find those that there are."""
    step = make(model)
    step.prewarm(torch.randn(16, 8), max_bytes=10**9, compare="all")
    step.estimate_memory(torch.randn(16, 8))
    assert [serves(step, model, rows) for rows in SIZES] == [Reason.EXACT] * len(SIZES)
    assert len(step.entries) == len(SIZES)


class LateCount(torch.nn.Module):
    """Counts its calls in a tensor that the first one makes."""

    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is None:
            self.state = torch.zeros(1)
        self.state += 1
        return x + self.state


class LateBatch(torch.nn.Module):
    """Keeps the batch of its first call."""

    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is None:
            self.state = x
        return x + self.state[:1]


class Norm(torch.nn.Module):
    """Takes its offset from the first batch that it gets, and would take it for filled if it found it empty."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(1))
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.offset.add_(x[0])  # type: ignore[operator]
            self.is_ready = True
        return x - self.offset


@pytest.mark.parametrize("kind", [LateCount, LateBatch, Norm])
def test_an_example_leaves_nothing_in_state_that_it_made(kind: type[torch.nn.Module]) -> None:
    """Neither a count nor the example itself: the calls behind a prewarm give what they give without one."""
    step, eager = graphed(kind(), dynamic={"x": 0}, sizes=(2, 4)), kind()
    step.prewarm(torch.ones(4, 1))
    for rows in (3, 4, 4, 2, 3, 4, 4):
        x = torch.randn(rows, 1)
        assert torch.equal(step(x), eager(x)), step.last_decision.explain()


def test_a_dict_that_the_callable_changes_is_the_callers(model: torch.nn.Module) -> None:
    """No graph is made of such a callable, and the example is left as it is."""

    def fn(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["y"] = batch["x"] * 2
        return batch["x"] + 1

    step, example = graphed(fn, dynamic={"batch": 0}, sizes=(4,)), {"x": torch.ones(4, 2)}
    report = step.prewarm(example)
    assert report.reasons == {(CUDAGraphMode.FULL, 4): Reason.STATE_REBOUND}
    assert list(example) == ["x"]
    batch = {"x": torch.randn(4, 2)}
    assert torch.equal(step(batch), batch["x"] + 1)
    assert torch.equal(batch["y"], batch["x"] * 2)
