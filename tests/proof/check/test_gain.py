"""A graph that replays slower than eager serves nobody, by measured times; here a clock gives them."""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, cycle
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.backends.cpu.backend import CPUBackend
from graphdispatch.engines import CUDAGraphManager
from graphdispatch.runtime.entry import CUDAGraphEntry

from ...helpers import check_rows, double, with_options

ROWS = 4
CAPTURE, FAST, SLOW = 1e-3, 1e-3, 2e-3


class Clock:
    """Each second reading is later than the one before by the next of ``durations``, in seconds."""

    def __init__(self, durations: Iterable[float]) -> None:
        self.durations, self.now, self.timed = iter(durations), 0.0, 0
        self._is_running = False

    def __call__(self) -> float:
        """The time now."""
        if self._is_running:
            self.now += next(self.durations)
            self.timed += 1
        self._is_running = not self._is_running
        return self.now


def pairs(eager: float, replay: float) -> Iterator[float]:
    """A capture, the copy and the replay that are compared, an eager run, and then both in turns."""
    return chain((CAPTURE, 0.0, replay, eager), cycle((eager, replay)))


def serve(durations: Iterable[float], fn: Callable[..., Any] | None = None, **options: Any) -> Graphed[..., Any]:
    """A served callable on such a clock, which captures at once."""
    step = graphed(fn or double, dynamic={"x": 0}, **with_options({"sizes": (ROWS,), **options}, capture_after=1))
    step._graphs.clock = Clock(durations)
    return step


def test_what_a_graph_gains_is_kept_with_it() -> None:
    """In milliseconds of a full batch, the copy of the inputs included; the first batch that is captured decides."""
    step = serve(chain((CAPTURE, 1e-4, FAST, SLOW), cycle((SLOW,))))
    check_rows(step, 2, 2, 2)
    assert step.entries[0].gain == pytest.approx((2.0, 1.1))
    assert step.entries[0].gain.ms == pytest.approx(0.9)


def test_a_graph_that_is_slower_serves_nobody() -> None:
    """It is captured once; each call says why, with the times and a remedy."""
    step = serve(pairs(FAST, SLOW))
    assert check_rows(step, *[ROWS] * 10) == [Reason.CAPTURED_NOW, *[Reason.NO_GAIN] * 9]
    assert (step.stats.hits, step.stats.captures, step.stats.capture_failures) == (0, 1, 0)
    text = step.explain(torch.ones(ROWS, 3))
    assert "the graph of 4 takes 2.000 ms, and an eager run of 4 rows 1.000 ms" in text
    assert "put more of the work into the call" in text


def test_a_size_is_measured_anew_after_invalidate() -> None:
    """What made the graph slow may have ended."""
    step = serve(chain((CAPTURE, 0.0, SLOW, FAST, CAPTURE, 0.0), cycle((FAST,))))
    assert check_rows(step, *[ROWS] * 2) == [Reason.CAPTURED_NOW, Reason.NO_GAIN]
    step.invalidate()
    assert check_rows(step, *[ROWS] * 3) == [Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.EXACT]


def test_times_are_those_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU they are those of the thread, so that what other processes take of a core counts for nothing."""
    assert CPUBackend.clock is time.thread_time
    monkeypatch.setattr(CPUBackend, "clock", Clock(chain((CAPTURE, 1e-4, FAST, SLOW), cycle((SLOW,)))))
    step = graphed(double, dynamic={"x": 0}, sizes=(ROWS,), options=CUDAGraphOptions(capture_after=1))
    check_rows(step, 2, 2)
    assert step.entries[0].gain == pytest.approx((2.0, 1.1))


def test_what_a_prewarm_times_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that is timed where a graph may be slower serves no call: the report counts it neither."""
    monkeypatch.setattr("graphdispatch.runtime.gain.EagerTimes.wants", lambda *_: True)
    step = serve(pairs(FAST, FAST))
    replays: list[int] = []
    timed = CUDAGraphEntry.replay_call
    monkeypatch.setattr(CUDAGraphEntry, "replay_call", lambda *a, **how: (replays.append(1), timed(*a, **how))[1])
    step.prewarm(torch.randn(ROWS, 3))
    assert replays
    assert [row.hits for row in step.report().graphs] == [0]


COUNTER = torch.zeros(())


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (lambda x: x * 2 + 0 * COUNTER.add_(1), {}),
        (lambda x: x * 2 + 0 * torch.rand(3), {}),
        (None, {"strict": True}),
        (None, {"options": CUDAGraphOptions(verify=False)}),
    ],
)
def test_what_is_not_judged(fn: Callable[..., Any] | None, options: dict[str, Any]) -> None:
    """Calls that write or draw, since they are not run again for their time; and where graphs are wanted anyway."""
    step = serve(pairs(FAST, SLOW), fn, **options)
    check_rows(step, *[ROWS] * 4)
    assert len(step.entries) == 1
    assert step.stats.hits > 0


@pytest.mark.parametrize("trains", [False, True])
def test_batch_norm_writes_in_training_alone(trains: bool) -> None:
    """In ``eval()`` its statistics are read, so that a graph is timed and judged as any other."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).requires_grad_(False).train(trains)
    step = graphed(model, dynamic={"input": 0}, sizes=(4,))
    step.prewarm(torch.randn(4, 3))
    (entry,) = step.entries
    assert entry.writes_outside is trains
    assert (entry.gain is None) is trains
    before = model[1].running_mean.clone()
    assert check_rows(step, 4) == [Reason.EXACT]
    assert torch.equal(model[1].running_mean, before) is not trains


def test_engines_time_nothing() -> None:
    """Their ranks run each call equally often, whatever is compiled meanwhile: collectives wait for one another."""
    assert CUDAGraphManager().capture_graph(4, 1, double, inputs={"x": torch.ones(4, 3)}).gain is None
