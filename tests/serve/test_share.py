"""Captures and comparisons that calls pay for take at most a share of the time; until then calls run eagerly."""

import itertools
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed

from ..helpers import check_rows, double

CALLS_FOR_ONE = 10  # with a share of a tenth, where work takes as long as a call


def serve(**options: Any) -> Graphed[..., Any]:
    """A served callable of whose calls each takes a second, and a capture or a comparison a second more."""
    options = {"capture_share": 1 / CALLS_FOR_ONE} | options
    step = graphed(double, dynamic={"x": 0}, sizes=(1, 2, 3, 4, 8, 16), options=CUDAGraphOptions(**options))
    share = step._server.graphs.share
    share.clock, pay = itertools.count().__next__, share.pay
    share.pay = lambda kind, work: pay(kind, lambda: (share.clock(), work())[1])
    return step


def settled(**options: Any) -> Graphed[..., Any]:
    """The same after two seconds of calls, with one graph."""
    step = serve(**options)
    assert check_rows(step, *[1] * 4) == [Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.EXACT]
    return step


def test_the_next_graph_waits_for_its_share() -> None:
    """First for its capture, then for its comparison with a second batch, before which it serves nothing."""
    step = settled()
    found = check_rows(step, *[3] * 21)
    waiting = Reason.CAPTURE_WAITS
    until_captured = [Reason.FIRST_SIGHTING, *[waiting] * (CALLS_FOR_ONE - 3), Reason.CAPTURED_NOW]
    assert found == [*until_captured, *[waiting] * CALLS_FOR_ONE, Reason.VERIFIED_NOW, Reason.EXACT]


@pytest.mark.parametrize("is_gone", [False, True])
def test_replays_count_as_time_of_calls(is_gone: bool) -> None:
    """Also those of graphs that are gone."""
    step = settled()
    check_rows(step, *[1] * 2 * CALLS_FOR_ONE)
    if is_gone:
        step.invalidate()
    assert check_rows(step, *[3] * 4)[1:] == [Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.EXACT]


def test_a_padded_batch_waits_for_its_comparison() -> None:
    """The proof and the first number of rows come at once; a size that was captured serves full batches
    meanwhile."""
    step = serve()
    check_rows(step, *[16] * 4)
    found = check_rows(step, 15, 14, 13, 16)
    assert found == [*[Reason.VERIFIED_NOW] * 2, Reason.CAPTURE_WAITS, Reason.EXACT]
    check_rows(step, *[16] * CALLS_FOR_ONE)
    assert check_rows(step, 13, 13) == [Reason.VERIFIED_NOW, Reason.PADDED]


def test_what_waits_says_so() -> None:
    """``explain`` names the option, and ``strict`` lets such calls pass."""
    step = settled()
    check_rows(step, 3)
    text = step.explain(torch.randn(3, 3))
    assert "raise capture_share" in text
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


def test_clear_begins_anew() -> None:
    """After it, the first graph is captured at once."""
    step = settled()
    step.clear()
    assert check_rows(step, 3, 3) == [Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW]
