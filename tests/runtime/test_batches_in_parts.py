"""Batches above the largest size, which several graphs serve in parts where that takes less time than eager."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphdispatch as gd
from graphdispatch import FallbackError, Graphed, Reason
from graphdispatch.runtime.gain import EagerTimes

from ..helpers import assert_same, check_rows, make
from .test_stay_eager import Looks

check = partial(check_rows, rtol=1e-5, atol=1e-6)
"""Calls whose answers are near eager's."""


def model_of(*layers: nn.Module) -> nn.Module:
    """A layer, then others."""
    return nn.Sequential(nn.Linear(3, 3), *layers).eval()


def served(fn: Callable[..., Any], **options: Any) -> Graphed[..., Any]:
    """Graphs of four and eight rows, compared."""
    name = "input" if isinstance(fn, nn.Module) else "x"
    step = make(fn, **{"sizes": (4, 8), "dynamic": {name: 0}} | options)
    step._server.graphs.judges_gain = False  # no test depends on times
    step.prewarm(torch.randn(8, 3))
    return step


def test_a_batch_above_the_largest_size_is_served_in_parts() -> None:
    """Each call counts as one, with all rows that its graphs compute."""
    step = served(model_of(nn.GELU()))
    assert check(step, 20, 17, 20, 24, 9) == [Reason.IN_PARTS] * 5
    assert step.explain(torch.randn(18, 3)).startswith("FULL graph, 18 -> 20 rows, 10.0 % padding (in parts of 8, 8,")
    assert (step.stats.hits, step.stats.real_rows, step.stats.padded_rows) == (5, 90, 96)
    assert step.stats.rows == {20: 2, 17: 1, 24: 1, 9: 1}


def test_parts_wait_for_the_comparison_of_their_graph() -> None:
    """A graph that was only captured serves none."""
    step = make(model_of(nn.GELU()), dynamic={"input": 0})
    step(torch.randn(4, 3))
    assert "not in parts: its graph of 4 was not compared for 4 rows yet" in step.explain(torch.randn(8, 3))


def test_graphs_of_parts_are_compared_again() -> None:
    """Though no other calls come: after ``verify_every`` replays, before they serve parts. One that differs ends."""
    layer, hidden = nn.Linear(3, 3), np.zeros(1)
    options = gd.CUDAGraphOptions(verify_every=4, guard_weights=False)
    step = served(lambda x: layer(x) + float(hidden[0]), options=options)
    assert check(step, *[20] * 9) == [Reason.IN_PARTS] * 9
    hidden[0] = 1.0
    answers = [step(torch.zeros(20, 3)) for _ in range(4)]
    assert 0 < sum(not torch.allclose(answer, layer.bias + 1) for answer in answers) <= 2
    assert [entry.size for entry in step.entries] == [4]


def test_nested_outputs_are_put_together_along_their_rows() -> None:
    """Whichever dimension that is; what has no rows is returned once."""
    layer = nn.Linear(3, 3)
    step = served(lambda x: {"y": layer(x), "z": (layer(x).T, [layer(x).repeat(1, 2)], layer.weight.sum(), 7)})
    assert check(step, 20, 19, 21) == [Reason.IN_PARTS] * 3
    assert step(torch.randn(20, 3))["z"][0].stride() == (1, 3)


def test_rows_along_two_dimensions_take_further_lengths_as_they_are() -> None:
    """Only rows are divided; a length above the longest stays eager."""
    layer = nn.Linear(3, 3)
    dims = {"x": {0: gd.Dim("batch", [4]), 1: gd.Dim("seq", [8])}}
    step = gd.graphed(lambda x: (layer(x).transpose(0, 1), layer(x) @ x.mT), dynamic=dims)
    step._server.graphs.judges_gain = False
    step.prewarm(torch.randn(4, 8, 3))
    check(step, (9, 5, 3), (9, 5, 3), (10, 8, 3), (10, 9, 3))
    assert list(step.stats.reasons) == [Reason.ABOVE_LARGEST_SIZE]
    assert step.stats.hits == 3


def placed_in_order(x: Tensor) -> Tensor:
    """Sorts rows, adds to each where it lay, and puts them back."""
    order = x[:, 0].argsort()
    return (x[order] + order.float()[:, None])[order.argsort()]


COUNT, TABLE = torch.zeros(1), torch.zeros(64, 3)
NOT_IN_PARTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "rows mix": (lambda x: x - x.mean(0), "rows mix in aten::mean"),
    "state is written": (lambda x: (COUNT.add_(1), x * 2)[1], "writes state"),
    "arguments are written": (lambda x: x.mul_(2), "writes state or arguments"),
    "random numbers": (lambda x: x + torch.rand_like(x), "draws random numbers"),
    "another path": (lambda x: x * (2 if x.shape[0] <= 8 else 3), "no run speaks for so many rows"),
    "numbers of rows": (
        lambda x: x + torch.arange(x.shape[0])[:, None] * 0,
        "by their place in the batch, in aten::mul",
    ),
    "numbers of rows are given back": (lambda x: torch.arange(x.shape[0]), "by their place in the batch, in output 0"),
    "the order of rows": (placed_in_order, "by their place in the batch, in aten::add"),
    "rows of a table": (lambda x: x + TABLE[: x.shape[0]], "by their place in the batch, in aten::slice"),
    "one tensor twice": (lambda x: [x * 2] * 2, "one tensor twice"),
}


