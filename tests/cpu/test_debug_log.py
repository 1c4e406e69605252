"""``debug_log_enable``: each capture and each replay is one line at DEBUG level."""

import logging

import pytest
import torch

from graphdispatch.api.graphed import graphed
from graphdispatch.config import CUDAGraphOptions


@pytest.mark.parametrize("enabled", [True, False])
def test_captures_and_replays_are_logged_where_asked_for(caplog: pytest.LogCaptureFixture, enabled: bool) -> None:
    """By the logger ``graphdispatch``, with the graph and the rows; without the option nothing is logged."""
    options = CUDAGraphOptions(debug_log_enable=enabled)
    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=(4,), capture_after=1, options=options)
    with torch.no_grad(), caplog.at_level(logging.DEBUG, logger="graphdispatch"):
        for rows in (3, 4, 3, 4):
            step(torch.randn(rows, 3))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in lines] == ["captured", "replaying", "replaying"] * enabled
    assert not enabled or lines[1].endswith("for 3 rows")
