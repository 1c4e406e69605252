"""Policies: which mode they choose for which key, from plain data."""

from typing import Any

import pytest

from graphdispatch.engines import DefaultDispatchPolicy, DispatchKey, DispatchMode
from graphdispatch.errors import ConfigError

EAGER, FULL, PIECEWISE = DispatchMode.EAGER, DispatchMode.CUDAGRAPH, DispatchMode.PIECEWISE


def key(tokens: int) -> DispatchKey:
    """A key of one request."""
    return DispatchKey(tokens, 1)


@pytest.mark.parametrize(
    ("available", "prefer_piecewise", "chosen"),
    [
        ((FULL, PIECEWISE, EAGER), False, FULL),
        ((FULL, PIECEWISE, EAGER), True, PIECEWISE),
        ((FULL, EAGER), True, FULL),
        ((PIECEWISE, EAGER), False, PIECEWISE),
        ((EAGER,), False, EAGER),
        ((), False, EAGER),
    ],
)
def test_a_graph_goes_before_eager(
    available: tuple[DispatchMode, ...], prefer_piecewise: bool, chosen: DispatchMode
) -> None:
    """The preferred kind of graph, then the other, then eager."""
    policy = DefaultDispatchPolicy(prefer_piecewise=prefer_piecewise)
    assert policy.select_mode(key(8), available) is chosen


@pytest.mark.parametrize(("tokens", "chosen"), [(3, EAGER), (4, FULL), (16, FULL), (17, EAGER)])
def test_the_limits_are_inclusive(tokens: int, chosen: DispatchMode) -> None:
    """A batch of exactly the fewest or the most tokens is served by a graph, one beyond is not."""
    policy = DefaultDispatchPolicy(4, 16)
    assert policy.select_mode(key(tokens), (FULL, EAGER)) is chosen


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"min_tokens_for_graph": 0}, "min_tokens_for_graph must be an integer >= 1, got 0"),
        ({"min_tokens_for_graph": 9, "max_tokens_for_graph": 8}, "max_tokens_for_graph must be at least .*9, got 8"),
    ],
)
def test_limits_out_of_order_are_refused(limits: dict[str, Any], named: str) -> None:
    """The message names the limit, what it must be and what it is."""
    with pytest.raises(ConfigError, match=named):
        DefaultDispatchPolicy(**limits)
