"""``CUDAGraphOptions`` is the one home of limits: each front end honours an option, or refuses it; and the log."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from graphdispatch import CUDAGraphOptions, graphed
from graphdispatch.engines import (
    AdaptiveCUDAGraphWrapper,
    CUDAGraphConfig,
    CUDAGraphManager,
    CUDAGraphWrapper,
    StreamDispatcher,
)
from graphdispatch.errors import ConfigError

from ..helpers import double

SET: dict[str, Any] = {
    "capture_after": 3,
    "capture_share": 0.5,
    "max_signatures": 9,
    "max_cached_graphs": 9,
    "memory_budget_bytes": 1 << 20,
}
"""A value for each limit that is none of the defaults."""


MAKERS: list[tuple[Callable[..., Any], list[str]]] = [
    (lambda options: graphed(double, dynamic={"x": 0}, options=options), []),
    (lambda options: CUDAGraphManager(CUDAGraphConfig(options=options)), []),
    (partial(CUDAGraphWrapper, double), ["max_cached_graphs"]),
    (partial(AdaptiveCUDAGraphWrapper, double), ["max_cached_graphs", "capture_after"]),
    (partial(StreamDispatcher, double), [*SET]),
]
"""What makes each front end with options, and those that it cannot honour."""


@pytest.mark.parametrize("option", SET)
@pytest.mark.parametrize(("make", "refused"), MAKERS)
def test_a_front_end_takes_an_option_or_refuses_it(make: Callable[..., Any], refused: list[str], option: str) -> None:
    """Never silently: what it cannot honour is an error that names the option and the front end."""
    message = rf"options\.{option} must be left out for \w*(Wrapper|Dispatcher), got"
    with pytest.raises(ConfigError, match=message) if option in refused else nullcontext():
        make(options=CUDAGraphOptions(**{option: SET[option]}))


def test_there_is_room_for_every_size() -> None:
    """More than 64 sizes have room for their graphs, unless the options say how many there may be."""
    config = CUDAGraphConfig(capture_sizes=range(1, 101), max_batch_size=100)
    assert CUDAGraphConfig().max_cached_graphs == 64
    assert config.max_cached_graphs >= 100
    assert config.replace(options=CUDAGraphOptions(max_cached_graphs=3)).max_cached_graphs == 3


def logged(caplog: pytest.LogCaptureFixture, step: Any, *rows: int, level: int = logging.INFO) -> list[str]:
    """What is logged of calls with so many rows."""
    with caplog.at_level(level, logger="graphdispatch"):
        for count in rows:
            step(torch.randn(count, 3))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("enabled", [True, False])
def test_replays_are_logged_by_an_option(caplog: pytest.LogCaptureFixture, enabled: bool) -> None:
    """By the logger ``graphdispatch``, with the graph and the rows; without the option only the capture is logged."""
    options = CUDAGraphOptions(debug_log_enable=enabled)
    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=(4,), options=options.replace(capture_after=1))
    lines = logged(caplog, step, 3, 3, 3, 4, level=logging.DEBUG)
    assert [line.split()[0] for line in lines] == ["captured"] + ["replaying", "replaying"] * enabled
    assert not enabled or lines[1].endswith("for 3 rows")


def test_captures_evictions_and_new_reasons_are_lines_without_repeats(caplog: pytest.LogCaptureFixture) -> None:
    """Each names what it is about; a reason that comes again and again is logged once, and ways to a graph never."""
    layer = torch.nn.Linear(3, 3).eval().requires_grad_(False)
    step = graphed(layer, dynamic={"input": 0}, sizes=(4, 8), options=CUDAGraphOptions(max_cached_graphs=1))
    lines = logged(caplog, step, 3, 3, 3, 9, 9, 9, 7, 7, 9)
    assert [line.split()[0] for line in lines] == ["captured", "eager", "evicted", "captured"]
    assert lines[0].startswith("captured callable=Linear mode=FULL rows=4 ms=")
    assert lines[1].startswith("eager callable=Linear reason=above_largest_size rows=9: the batch is larger than")
    assert lines[2].startswith("evicted tokens=4 cause=count replays=0 freed_bytes=")
