"""Random programs with Python state under random mutations: behind every front end, answers and state are eager's.

``make fuzz`` draws new seeds. It makes as many programs as its profile says, or as fit into GRAPHDISPATCH_FUZZ_SECONDS.
"""

import itertools
import os
import time

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from .state_parts import PARTS
from .state_runs import failure

SECONDS = float(os.environ.get("GRAPHDISPATCH_FUZZ_SECONDS", "0"))


@pytest.mark.parametrize("part", sorted(PARTS))
def test_each_kind_of_state_is_seen_or_refused(part: str) -> None:
    """A fixed program of each kind of state alone."""
    found = failure(1, only=(part,))
    assert found is None, found


@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(start=st.integers(0, 2**40))
def test_random_programs_are_eagers(start: int) -> None:
    """Programs of several kinds of state, through a random front end with random options."""
    end = time.monotonic() + SECONDS / settings().max_examples
    for seed in itertools.count(start):
        found = failure(seed)
        assert found is None, found
        if time.monotonic() >= end:
            return
