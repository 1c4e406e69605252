"""Random compositions of operators: what a run proves of them is true in numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .compositions import wrong


@pytest.mark.filterwarnings("ignore")
@given(first=st.integers(0, 1 << 40))
def test_what_is_proven_of_a_composition_is_true(first: int) -> None:
    """Real rows of a padded batch are those of the batch alone, whatever padding holds."""
    assert [text for text in map(wrong, range(first, first + 10)) if text not in ("", "refused")] == []
