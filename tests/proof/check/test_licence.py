"""``Verification`` and ``RowProof``: when a batch is compared with eager, and what a graph may serve without."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Reason, graphed
from graphdispatch.engines import DispatchKey
from graphdispatch.engines.registered_graphs import entry_around
from graphdispatch.errors import ConfigError
from graphdispatch.modes import EntryState
from graphdispatch.proof.check.licence import RowProof, Verification
from graphdispatch.runtime.entry import CUDAGraphEntry
from graphdispatch.runtime.protocols import MOST_ALIKE, Licence
from graphdispatch.sizes import ROWS, axes_of
from graphdispatch.testing import MockCUDAGraph

from ...helpers import check_rows, make, shown_of

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
    """What is shown of a graph that was just captured with the first batch."""
    return Verification(size=SIZE, batches=[tuple(FIRST)], **given)


def entry_of(licence: Licence, state: EntryState = EntryState.CAPTURED, **given: Any) -> CUDAGraphEntry:
    """An entry with this licence, and nothing else but what a licence reads."""
    made = entry_around(MockCUDAGraph(), DispatchKey(SIZE, SIZE))
    for name, value in {"licence": licence, "state": state, **given}.items():
        setattr(made, name, value)
    return made


def test_a_graph_of_somebody_else_is_never_compared() -> None:
    """Nobody knows what it does to memory; nor is one that is trusted, unless a replay failed."""
    licence = Licence()
    foreign, own = (entry_of(licence, EntryState.VERIFIED, call=call) for call in (None, torch.neg))
    for entry in (foreign, own):
        assert (licence.verdict(entry, OTHER, SIZE - 1), licence.may_hit(entry, SIZE - 1)) == ((None, ""), True)
        entry.failed()
        assert not licence.may_hit(entry, SIZE)
    assert licence.verdict(foreign, OTHER, SIZE)[0] is None
    assert licence.verdict(own, OTHER, SIZE)[0] is Reason.VERIFIED_NOW


def test_a_batch_outside_of_the_run_is_due_until_a_run_speaks_for_it() -> None:
    """Or until it is known that Python takes another path for it."""
    proof = proven(runs=[Above(2)])
    graph = captured(proof=proof, traced={SIZE})
    assert [graph.wants_look(rows) for rows in (1, 2, 3, 4)] == [True, True, False, False]
    proof.unlike[1] = "another path"
    proof.runs.append(Above(1))
    assert not any(graph.wants_look(rows) for rows in (1, 2, 3, 4))
    assert proof.objection(1, SIZE) == (Reason.PATH_CHANGES, "another path")
    assert proof.objection(2, SIZE) is None


def test_by_the_users_word_both_ends_are_compared() -> None:
    """A batch smaller than all that were compared with a size is compared; what lies between is served."""
    proof = proven(runs=[], is_word=True, is_compared=False)
    graph, other = captured(proof=proof), Verification(size=2 * SIZE, proof=proof)
    proof.note_compared(3, SIZE)
    assert [graph.wants_look(rows) for rows in (1, 2, 3)] == [True, True, False]
    proof.note_compared(1, SIZE)
    assert not any(graph.wants_look(rows) for rows in (1, 2, 3))
    assert other.wants_look(2)  # the ends of another size


def test_a_run_whose_code_nobody_traced_says_nothing_of_effects() -> None:
    """It must speak for a batch whose code was traced for this graph, too."""
    proof = proven(runs=[Above(2)])
    graph, other = captured(proof=proof, traced={1}), captured(proof=proof, traced={1, 4})
    assert [graph.wants_look(rows) for rows in (1, 2, 3)] == [True] * 3
    assert [other.wants_look(rows) for rows in (1, 2, 3, 4)] == [True, True, False, False]


class Three(Verification, name="three batches"):
    """A policy of its own: three batches."""

    __slots__ = ()
    wanted = 3


def test_a_policy_says_how_many_batches_must_agree() -> None:
    """A prewarm and calls that are all alike make as many as it wants; hits come after the last of them."""
    options = CUDAGraphOptions(capture_after=1, verify="three batches")
    x = torch.randn(SIZE, 2)
    for is_prewarmed in (True, False):
        step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=[SIZE], options=options)
        if is_prewarmed:
            step.prewarm(x)
        reasons = [(step(torch.randn(SIZE, 2)), step.last_decision.reason)[1] for _ in range(4)]
        waits = [] if is_prewarmed else [Reason.CAPTURED_NOW, Reason.VERIFIED_NOW, Reason.VERIFIED_NOW]
        assert reasons == (waits + [Reason.EXACT] * 4)[:4]
    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=[SIZE], options=options)
    for _ in range(MOST_ALIKE + 2):
        step(x)
    assert step.entries[0].state is EntryState.VERIFIED


class EveryThird(Verification, name="every third"):
    """A policy of its own: every third call of a size is compared, and no batch but that of the capture."""

    wanted = 1

    def compare_after(self, entry: CUDAGraphEntry) -> float:
        """Two others lie between."""
        return 2


def test_a_policy_may_compare_again_and_again() -> None:
    """Whoever looks for an explanation meanwhile; and not while the graphs are frozen."""
    options = CUDAGraphOptions(capture_after=1, verify="every third")
    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=[SIZE], options=options)
    step.prewarm(torch.randn(SIZE, 2))

    def compared(calls: int) -> list[bool]:
        found = []
        for _ in range(calls):
            step.explain(torch.randn(3, 2))
            found += [reason is Reason.VERIFIED_NOW for reason in check_rows(step, 3, width=2)]
        return found

    assert sum(compared(9)) == 3
    step.freeze()
    assert not any(compared(9))
    step.unfreeze()
    assert sum(compared(9)) == 3


def test_a_verified_graph_keeps_no_batch() -> None:
    """Those that it agreed on are kept until it serves."""
    step = make(sizes=(4,))
    check_rows(step, 4)
    assert len(shown_of(step).batches) == 1
    check_rows(step, 4)
    assert step.last_decision.reason is Reason.VERIFIED_NOW
    assert shown_of(step).batches == []


def test_a_policy_without_its_class_is_refused() -> None:
    """The message has the names that there are."""
    options = CUDAGraphOptions(verify="three batch")
    with pytest.raises(ConfigError, match=r"one of .*three batches.*did you mean 'three batches'"):
        graphed(lambda x: x * 2, dynamic={"x": 0}, options=options)
