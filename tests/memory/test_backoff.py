"""``Backoff`` and ``Quarantine``: waits grow and end, keys are kept out for just so long, memory is bounded."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import Reason
from graphdispatch.errors import ConfigError
from graphdispatch.memory.admission import Backoff, Failure, Quarantine

WHY = Reason.CALL_RAISED
BACKOFFS = st.builds(
    lambda first, factor, room: Backoff(first, factor, first + room),
    st.floats(0, 1e6),
    st.floats(1, 100),
    st.floats(0, 1e9) | st.just(inf),
)


@given(BACKOFFS, st.integers(1, 10_000))
def test_waits_grow_from_the_first_to_the_most(backoff: Backoff, times: int) -> None:
    """The first is as stated, none is shorter than the one before, none is beyond the most, and none overflows."""
    assert backoff.wait(1) == backoff.first
    assert backoff.wait(times) <= backoff.wait(times + 1) <= backoff.most


@given(st.integers(1, 100), st.integers(1, 8), st.integers(1, 40))
def test_each_wait_is_a_factor_longer(first: int, factor: int, times: int) -> None:
    """Whole numbers stay exact as long as they are below the most."""
    assert Backoff(first, factor).wait(times) == first * factor ** (times - 1)
    assert Backoff(first, factor).wait(1 - times) == 0  # nothing failed


@pytest.mark.parametrize("given", [(-1, 2), (1, 0.5), (3, 2, 2), (float("nan"), 2)])
def test_waits_that_could_shrink_are_refused(given: Any) -> None:
    """The message shows what was given."""
    with pytest.raises(ConfigError, match=r"waits must be 0 <= first <= most with factor >= 1, got Backoff\("):
        Backoff(*given)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.booleans()), max_size=40))
def test_a_key_is_kept_out_until_its_wait_is_over(events: list[tuple[int, int, bool]]) -> None:
    """Against a model by key: blocked from the failure until ``retry_at``, not a moment longer; others are not."""
    backoff, held, model, now = Backoff(3, 2, 40), Quarantine[int](Backoff(3, 2, 40)), dict[int, tuple[int, float]](), 0
    for key, later, is_failure in events:
        now += later
        if is_failure:
            times = model.get(key, (0, 0))[0] + 1
            model[key] = times, now + backoff.wait(times)
            assert held.fail(key, now, WHY, "again") == Failure(*model[key], WHY, "again")
        else:
            model.pop(key, None)
            held.forgive(key)
        for other in range(4):
            until = model.get(other, (0, -inf))[1]
            assert (held.blocked(other, now) is not None) is (now < until)
            assert held.blocked(other, until) is None
            assert (held.get(other) is not None) is (other in model)
        assert len(held) == len(list(held)) == len(model)


def test_the_last_failure_is_final() -> None:
    """At ``max_failures`` in a row a key is out for good; a success in between begins anew."""
    held = Quarantine[str](Backoff(16, 4), max_failures=3)
    assert [held.fail("key", 0, WHY, "").retry_at for _ in range(3)] == [16, 64, inf]
    assert held.blocked("key", 10**9) is not None
    held.forgive("key")
    assert held.fail("key", 0, WHY, "").retry_at == 16
    assert held.fail("key", 5, WHY, "", is_final=True) == Failure(2, inf, WHY, "")
    assert (held.reasons, len(held)) == ({WHY}, 1)
    assert repr(held) == "<Quarantine of 1 keys, Backoff(first=16, factor=4, most=inf)>"
    held.clear()
    assert (len(held), held.reasons, held.blocked("key", 0)) == (0, set(), None)


def test_a_passing_failure_is_retried_at_once_and_is_never_the_last() -> None:
    """The waits of the others come one failure later, and ``max_failures`` does not end them."""
    held = Quarantine[str](Backoff(16, 4), max_failures=2)
    waits = [held.fail("key", 0, Reason.STATE_REBOUND, "", is_passing=True).retry_at for _ in range(4)]
    assert waits == [0, 16, 64, 256]
    assert held.fail("key", 0, WHY, "").retry_at == inf
