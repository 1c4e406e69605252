"""Calls that no graph serves are soon no longer looked at, and still counted, timed and looked at again."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphdispatch import CUDAGraphOptions, Decision, FallbackError, Graphed, Reason, graphed
from graphdispatch.runtime.group import StayEager
from graphdispatch.runtime.server import Server

from ..helpers import HAS_CORE, check_rows, double

MANY = 400


class Looks:
    """Counts the calls that a server looked at."""

    def __init__(self, step: Graphed[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        perform = step._server.perform

        def counted(choice: Any) -> Any:
            self.count += 1
            return perform(choice)

        monkeypatch.setitem(vars(step._server), "perform", counted)


def reads(x: Tensor) -> Tensor:
    """Something that no graph holds."""
    return x * 2 if x.sum().item() > -1e9 else x


def mixes(x: Tensor) -> Tensor:
    """Something that cannot be padded."""
    return x - x.mean(0)


@pytest.mark.parametrize(
    ("fn", "rows", "reason"),
    [(reads, 4, Reason.CAPTURE_UNSAFE), (mixes, 3, Reason.ROWS_MIX), (double, 9, Reason.ABOVE_LARGEST_SIZE)],
)
def test_most_calls_are_not_looked_at(fn: Any, rows: int, reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has eager's answer and is counted with its reason, rows and decision."""
    step = graphed(fn, dynamic={"x": 0}, sizes=(4,))
    check_rows(step, *[rows] * 30)
    looks, before = Looks(step, monkeypatch), step.stats.reasons[reason]
    assert set(check_rows(step, *[rows] * MANY)) == {reason}
    assert looks.count <= MANY / 20
    assert step.stats.reasons[reason] == before + MANY
    assert step.stats.rows == {rows: 30 + MANY}


def test_a_size_that_failed_is_tried_again_in_time() -> None:
    """What could not be captured is captured once it can be, after as many calls as the quarantine says."""
    is_bad = [True]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return reads(x) if is_bad[0] else x * 2

    step = graphed(Model(), dynamic={"x": 0}, sizes=(4,))
    check_rows(step, *[4] * 10)
    is_bad[0] = False
    found = check_rows(step, *[4] * 30)
    assert found.index(Reason.CAPTURED_NOW) <= 16
    assert found[-1] is Reason.EXACT


def test_no_other_batch_is_looked_at_while_the_first_capture_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits as they do, and is counted with its rows; once there is a graph, each batch is looked at."""
    step = graphed(double, dynamic={"x": 0}, sizes=(8,), options=CUDAGraphOptions(capture_share=1e-9))
    step._server.graphs.budget.first_capture_s = 1e9
    step._server.graphs.budget.clock = iter(range(10**9)).__next__
    assert check_rows(step, 8, 8, 8) == [Reason.FIRST_SIGHTING, *[Reason.CAPTURE_WAITS] * 2]
    looks = Looks(step, monkeypatch)
    assert set(check_rows(step, *range(1, 8))) == {Reason.CAPTURE_WAITS}
    assert looks.count == 0
    assert step.stats.rows == dict.fromkeys(range(1, 8), 1) | {8: 3}
    step.prewarm(torch.ones(8, 3))
    assert set(check_rows(step, *range(1, 8))) == {Reason.PADDED}


def test_what_was_said_to_change_is_looked_at() -> None:
    """After ``invalidate`` and ``prewarm``, calls are served that stayed eager before."""
    step = graphed(double, dynamic={"x": 0}, sizes=(4,), options=CUDAGraphOptions(capture_share=1e-9))
    step._server.graphs.budget.first_capture_s = 1e9
    step._server.graphs.budget.clock = iter(range(10**9)).__next__
    assert check_rows(step, *[4] * 40)[-1] is Reason.CAPTURE_WAITS
    step.prewarm(torch.ones(4, 3))
    assert check_rows(step, 4, 3) == [Reason.EXACT, Reason.PADDED]


def test_gradients_are_looked_for_where_they_are_on() -> None:
    """Calls that needed gradients are served as soon as those are off."""
    layer = nn.Linear(3, 3)
    step = graphed(layer, dynamic={"input": 0}, sizes=(4,))
    with torch.enable_grad():
        for _ in range(40):
            assert step(torch.ones(4, 3)).requires_grad
            assert step.last_decision is not None
            assert step.last_decision.reason is Reason.NEEDS_GRADIENTS
    layer.eval()
    assert check_rows(step, *[4] * 4)[-1] is Reason.EXACT


@pytest.mark.parametrize("is_asleep", [False, True])
def test_answers_need_no_gradients_where_graphs_give_none(is_asleep: bool) -> None:
    """Of a module in ``eval()``, though gradients are on; but a call that needs them gets them, with its reason."""
    layer = nn.Linear(3, 3).eval()
    step = graphed(lambda x: mixes(layer(x)), dynamic={"x": 0}, sizes=(4,))
    if is_asleep:
        step.sleep()
    with torch.enable_grad():
        for _ in range(40):
            assert not step(torch.ones(3, 3)).requires_grad
        assert step(torch.ones(3, 3, requires_grad=True)).requires_grad
    assert step.last_decision is not None
    assert step.last_decision.reason is Reason.NEEDS_GRADIENTS


def test_new_constants_are_not_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that differs in each call makes a new signature each time, which costs; calls of it stay eager."""
    step = graphed(lambda x, t: x * t, dynamic={"x": 0}, sizes=(4,))
    looks = Looks(step, monkeypatch)
    x = torch.ones(4, 3)
    for number in range(MANY):
        assert torch.equal(step(x, float(number)), x * number)
    assert looks.count < MANY / 4


