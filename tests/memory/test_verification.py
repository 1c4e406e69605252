"""``Verification``: when a batch is compared with eager, and what a graph may serve without."""

from typing import Any

import torch

from graphdispatch import Reason
from graphdispatch.memory.proof import MOST_ALIKE, RowProof, Verification

SIZE = 4
FIRST, OTHER = [torch.zeros(SIZE, 2)], [torch.ones(SIZE, 2)]


def captured(**given: Any) -> Verification:
    """What is known of a graph that was just captured with the first batch."""
    return Verification(size=SIZE, warm_batch=tuple(FIRST), **given)


def test_the_second_different_batch_is_compared() -> None:
    """The first one again is not, and no hit serves before."""
    known = captured()
    assert (known.due(FIRST, SIZE), known.due(OTHER, SIZE), known.may_hit(SIZE)) == (False, True, False)
    known.passed()
    assert (known.due(OTHER, SIZE), known.may_hit(SIZE)) == (False, True)


def test_calls_that_are_all_alike_become_hits() -> None:
    """After some of them; padded ones do not."""
    known = captured(replay_count=MOST_ALIKE)
    known.compared.note(SIZE - 1, SIZE)
    known.program.proof = RowProof(True)
    assert (known.may_hit(SIZE), known.may_hit(SIZE - 1)) == (True, False)


def test_a_failure_wants_another_comparison() -> None:
    """And ends the hits."""
    known = captured()
    known.passed()
    known.failed()
    assert (known.due(OTHER, SIZE), known.may_hit(SIZE)) == (True, False)


def test_padding_is_served_once_rows_are_proven_and_compared() -> None:
    """Where rows depend on it, there is an objection instead."""
    known, rows = captured(), SIZE - 1
    known.passed()
    assert known.due(OTHER, rows)
    known.program.proof = RowProof(True)
    assert known.due(OTHER, rows)
    known.compared.note(rows, SIZE)
    assert (known.due(OTHER, rows), known.may_hit(rows)) == (False, True)
    known.program.proof = RowProof(False, perturbation="zeros", what="a row changes")
    reason, detail = known.objection(OTHER, rows, is_frozen=False)
    assert reason is Reason.VERIFICATION_FAILED
    assert "a row changes" in detail


def test_comparisons_come_again_and_rest() -> None:
    """After ``verify_every`` replays, but not while nothing may be compared."""
    known = captured(verify_every=2)
    known.passed()
    known.schedule_check()
    assert not known.due(OTHER, SIZE)
    known.replay_count = 2
    assert known.objection(OTHER, SIZE, is_frozen=False)[0] is Reason.VERIFIED_NOW
    assert known.objection(OTHER, SIZE, is_frozen=True)[0] is Reason.FROZEN
    known.schedule_check(rests=True)
    assert not known.due(OTHER, SIZE)


def test_a_graph_of_somebody_else_is_never_compared() -> None:
    """Nobody knows what it does to memory; nor is one that is trusted."""
    assert not captured(knows_effects=False).due(OTHER, SIZE - 1)
    known = captured()
    known.trust()
    assert (known.due(OTHER, SIZE - 1), known.may_hit(SIZE - 1)) == (False, True)


def test_the_batch_that_leaves_less_untested_counts() -> None:
    """A later one that hides more takes nothing away; two that each hide something show nothing together."""
    constant = ((1, torch.zeros(1)),)
    known = RowProof(True, assumed=constant)
    worse = RowProof(True, untested=("ids",), assumed=constant)
    assert worse.after(known).untested == ()
    assert known.after(worse).untested == ()
    other = RowProof(True, untested=("mask",))
    assert other.after(worse).untested == ("mask",)
