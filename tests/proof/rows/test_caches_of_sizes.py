"""Caches of results that are keyed by sizes: what the run computes with must not come out of them later."""

from functools import lru_cache
from typing import Any

import pytest
import torch

import graphdispatch as gd

from ...helpers import check_rows


def halves(rows: int, width: int) -> tuple[int, int, int]:
    """A shape made of sizes, as einops makes it."""
    return rows, 2, width // 2


cached = lru_cache(maxsize=64)(halves)


def tried(x: torch.Tensor) -> torch.Tensor:
    """By the cache where the sizes can be keys, else without it."""
    try:
        shape = cached(*x.shape)
    except TypeError:
        shape = halves(*x.shape)
    return x.reshape(shape).relu()


def by_cache(x: torch.Tensor) -> torch.Tensor:
    """By the cache alone."""
    return x.reshape(cached(*x.shape)).relu()


@pytest.mark.parametrize("fn", [tried, by_cache])
def test_no_cache_keeps_a_number_of_the_run(fn: Any) -> None:
    """After graphs of several sizes, eager calls of every number of rows get plain numbers from the cache."""
    cached.cache_clear()
    step = gd.graphed(fn, dynamic={"x": 0}, sizes=(2, 4))
    step.prewarm(torch.randn(4, 6))
    check_rows(step, 4, 2, 3, 1, 4, 3, 2, 1, width=6)
    for rows in range(1, 5):
        assert all(type(size) is int for size in cached(rows, 6))
        fn(torch.randn(rows, 6))
