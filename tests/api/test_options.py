"""``CUDAGraphOptions`` is the one home of limits: each front end honours an option, or refuses it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphMode, CUDAGraphOptions, MemoryBudget, Reason, graphed
from graphdispatch.engines import (
    AdaptiveCUDAGraphWrapper,
    BatchDescriptor,
    CUDAGraphConfig,
    CUDAGraphManager,
    CUDAGraphWrapper,
    StreamDispatcher,
)
from graphdispatch.errors import ConfigError

SET: dict[str, Any] = {
    "capture_after": 3,
    "capture_window": 9,
    "max_signatures": 9,
    "max_cached_graphs": 9,
    "memory_budget_bytes": 1 << 20,
    "eviction": "lru",
    "budget": MemoryBudget(1 << 20),
}
"""A value for each limit that is none of the defaults."""

MAKERS: dict[str, Callable[[CUDAGraphOptions], Any]] = {
    "graphed": lambda options: graphed(double, dynamic={"x": 0}, options=options),
    "CUDAGraphManager": lambda options: CUDAGraphManager(CUDAGraphConfig(options=options)),
    "CUDAGraphWrapper": lambda options: CUDAGraphWrapper(double, options=options),
    "AdaptiveCUDAGraphWrapper": lambda options: AdaptiveCUDAGraphWrapper(double, options=options),
    "StreamDispatcher": lambda options: StreamDispatcher(double, options=options),
}
REFUSED: dict[str, set[str]] = {
    "graphed": set(),
    "CUDAGraphManager": set(),
    "CUDAGraphWrapper": {"max_cached_graphs"},
    "AdaptiveCUDAGraphWrapper": {"max_cached_graphs", "capture_after", "eviction"},
    "StreamDispatcher": set(SET),
}


def double(x: torch.Tensor) -> torch.Tensor:
    """The model."""
    return x * 2


@pytest.mark.parametrize("option", SET)
@pytest.mark.parametrize("front_end", MAKERS)
def test_a_front_end_takes_an_option_or_refuses_it(front_end: str, option: str) -> None:
    """Never silently: what it cannot honour is an error that names the option and the front end."""
    options = CUDAGraphOptions(**{option: SET[option]})
    if option in REFUSED[front_end]:
        with pytest.raises(ConfigError, match=rf"options\.{option} must be left out for \w*(Wrapper|Dispatcher), got"):
            MAKERS[front_end](options)
    else:
        MAKERS[front_end](options)


def test_a_wrapper_captures_after_as_many_calls_as_the_options_say() -> None:
    """At its first call by default, and later where that is asked for."""
    for after, reasons in ((None, [Reason.CAPTURED_NOW]), (2, [Reason.FIRST_SIGHTING, Reason.CAPTURED_NOW])):
        wrapper = CUDAGraphWrapper(double, options=CUDAGraphOptions(capture_after=after))
        with torch.no_grad():
            for _ in reasons:
                how = {"batch_descriptor": BatchDescriptor(4), "cudagraph_runtime_mode": CUDAGraphMode.FULL}
                wrapper(torch.randn(4, 3), **how)
        assert list(wrapper.get_stats().reasons) == reasons


def test_there_is_room_for_every_size() -> None:
    """More than 64 sizes have room for their graphs, unless the options say how many there may be."""
    config = CUDAGraphConfig(capture_sizes=range(1, 101), max_batch_size=100)
    assert CUDAGraphConfig().max_cached_graphs == 64
    assert config.max_cached_graphs >= 100
    assert config.replace(options=CUDAGraphOptions(max_cached_graphs=3)).max_cached_graphs == 3