def test_graphs_serve_beside_calls_that_fit_none() -> None:
    """Such calls do not keep others from their hits."""
    step = graphed(lambda x, t: x * t, dynamic={"x": 0}, sizes=(4,))
    x = torch.ones(4, 3)
    for number in range(MANY):
        step(x, float(number + 1))
        step(x, 0.5)
    assert step.stats.hits > MANY - 10


@pytest.mark.skipif(not HAS_CORE, reason="Python looks at the latest group alone")
def test_what_fits_a_group_is_looked_at() -> None:
    """A new size of a constant that came before is captured, though thousands of calls fitted no group."""
    step = graphed(lambda x, t: x * t, dynamic={"x": 0}, sizes=(4, 8), options=CUDAGraphOptions(capture_share=None))
    small, large = torch.ones(4, 3), torch.ones(8, 3)
    for _ in range(4):
        step(small, 0.5)
    for number in range(2000):
        step(small, float(number + 1))
    assert torch.equal(step(small, 0.5), small * 0.5)
    assert step.stats.reasons[Reason.CAPTURED_NOW] == 1
    for _ in range(4):
        assert torch.equal(step(large, 0.5), large * 0.5)
    assert step.stats.reasons[Reason.CAPTURED_NOW] == 2


def test_other_batches_need_fewer_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other numbers of rows, which run eagerly for the same reason."""
    step = graphed(mixes, dynamic={"x": 0}, sizes=(16,), options=CUDAGraphOptions(capture_share=None))
    check_rows(step, *[16] * 4)
    looks = Looks(step, monkeypatch)
    check_rows(step, *[*range(1, 16)] * 20)
    assert looks.count <= 60


def test_a_failed_capture_that_waits_for_time_is_not_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason stays the cause, also when it might be tried again but for the time."""
    step = graphed(reads, dynamic={"x": 0}, sizes=(4,), options=CUDAGraphOptions(capture_share=1e-9))
    step.prewarm(torch.ones(4, 3))
    looks = Looks(step, monkeypatch)
    assert set(check_rows(step, *[4] * MANY)) == {Reason.CAPTURE_UNSAFE}
    assert looks.count <= MANY / 10


def test_strict_raises_each_time() -> None:
    """No call stays eager in silence."""
    step = graphed(reads, dynamic={"x": 0}, sizes=(4,), strict=True)
    x = torch.ones(4, 3)
    step(x)
    for _ in range(40):
        with pytest.raises(FallbackError):
            step(x)


def test_the_next_look_comes_after_twice_as_many_calls() -> None:
    """The first ones in a row are all looked at; another reason begins anew; there are at most so many. Where it is
    clear how long nothing changes, none is."""
    first, other = (Decision.eager(reason, 3) for reason in (Reason.ROWS_MIX, Reason.NO_GAIN))
    stays = StayEager(first, group=object())
    found = []
    for _ in range(20):
        stays.again(first)
        found.append(stays.countdown.left)
    assert found == [0] * 8 + [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    stays.again(other)
    assert (stays.countdown.left, stays.decision) == (0, other)
    stays.again(other, 100)
    assert stays.countdown.left == 100


def test_python_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no native core."""
    step = graphed(mixes, dynamic={"x": 0}, sizes=(4,))
    server = step._server
    monkeypatch.setitem(vars(server), "serve", lambda *args: Server.serve_in_python(server, *args))
    looks = Looks(step, monkeypatch)
    x = torch.ones(3, 3)
    for _ in range(MANY):
        assert torch.equal(server.serve(step._route, (x,), {}), mixes(x))
    assert looks.count < MANY / 8
