"""What may come to a cache, or to where compiled code reads, without telling anything."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from graphdispatch.proof.state.tolerant import Results, Untrained, matters

from ...behaviour.cases import Box

WEIGHT = nn.Parameter(torch.ones(1))
VALUES: list[tuple[Any, bool]] = [
    (WEIGHT, True),
    (nn.ReLU(), True),
    ({"a": [(WEIGHT,)]}, True),
    ([[[[WEIGHT]]]], False),  # too deep
    ([torch.ones(1), 1], False),
    (torch.ones(1), False),
    ("text", False),
]


@pytest.mark.parametrize(("value", "trains"), VALUES, ids=str)
def test_what_may_train_is_no_change_that_tells_nothing(value: Any, trains: bool) -> None:
    """A module or a tensor with a gradient, or a container of such. Of other objects nobody knows; what was there may
    go and come again."""
    assert matters(value) is trains
    first, second = Box(), torch.ones(1)
    held: list[Any] = [first]
    is_untrained = Untrained(lambda: list(held))
    for now in ([first], [], [first, value]):
        held[:] = now
        assert is_untrained() is not (trains and len(now) == 2)
    held[:] = [first, second]
    assert [is_untrained(), is_untrained()] == [True, True]
    held[:] = [first, Box()]
    assert not is_untrained()


def test_further_results_of_a_cache_tell_nothing() -> None:
    """Results that are no longer there do, though others are in their places."""
    cached = functools.lru_cache(lambda _: object())
    cached(1)
    holds = Results(cached)
    for key in (1, 2, 2, 3):
        cached(key)
        assert holds()
    cached.cache_clear()
    assert not holds()
    for key in (1, 2, 3):
        cached(key)
        assert not holds()
