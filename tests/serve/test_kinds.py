"""Kinds of calls beyond what is kept: none is locked out for good, and calls that always change cost little."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphOptions, Graphed, Reason, graphed

ROWS = 4


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def twice(x: torch.Tensor, other: Any = None) -> torch.Tensor:
    """It ignores its second argument."""
    return x * 2


def serve(fn: Callable[..., Any] = twice, *, most: int = 2, capture_after: int = 1) -> Graphed[..., Any]:
    """A served callable that keeps few kinds of calls."""
    return graphed(
        fn, dynamic={"x": 0}, sizes=(ROWS,), options=CUDAGraphOptions(max_signatures=most, capture_after=capture_after)
    )


def call(step: Graphed[..., Any], columns: int, *others: Any) -> Reason:
    """The reason of one call, answered as eager answers."""
    x = torch.randn(ROWS, columns)
    assert torch.equal(step(x, *others), x * 2)
    assert step.last_decision is not None
    return step.last_decision.reason


def calls_until_graph(step: Graphed[..., Any], columns: int, most: int = 5000) -> int:
    """How many calls of a kind are refused before it gets a graph."""
    for number in range(most):
        if call(step, columns) is Reason.CAPTURED_NOW:
            return number
    raise AssertionError("it never got a graph")


def test_a_kind_that_is_used_no_more_gives_way() -> None:
    """The one used least recently; a kind that is in use stays."""
    step = serve()
    for columns in (3, 5, 3, 3):
        call(step, columns)
    refused = [call(step, 7) for _ in range(16) if call(step, 3) is Reason.EXACT]
    assert refused == [Reason.TOO_MANY_SIGNATURES] * 16
    assert call(step, 7) is Reason.CAPTURED_NOW
    assert call(step, 3) is Reason.EXACT
    assert call(step, 5) is Reason.TOO_MANY_SIGNATURES
    assert len(step.entries) == 2
    assert step.memory_bytes == step.memory_report().total
    step.check_integrity()


def test_kinds_in_use_stay() -> None:
    """However often another one comes."""
    step = serve()
    for _ in range(3):
        call(step, 3)
        call(step, 5)
    for _ in range(200):
        assert (call(step, 3), call(step, 5)) == (Reason.EXACT, Reason.EXACT)
        assert call(step, 7) is Reason.TOO_MANY_SIGNATURES


def test_kinds_whose_captures_failed_give_way() -> None:
    """They have no graph to lose."""
    step = serve(lambda x: x * 2 if x.shape[1] == 7 or x.sum().item() > -1e9 else x, most=2)
    for columns in (3, 5):
        assert call(step, columns) is Reason.CAPTURE_UNSAFE
    assert calls_until_graph(step, 7) == 16


def test_each_replacement_makes_the_next_one_rarer() -> None:
    """Kinds that come in turns do not have a graph captured each time."""
    step = serve(most=1)
    call(step, 3)
    waits = [calls_until_graph(step, columns) for columns in (5, 3, 5, 3)]
    assert waits == [16, 32, 64, 128]


@pytest.mark.parametrize(
    ("others", "what"),
    [
        (lambda number: (3, number), "argument 'other' had other values; pass it as a tensor"),
        (lambda number: (3, str(number)), "argument 'other' had other values; pass it as a tensor"),
        (lambda number: (1 + number,), "argument 'x' had other shapes; name the dimension in dynamic="),
        (lambda number: (3, type("Made", (), {})), "argument 'other' was another object; pass the same one"),
    ],
)
@pytest.mark.parametrize("capture_after", [1, 2])
def test_calls_that_always_change_are_left_eager(
    others: Callable[[int], tuple[Any, ...]], what: str, capture_after: int
) -> None:
    """No graph is captured for them any more, and the reason names the argument and a remedy."""
    step = serve(most=8, capture_after=capture_after)
    found = [call(step, *others(number)) for number in range(300)]
    assert set(found[70:]) == {Reason.SIGNATURE_CHANGES}
    assert step.stats.captures <= 10  # two came in the place of others
    assert capture_after == 1 or len(step._graphs.groups) == 1  # what serves nothing holds no memory
    assert what in step.explain(torch.randn(ROWS, others(300)[0]), *others(300)[1:])


def test_a_kind_that_has_a_graph_is_served_among_those_that_change() -> None:
    """Only new kinds are refused."""
    step = serve(most=8, capture_after=2)
    for number in range(200):
        call(step, 3, "same")
        call(step, 3, number)
    assert (call(step, 3, "same"), call(step, 3, -1)) == (Reason.EXACT, Reason.SIGNATURE_CHANGES)


def test_calls_that_change_no_more_are_served_in_time() -> None:
    """After 1,024 refusals the next kinds are looked at."""
    step = serve(most=8, capture_after=2)
    for number in range(100):
        call(step, 3, number)
    found = [call(step, 3, "same") for _ in range(1100)]
    assert found[-1] is Reason.EXACT
    assert found.count(Reason.SIGNATURE_CHANGES) < 1024


@pytest.mark.parametrize("end", ["invalidate", "sleep"])
def test_what_releases_all_graphs_ends_the_rest(end: str) -> None:
    """Then new kinds are looked at again, as soon as graphs may be captured."""
    step = serve(most=8, capture_after=2)
    for number in range(100):
        call(step, 3, number)
    assert call(step, 3, -1) is Reason.SIGNATURE_CHANGES
    getattr(step, end)()
    assert call(step, 3, -2) is (Reason.ASLEEP if end == "sleep" else Reason.FIRST_SIGHTING)
    if end == "sleep":
        step.wake()
        assert call(step, 3, -2) is Reason.FIRST_SIGHTING
    assert call(step, 3, -2) is Reason.CAPTURED_NOW


def test_kinds_that_come_again_are_no_change() -> None:
    """A cycle over a few more kinds than are kept gets its graphs."""
    step = serve(most=8, capture_after=2)
    found = [call(step, 3, number) for _ in range(30) for number in range(10)]
    assert Reason.SIGNATURE_CHANGES not in found
    assert len(step.entries) >= 4
