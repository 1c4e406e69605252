"""A graph that replays slower than eager is given up, by measured times; here a clock gives them."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed
from graphdispatch.stats import Gain

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


def test_a_graph_that_is_slower_is_given_up_once() -> None:
    """It is captured once, never again, and holds nothing; each call says why, with the times and a remedy."""
    step = serve(pairs(FAST, SLOW))
    assert check_rows(step, *[ROWS] * 200) == [Reason.NO_GAIN] * 200
    assert (step.stats.hits, step.stats.captures, step.stats.capture_failures) == (0, 0, 1)
    assert step.entries == []
    text = step.explain(torch.ones(ROWS, 3))
    assert "a replay took 2000 us and an eager run 1000 us, 5 of each" in text
    assert "sizes=" in text
    step.check_integrity()


def test_a_size_is_measured_anew_after_invalidate() -> None:
    """What made the graph slow may have ended."""
    step = serve(chain(islice(pairs(FAST, SLOW), 12), pairs(SLOW, FAST)))
    assert check_rows(step, *[ROWS] * 2) == [Reason.NO_GAIN] * 2
    step.invalidate()
    assert check_rows(step, *[ROWS] * 3) == [Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.EXACT]


@pytest.mark.parametrize(
    ("eager", "replay", "is_kept"),
    [
        ([FAST] * 5, [SLOW, SLOW, SLOW, SLOW, FAST], True),  # one replay was as fast
        ([FAST, FAST, FAST, FAST, SLOW], [SLOW] * 5, False),  # one eager run was as slow
        ([FAST, SLOW, FAST, SLOW, FAST], [SLOW] * 5, True),
        ([FAST] * 5, [1.04 * FAST] * 5, True),  # too little to tell
        ([9e-5] * 5, [18e-5] * 5, True),  # a short step, and less than 0.1 ms
        ([9e-5] * 5, [20e-5] * 5, False),
        ([2e-4] * 5, [2.2e-4] * 5, True),
        ([2e-4] * 5, [2.3e-4] * 5, False),
    ],
)
def test_noise_gives_up_no_graph(eager: list[float], replay: list[float], is_kept: bool) -> None:
    """All replays must be slower than four of five eager runs at least, and clearly so."""
    turns = chain.from_iterable(zip(eager[1:], replay[1:], strict=True))
    step = serve(chain((CAPTURE, 0.0, replay[0], eager[0]), turns, cycle((CAPTURE,))))
    check_rows(step, *[ROWS] * 3)
    assert bool(step.entries) is is_kept


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


def test_a_prewarmed_graph_is_not_given_up() -> None:
    """It stays where it is slower, and serves again once it is faster."""
    step = serve(pairs(FAST, SLOW))
    step.prewarm(torch.ones(ROWS, 3))
    assert check_rows(step, *[ROWS] * 5) == [Reason.NO_GAIN] * 5
    step.entries[0].gain = Gain(1e3 * FAST, 1e3 * FAST)
    assert check_rows(step, *[ROWS] * 5) == [Reason.EXACT] * 5


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
