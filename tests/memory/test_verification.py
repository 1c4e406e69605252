"""``Verification``: when a batch is compared with eager, and what a graph may serve without."""

from typing import Any

import torch

from graphdispatch.memory.proof import MOST_ALIKE, RowProof, Verification

SIZE = 4
FIRST, OTHER = [torch.zeros(SIZE, 2)], [torch.ones(SIZE, 2)]


def captured(**given: Any) -> Verification:
    """What is known of a graph that was just captured with the first batch."""
    return Verification(size=SIZE, warm_batch=tuple(FIRST), **given)


def test_calls_that_are_all_alike_become_hits() -> None:
    """After some of them; padded ones do not."""
    known = captured(replay_count=MOST_ALIKE)
    known.compared.note(SIZE - 1, SIZE)
    known.program.proof = RowProof(True)
    assert (known.may_hit(SIZE), known.may_hit(SIZE - 1)) == (True, False)


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
