"""Where the callable takes no zeros, padding rows are copies of the last one, unless the user gave a rule."""

from typing import Any

import pytest
import torch
from torch import Tensor

from graphdispatch import Graphed, Pad, Reason, graphed

from ..helpers import AT_ONCE, check_calls

SIZES = (2, 4, 8)


def last(sequence: Tensor, length: Tensor) -> Tensor:
    """What a sequence has in its last place: the length less one is an index, which gather takes from zero on."""
    return sequence.gather(1, (length - 1).view(-1, 1)) * 2


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Numbers, and how many of them count in each row."""
    return torch.randn(rows, 5), torch.randint(1, 6, (rows,))


def serve(**settings: Any) -> Graphed[..., Tensor]:
    """``last``, captured when it first comes."""
    return graphed(last, dynamic={"sequence": 0, "length": 0}, sizes=SIZES, options=AT_ONCE, **settings)


def test_a_prewarm_finds_padding_that_the_callable_takes() -> None:
    """All sizes are captured, and every batch is a hit."""
    step = serve()
    report = step.prewarm(*batch(8))
    assert step.captured_sizes == SIZES, str(report)
    assert not report.left_out
    assert all(reason.is_graph for reason in check_calls(step, *[batch(rows) for rows in range(1, 9)]))


def test_calls_find_it_too() -> None:
    """The first padded call fails to capture, and says what comes next; the next ones are served."""
    step = serve()
    check_calls(step, batch(3))
    decision = step.last_decision
    assert decision is not None
    assert decision.reason is Reason.CAPTURE_FAILED
    assert "out of bounds" in decision.detail
    assert "copies of the last row" in decision.detail
    assert check_calls(step, *[batch(3) for _ in range(4)])[-1] is Reason.PADDED


def test_a_rule_of_the_user_stays() -> None:
    """It is used as given, and what it leads to says how to give another."""
    step = serve(pad={"length": 0})
    check_calls(step, *[batch(3) for _ in range(3)])
    assert "pad=" in step.explain(*batch(3))
    assert not step.entries
    assert {spec.name: spec.pads[0] for spec in step._route.groups[0].inputs.specs}["length"] == Pad.value(0)


def test_a_callable_that_fails_for_any_padding_is_not_tried_for_ever() -> None:
    """It runs eagerly, with its reason, as where a graph fails for another cause."""

    def odd(x: Tensor) -> Tensor:
        if len(x) == 8:
            raise ValueError("no batch of 8")
        return x * 2

    step = graphed(odd, dynamic={"x": 0}, sizes=(8,), options=AT_ONCE)
    reasons = check_calls(step, *[(torch.randn(3, 2),) for _ in range(200)])
    assert set(reasons) == {Reason.CAPTURE_FAILED}
    assert step.stats.capture_failures <= 6
    with pytest.raises(ValueError, match="no batch of 8"):
        step(torch.randn(8, 2))
