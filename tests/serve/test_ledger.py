"""Graphs that cost more than they gained: further sizes and kinds of calls wait until they pay. Clocks are given."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphdispatch import Graphed, Reason, graphed
from graphdispatch.call.spec import FlatCall
from graphdispatch.capture.request import CaptureResult
from graphdispatch.serve.ledger import Ledger

from ..helpers import with_options

ROWS = 4
EAGER_S, REPLAY_S, SPENT_S = 2e-3, 1e-3, 0.1
FREE = 8  # graphs that need not pay
# A kind of calls is captured at one call and compared at another: so many replays, or calls without a graph, pay that.
PRICE = round(2 * SPENT_S / (EAGER_S - REPLAY_S))


def _time(clock: Any, run: Any, values: Any) -> float:
    del clock, values
    return EAGER_S if isinstance(run, FlatCall) else REPLAY_S


@pytest.fixture(autouse=True)
def _clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs take as long as above, and so does each capture and each comparison."""
    monkeypatch.setattr("graphdispatch.capture.gain._time", _time)
    readings = itertools.count()
    monkeypatch.setattr("graphdispatch.serve.ledger.perf_counter", lambda: next(readings) * SPENT_S)
    with torch.no_grad():
        yield


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def serve(fn: Callable[..., Any] = _twice, **options: Any) -> Graphed[..., Any]:
    """A served callable of one size; its calls are of another kind for each number of columns."""
    return graphed(fn, dynamic={"x": 0}, sizes=(ROWS,), **with_options(options, max_signatures=64))


def call(step: Graphed[..., Any], columns: int) -> Reason:
    """The reason of one call, answered as eager answers."""
    x = torch.randn(ROWS, columns)
    assert torch.equal(step(x), x * 2)
    assert step.last_decision is not None
    return step.last_decision.reason


def settled(**options: Any) -> Graphed[..., Any]:
    """A callable with as many kinds of calls as need not pay, each captured and compared, and a few replays."""
    step = serve(**options)
    for columns in range(1, FREE + 1):
        found = [call(step, columns) for _ in range(4)]
        assert Reason.CAPTURED_NOW in found
        assert found[-1] is Reason.EXACT
    return step


def test_a_further_kind_waits_until_its_own_calls_pay() -> None:
    """It is refused so long as its calls would have gained less than a graph costs; why is said with the figures."""
    step = settled()
    found = [call(step, 20) for _ in range(2 * PRICE)]
    assert found[0] is Reason.FIRST_SIGHTING
    assert found[1 : PRICE - 1] == [Reason.PAYS_LATER] * (PRICE - 2)
    assert Reason.CAPTURED_NOW in found[PRICE - 1 : PRICE + 2]
    assert found[-1] is Reason.EXACT
    call(step, 21)
    text = step.explain(torch.ones(ROWS, 21))
    assert f"a replay gains 1 ms, and a graph takes 200 ms, which {PRICE} calls would have" in text
    assert "name what varies in dynamic=" in text


def test_graphs_that_have_paid_let_others_be_captured() -> None:
    """What all graphs gained together counts, also what one gained that is gone."""
    step = settled(max_cached_graphs=FREE)
    for _ in range(2 * FREE * PRICE):
        call(step, 1)
    for columns in (20, 21):
        assert [call(step, columns) for _ in range(2)] == [Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW]
    step = settled()
    for _ in range(FREE * PRICE):
        call(step, 1)
    step.invalidate()
    assert [call(step, 20) for _ in range(2)] == [Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW]


def test_nothing_has_to_pay_that_is_asked_for_or_not_measured() -> None:
    """Not with ``capture_after=1``, not what ``prewarm`` captures, and not where no gain can be measured."""
    step = settled(capture_after=1)
    assert call(step, 20) is Reason.CAPTURED_NOW
    step = settled()
    step.prewarm(torch.randn(ROWS, 20))
    assert call(step, 20) is Reason.EXACT
    state = torch.zeros(1)

    def writes(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return x * 2

    step = serve(writes)
    for columns in range(1, 2 * FREE):
        assert Reason.CAPTURED_NOW in [call(step, columns) for _ in range(3)]


def test_a_refused_kind_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls take the slow path about once in 64."""
    step = settled()
    call(step, 20)
    server, asked = type(step._server), []
    choose = server.choose

    def counted(*args: Any) -> Any:
        asked.append(args)
        return choose(*args)

    monkeypatch.setattr(server, "choose", counted)
    assert [call(step, 20) for _ in range(PRICE // 2)] == [Reason.PAYS_LATER] * (PRICE // 2)
    assert 1 <= len(asked) <= 1 + PRICE // 2 // 64 + 1


def test_more_kinds_than_are_kept_get_no_groups_in_vain() -> None:
    """Where graphs do not pay, kinds that drive each other out are left eager for a while; where they do, they are
    kept by turns until some have graphs."""
    step = settled(max_signatures=2 * FREE)
    found = [call(step, 20 + number % 40) for number in range(400)]
    assert found.count(Reason.SIGNATURE_CHANGES) > 200
    step = settled(max_signatures=2 * FREE, capture_after=1)
    assert Reason.SIGNATURE_CHANGES not in [call(step, 20 + number % 12) for number in range(400)]


def test_what_is_spent_counts_if_it_raises() -> None:
    """A capture that ends by an error has cost as much, and one that gains nothing tells that none may."""
    ledger = Ledger(list, has_to_pay=True)

    def fails() -> CaptureResult:
        raise ValueError("x")

    for _ in range(FREE):
        with pytest.raises(ValueError, match="x"):
            ledger.pay(fails, is_capture=True)
    assert ledger.misses_that_pay() == 0
    ledger.pay(lambda: CaptureResult(None, None, Reason.NO_GAIN), is_capture=False)
    assert ledger.misses_that_pay() > 100 * PRICE
