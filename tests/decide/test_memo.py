"""``Memo``: each answer made once, memory bounded, errors passed through."""

import pytest

from graphdispatch.decide.decision import Memo


def test_an_answer_is_made_once() -> None:
    """The second question is a lookup."""
    asked: list[int] = []
    memo = Memo[int, int](lambda question: asked.append(question) or question * 2, 8)  # type: ignore[func-returns-value]
    assert [memo[3], memo[3], memo[4]] == [6, 6, 8]
    assert asked == [3, 4]


def test_memory_is_bounded_and_answers_stay_right() -> None:
    """Any number of questions keeps at most that many answers, and later ones are kept as well as the first."""
    memo = Memo[int, int](lambda question: -question, 4)
    for question in range(100):
        assert memo[question] == -question
        assert len(memo) <= 4
    assert 99 in memo


def test_an_error_is_not_kept() -> None:
    """What cannot be answered is asked again."""
    answers = iter([ZeroDivisionError("no"), 1])

    def answer(question: int) -> int:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    memo = Memo[int, int](answer, 4)
    with pytest.raises(ZeroDivisionError, match="no"):
        memo[0]
    assert memo[0] == 1
