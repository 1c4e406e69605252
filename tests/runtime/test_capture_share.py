"""Captures that calls pay for take at most a share of the time; until then calls run eagerly."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed

from ..helpers import check_rows, double

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


@pytest.mark.parametrize("is_gone", [False, True])
def test_replays_count_as_time_of_calls(is_gone: bool) -> None:
    """Also those of graphs that are gone."""
    step = settled()
    check_rows(step, *[1] * 4 * CALLS_FOR_ONE)
    if is_gone:
        step.invalidate()
    assert step._server.graphs.budget._served_s > 4 * CALLS_FOR_ONE


def test_the_first_comparisons_do_not_wait() -> None:
    """The first padded batch is compared at once, and the others are hits."""
    step = serve()
    check_rows(step, *[16] * 4)
    assert check_rows(step, 15, 14, 13, 16) == [Reason.VERIFIED_NOW, Reason.PADDED, Reason.PADDED, Reason.EXACT]


def test_further_comparisons_wait_for_time() -> None:
    """Once a graph serves, others than the first ones are made as the time of calls allows."""
    step = serve(scaled)
    assert check_rows(step, *[16] * 4)[-1] is Reason.EXACT
    assert check_rows(step, 15, 14, 13) == [Reason.VERIFIED_NOW, Reason.CAPTURE_WAITS, Reason.CAPTURE_WAITS]
    assert "no time to compare" in step.explain(torch.randn(13, 3))
    assert Reason.VERIFIED_NOW in check_rows(step, *[16, 13] * 3 * CALLS_FOR_ONE)
    assert check_rows(step, 13) == [Reason.PADDED]


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


def test_all_that_wait_for_time_wait_together() -> None:
    """However many numbers of rows there are, each call brings the next look nearer."""
    step = settled(capture_share=0.01)
    check_rows(step, *range(9, 17), *range(9, 17))
    (group,) = step._route.groups
    left = group.until_time.left
    assert set(check_rows(step, *range(9, 17))) == {Reason.CAPTURE_WAITS}
    assert group.until_time.left == left - 8
