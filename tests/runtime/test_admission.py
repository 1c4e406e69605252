"""``Admission``: misses within a window; and what that does for a cache under scans and cycles."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from graphdispatch import Graphed, Reason, graphed
from graphdispatch.errors import ConfigError
from graphdispatch.runtime.admission import Admission

from ..helpers import Clock, check_rows, with_options


@pytest.mark.parametrize(
    ("options", "misses", "now", "since"),
    [
        ((2,), [], 15, None),
        ((2,), [10], 15, 10),
        ((3,), [0, 100, 104], 110, 100),  # the last but one before now
        ((2, 50), [0], 50, 0),
        ((2, 50), [0], 51, None),  # beyond the window a miss counts no more
        ((1,), [0, 1], 1, 1),
    ],
)
def test_which_misses_count(options: tuple[int, ...], misses: list[int], now: int, since: int | None) -> None:
    """The latest of a key within the window, until it is captured: then it begins anew."""
    clock = Clock(0)
    admission = Admission(*options, clock=clock)
    for clock.now in misses:
        admission.count_miss("key")
    clock.now = now
    assert admission.since("key") == since
    assert len(admission._misses) == bool(misses and options[0] > 1)
    admission.forget("key")
    assert admission.since("key") == (now if options[0] == 1 else None)


def test_memory_is_bounded_by_the_window() -> None:
    """Keys that last missed before it are forgotten."""
    clock = Clock(0)
    admission = Admission(2, 100, clock=clock)
    for clock.now in range(10_000):
        admission.count_miss(clock.now)
    assert len(admission._misses) == 101


def test_options_are_checked() -> None:
    """Counts are whole and positive."""
    with pytest.raises(ConfigError, match="capture_after must be an integer >= 1, got 0"):
        Admission(0)


def served(sizes: Iterable[int], **options: object) -> Graphed[..., torch.Tensor]:
    """A step that was called once with a batch of each of these sizes, every answer compared with eager's."""
    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=tuple(range(1, 41)), **with_options(options))  # type: ignore[call-overload]
    check_rows(step, *sizes)
    step.check_integrity()
    return step


def test_a_cycle_larger_than_the_cache_does_not_thrash() -> None:
    """Of ten sizes in turn, four keep their graphs, and nothing is evicted."""
    step = served(list(range(1, 11)) * 8, max_cached_graphs=4)
    assert (step.stats.captures, step.stats.evictions) == (4, 0)
    assert step.stats.hits == 4 * (8 - 3)
    assert step.stats.reasons[Reason.CACHE_FULL] > 0


SCAN = [size for odd in range(4, 40) for size in (odd, 1, 2, 3)]
"""Odd sizes among usual ones."""


@pytest.mark.parametrize(
    ("sizes", "options", "kept", "evictions"),
    [
        ([1, 2, 3] * 20 + [7, 8, 9] * 4, {"max_cached_graphs": 3}, [7, 8, 9], 3),
        ([1, 2, 3] * 4 + SCAN * 2, {"max_cached_graphs": 3}, [1, 2, 3], 0),
        ([1, 1, 2, 2, 1], {"max_cached_graphs": 1}, [2], 1),  # an evicted size begins anew
    ],
)
def test_new_habits_displace_old_ones(sizes: list[int], options: Any, kept: list[int], evictions: int) -> None:
    """When other sizes come from now on, the cache follows at their second miss within the window.

    Sizes that come twice, far apart, leave the graphs that are in use alone.
    """
    step = served(sizes, **options)
    assert [entry.size for entry in step.entries] == kept
    assert step.stats.evictions == evictions


def test_a_full_cache_is_explained() -> None:
    """A size that finds no room says so, and what to raise."""
    step = served([1, 1, 1, 5, *[1] * 9], max_cached_graphs=1)
    explained = step.explain(torch.randn(5, 3))
    assert "the cache is full of graphs that are used more often; raise max_cached_graphs" in explained
