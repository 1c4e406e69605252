"""Decisions: the table of sizes, what it says of every number of rows, and the memory of answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import CUDAGraphMode, Decision, Reason
from graphdispatch.engines import BatchDescriptor
from graphdispatch.runtime.decide import Memo, SizeTable
from graphdispatch.sizes import Extents, axes_of, pack

FULL, NONE = CUDAGraphMode.FULL, CUDAGraphMode.NONE
sizes = st.lists(st.integers(1, 60), min_size=1, unique=True).map(lambda found: tuple(sorted(found)))


def table(chosen: tuple[int, ...], *, pad_batches: bool = True) -> SizeTable:
    """A table of FULL graphs."""
    return SizeTable(chosen, FULL, pad_batches=pad_batches)


@given(sizes, st.integers(1, 70))
def test_a_batch_goes_to_the_smallest_size_that_holds_it(chosen: tuple[int, ...], rows: int) -> None:
    """Each number of rows up to the largest size has a graph, whose descriptor it gets; one above has none."""
    decision = table(chosen).decide(rows)
    fitting = [size for size in chosen if size >= rows]
    assert decision.mode is (FULL if fitting else NONE)
    assert decision.size == (fitting[0] if fitting else rows)
    assert decision.rows == rows
    assert decision.descriptor == (BatchDescriptor(fitting[0]) if fitting else None)
    wanted = Reason.EXACT if rows in chosen else Reason.PADDED if fitting else Reason.ABOVE_LARGEST_SIZE
    assert decision.reason is wanted


lengths = st.tuples(st.integers(1, 9), st.integers(1, 9))


@given(st.sets(lengths, min_size=1, max_size=6), lengths)
def test_a_batch_of_two_lengths_goes_to_the_smallest_pair(chosen: set[tuple[int, int]], batch: tuple[int, int]) -> None:
    """Of the pairs with room for both lengths, one with the smallest product; the descriptor has it."""
    axes = axes_of(("rows", "tokens"))
    decision = SizeTable(chosen, FULL, axes=axes).decide(pack(axes, batch))
    fitting = sorted((a * b, (a, b)) for a, b in chosen if a >= batch[0] and b >= batch[1])
    assert decision.mode is (FULL if fitting else NONE)
    if fitting:
        (cells, pair), size = fitting[0], decision.size
        assert isinstance(size, Extents)
        assert (size.lengths, decision.descriptor) == (pair, BatchDescriptor(cells, pair[0], pair[1] == 1))


@pytest.mark.parametrize(("chosen", "rows", "reason"), [((2, 4), 0, Reason.NO_ROWS), ((), 1, Reason.DISABLED)])
def test_an_eager_decision_has_a_reason(chosen: tuple[int, ...], rows: int, reason: Reason) -> None:
    """A batch that no size holds is eager, without a descriptor."""
    decision = table(chosen).decide(rows)
    assert (decision.mode, decision.descriptor, decision.reason) == (NONE, None, reason)


def test_without_padding_only_exact_sizes_are_served() -> None:
    """``pad_batches=False`` leaves the sizes between to eager."""
    made = table((2, 4), pad_batches=False)
    assert [made.decide(rows).reason for rows in (2, 3, 4)] == [Reason.EXACT, Reason.NOT_CAPTURED, Reason.EXACT]


def test_a_call_without_rows_has_the_decision_of_its_table() -> None:
    """That of the only graph, with the descriptor given for it; else one of one row."""
    four, given = BatchDescriptor(4), BatchDescriptor(9)
    for made, wanted in ((SizeTable.of_one(4, FULL), four), (SizeTable.of_one(4, FULL, given), given)):
        assert made.fixed == Decision(FULL, wanted, 4, Reason.EXACT, 4)
    assert table((2, 4)).fixed == Decision(FULL, BatchDescriptor(1), 1, Reason.EXACT, 1)


def test_memory_is_bounded_and_answers_stay_right() -> None:
    """Any number of questions keeps at most that many answers, and later ones are kept as well as the first."""
    memo = Memo[int, int](lambda question: -question, 4)
    for question in range(100):
        assert memo[question] == -question
        assert len(memo) <= 4
    assert 99 in memo
