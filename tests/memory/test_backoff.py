"""``Quarantine``: waits grow and end, sizes are kept out for just so long, and a passing cause is never the last."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from graphdispatch import Reason
from graphdispatch.memory.admission import Failure, Quarantine

WHY = Reason.CALL_RAISED


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.booleans()), max_size=40))
def test_a_size_is_kept_out_until_its_wait_is_over(events: list[tuple[int, int, bool]]) -> None:
    """Against a model by size: blocked from the failure until ``retry_at``, not a moment longer; others are not."""
    held, model, now = Quarantine(100), dict[int, tuple[int, int]](), 0
    for size, later, is_failure in events:
        now += later
        if is_failure:
            times = model.get(size, (0, 0))[0] + 1
            model[size] = times, now + 16 * 4 ** (times - 1)
            held.fail(size, now, WHY, "again")
            assert held[size] == Failure(*model[size], WHY, "again")
        else:
            model.pop(size, None)
            held.pop(size, None)
        for other in range(4):
            until = model.get(other, (0, 0))[1]
            assert (held.blocked(other, now) is not None) is (now < until)
            assert held.blocked(other, until) is None
            assert (other in held) is (other in model)


def test_the_last_failure_is_final() -> None:
    """At ``max_failures`` in a row a size is out for good; a success in between begins anew."""
    held = Quarantine(max_failures=3)
    waits = []
    for _ in range(3):
        held.fail(8, 0, WHY, "")
        waits.append(held[8].retry_at)
    assert waits == [16, 64, inf]
    assert held.blocked(8, 10**9) is not None
    held.pop(8)
    held.fail(8, 0, WHY, "")
    assert held[8].retry_at == 16
    held.fail(8, 5, WHY, "", is_final=True)
    assert held[8] == Failure(2, inf, WHY, "")


def test_a_passing_failure_is_retried_at_once_and_is_never_the_last() -> None:
    """The waits of the others come one failure later, and ``max_failures`` does not end them."""
    held = Quarantine(max_failures=2)
    waits = []
    for _ in range(4):
        held.fail(8, 0, Reason.STATE_REBOUND, "")
        waits.append(held[8].retry_at)
    assert waits == [0, 16, 64, 256]
    held.fail(8, 0, WHY, "")
    assert held[8].retry_at == inf
