"""How far an iterator is, without a step."""

import pytest

from graphdispatch.state.iterators import progress

from ..behaviour.cases_written import ITERATORS


@pytest.mark.parametrize("name", ITERATORS)
def test_progress_shows_without_a_step(name: str) -> None:
    """It differs after each step, and only then."""
    iterator = ITERATORS[name]()
    for _ in range(2):
        before = progress(iterator)
        assert progress(iterator) == before
        next(iterator)
        assert progress(iterator) != before
