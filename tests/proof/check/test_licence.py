"""``Verification`` and ``RowProof``: when a batch is compared with eager, and what a graph may serve without."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from graphdispatch import Reason
from graphdispatch.modes import EntryState
from graphdispatch.proof.check.licence import MOST_ALIKE, RowProof, Verification
from graphdispatch.sizes import ROWS, axes_of, pack

SIZE = 4
FIRST, OTHER = [torch.zeros(SIZE, 2)], [torch.ones(SIZE, 2)]
BOTH = axes_of(["batch", "seq"])


class Above:
    """A run that speaks for batches of more than so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def speaks_for(self, extents: Sequence[int]) -> bool:
        """Whether there are more."""
        return extents[0] > self.rows


def proven(**given: Any) -> RowProof:
    """What a run shows that speaks for batches of more than one row, of which a padded one was compared."""
    return RowProof(**({"axes": [ROWS], "runs": [Above(1)], "is_compared": True} | given))


def captured(**given: Any) -> Verification:
    """What is known of a graph that was just captured with the first batch."""
    return Verification(size=SIZE, warm_batch=tuple(FIRST), **given)


def test_calls_that_are_all_alike_become_hits() -> None:
    """After some of them; padded ones do not."""
    graph = captured(replay_count=MOST_ALIKE, proof=proven(), traced={SIZE})
    assert (graph.may_hit(SIZE), graph.may_hit(SIZE - 1)) == (True, False)


def test_a_graph_of_somebody_else_is_never_compared() -> None:
    """Nobody knows what it does to memory; nor is one that is trusted."""
    assert not captured(knows_effects=False).due(OTHER, SIZE - 1)
    graph = captured()
    graph.trust()
    assert (graph.due(OTHER, SIZE - 1), graph.may_hit(SIZE - 1)) == (False, True)


def test_one_padded_batch_is_compared() -> None:
    """It is the alarm for a wrong rule; then all batches for which the run speaks are hits."""
    graph = captured(state=EntryState.VERIFIED, proof=proven(is_compared=False), traced={SIZE})
    assert graph.proof is not None
    assert [graph.may_hit(rows) for rows in (1, 2, 3, 4)] == [False, False, False, True]
    graph.proof.note_compared(3, SIZE)
    assert [graph.may_hit(rows) for rows in (1, 2, 3, 4)] == [False, True, True, True]


def test_a_batch_outside_of_the_run_is_due_until_a_run_speaks_for_it() -> None:
    """Or until it is known that Python takes another path for it."""
    proof = proven(runs=[Above(2)])
    graph = captured(proof=proof, traced={SIZE})
    assert [graph.needs_look(rows) for rows in (1, 2, 3, 4)] == [True, True, False, False]
    proof.unlike[1] = "another path"
    proof.runs.append(Above(1))
    assert not any(graph.needs_look(rows) for rows in (1, 2, 3, 4))
    assert proof.objection(1, SIZE) == (Reason.PATH_CHANGES, "another path")
    assert proof.objection(2, SIZE) is None


def test_by_the_users_word_both_ends_are_compared() -> None:
    """A batch smaller than all that were compared with a size is compared; what lies between is served."""
    proof = proven(runs=[], is_word=True, is_compared=False)
    graph, other = captured(proof=proof), Verification(size=2 * SIZE, proof=proof)
    proof.note_compared(3, SIZE)
    assert [graph.needs_look(rows) for rows in (1, 2, 3)] == [True, True, False]
    proof.note_compared(1, SIZE)
    assert not any(graph.needs_look(rows) for rows in (1, 2, 3))
    assert other.needs_look(2)  # the ends of another size


def test_a_run_whose_code_nobody_traced_says_nothing_of_effects() -> None:
    """It must speak for a batch whose code was traced for this graph, too."""
    proof = proven(runs=[Above(2)])
    graph, other = captured(proof=proof, traced={1}), captured(proof=proof, traced={1, 4})
    assert [graph.needs_look(rows) for rows in (1, 2, 3)] == [True] * 3
    assert [other.needs_look(rows) for rows in (1, 2, 3, 4)] == [True, True, False, False]


@pytest.mark.parametrize("along", ["", "real rows depend on padding along 'seq'"])
def test_a_length_is_looked_at_once(along: str) -> None:
    """Where elements mix along it: until then padded batches are compared, and by what it showed they are served."""
    _, seq = BOTH
    proof = proven(axes=BOTH, mixed=frozenset([seq]))
    full, short, few = (pack(BOTH, lengths) for lengths in ((4, 8), (4, 6), (3, 8)))
    graph = Verification(size=full, proof=proof, traced={full})
    assert (graph.needs_look(short), graph.needs_look(few)) == (True, False)
    proof.along[seq] = along
    assert not graph.needs_look(short)
    assert proof.objection(short, full) == ((Reason.ROWS_MIX, along) if along else None)
    assert proof.objection(few, full) is None
    proof.against_rows = Reason.ROWS_MIX, "rows mix"
    assert proof.objection(few, full) == (Reason.ROWS_MIX, "rows mix")