@pytest.mark.parametrize("name", NOT_IN_PARTS)
def test_what_is_not_served_in_parts(name: str) -> None:
    """It stays eager as before, and ``explain`` says why."""
    fn, why = NOT_IN_PARTS[name]
    step = served(fn)
    x = torch.ones(12, 3)
    for _ in range(2):
        torch.manual_seed(0)
        answer = step(x.clone())
        torch.manual_seed(0)
        assert_same(answer, fn(x.clone()) if name != "rows mix" else x * 0)
    assert step.last_decision.reason is Reason.ABOVE_LARGEST_SIZE
    assert why in step.explain(x), step.explain(x)


def timed(step: Graphed[..., Any], eager_ms: dict[int, float], replay_ms: dict[int, float]) -> None:
    """Have batches and graphs take so long."""
    for group in step._server.graphs.groups.values():
        assert group.gain is not None
        group.hits.clear()
        group.looks.clear()
        group.gain.times = EagerTimes()
        for rows, ms in eager_ms.items():
            for _ in range(3):  # then it is sure
                group.gain.times.note(rows, ms / 1e3)
        for entry in group.all_entries:
            entry.gain, entry._least_ms = None, replay_ms[entry.size]


def judged(fn: Callable[..., Any], eager_ms: dict[int, float], replay_ms: dict[int, float]) -> Graphed[..., Any]:
    """Graphs that take so long, of which those serve that gain."""
    name = "input" if isinstance(fn, nn.Module) else "x"
    step = make(fn, sizes=sorted(replay_ms), dynamic={name: 0})
    step._server.graphs.judges_gain = True
    step.prewarm(torch.randn(8, 3))
    timed(step, eager_ms, replay_ms)
    return step


@pytest.mark.parametrize(
    ("rows", "reason", "about"),
    [
        (5, Reason.PADDED, "5 -> 8 rows"),
        (8, Reason.EXACT, "8 rows"),
        (12, Reason.IN_PARTS, "12 rows (in parts of 8, 4)"),
        (13, Reason.IN_PARTS, "13 -> 16 rows, 18.8 % padding (in parts of 8, 5)"),
        (32, Reason.ABOVE_LARGEST_SIZE, "not in parts: in parts of 8, 8, 8, 8 it takes 32.08 ms, and an eager run 30"),
    ],
)
def test_a_larger_batch_is_served_in_parts_that_take_less_time_than_eager(
    rows: int, reason: Reason, about: str
) -> None:
    """They are full graphs and one for the rest."""
    times = {4: 9.0, 12: 14.0, 13: 20.0, 16: 16.0, 32: 30.0}
    step = judged(model_of(nn.GELU()), times, {1: 0.1, 2: 2.5, 4: 4.0, 8: 8.0})
    step._server.graphs.judges_gain = False  # no further run is timed
    assert check(step, rows, rows) == [reason] * 2
    assert about in step.explain(torch.randn(rows, 3))


def test_a_larger_batch_runs_eagerly_until_that_is_timed() -> None:
    """Unless parts take less than an eager run of the largest size, or nobody timed their graphs."""
    step = judged(model_of(nn.GELU()), {4: 9.0, 8: 10.0}, {4: 4.0, 8: 6.0})
    assert check(step, 12) == [Reason.ABOVE_LARGEST_SIZE]
    timed(step, {4: 9.0, 8: 10.0, 12: 14.0}, {4: 4.0, 8: 6.0})
    assert check(step, 12) == [Reason.IN_PARTS]
    for replay_ms in ({4: 2.0, 8: 4.0}, {4: 2.0, 8: math.inf}):
        timed(step, {4: 9.0, 8: 10.0}, replay_ms)
        assert check(step, 12) == [Reason.IN_PARTS]


def test_a_batch_that_its_graph_slows_is_not_looked_at_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times show it before such a batch comes; then its own runs are timed, and it is looked at."""
    step = judged(model_of(nn.GELU()), {4: 1.0, 8: 2.0}, {4: 4.0, 8: 8.0})
    for entry in step.entries:
        entry.times = 3
    looks = Looks(step, monkeypatch)
    assert check(step, *[5] * 9) == [Reason.NO_GAIN] * 9
    assert looks.count == 1


def test_parts_that_are_slower_than_eager_are_not_made() -> None:
    """Where one padded graph is slower than eager as well, that is the reason."""
    step = judged(model_of(nn.GELU()), {4: 1.0, 8: 2.0}, {4: 4.0, 8: 8.0})
    step._server.graphs.judges_gain = False
    assert check(step, 5, 12) == [Reason.NO_GAIN, Reason.ABOVE_LARGEST_SIZE]


def test_parts_are_of_the_present_state() -> None:
    """After weights have moved nothing is served in parts until there are graphs again."""
    layer = model_of(nn.GELU())
    step = served(layer)
    check(step, 12, 12)
    layer[0] = nn.Linear(3, 3)
    assert check(step, 12) == [Reason.ABOVE_LARGEST_SIZE]
    step.prewarm(torch.randn(8, 3))
    assert check(step, 12, 12) == [Reason.IN_PARTS] * 2


def test_strict_takes_parts_for_graphs_and_nothing_else() -> None:
    """Beyond so many parts there is an error."""
    step = served(model_of(), strict=True)
    assert check(step, 64, 64) == [Reason.IN_PARTS] * 2
    with pytest.raises(FallbackError, match="more than 8 of them"):
        step(torch.randn(65, 3))


def test_a_batch_in_parts_has_eager_s_answer_if_a_replay_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its graph must be compared again."""
    step = served(model_of(nn.GELU()))

    def fail() -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        for entry in step.entries:
            patched.setattr(entry, "graph", SimpleNamespace(replay=fail, runs_code=False))
            entry._plans.clear()
        assert check(step, 20) == [Reason.ABOVE_LARGEST_SIZE]
        assert "was not compared" in step.explain(torch.randn(20, 3))
