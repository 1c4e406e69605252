"""The log: what happens seldom is one line at INFO level, and with ``debug_log_enable`` each replay is one at DEBUG."""

import logging

import pytest
import torch

from graphdispatch import CUDAGraphOptions, graphed

from ..helpers import AT_ONCE


@pytest.mark.parametrize("enabled", [True, False])
def test_replays_are_logged_where_asked_for(caplog: pytest.LogCaptureFixture, enabled: bool) -> None:
    """By the logger ``graphdispatch``, with the graph and the rows; without the option only the capture is logged."""
    options = CUDAGraphOptions(debug_log_enable=enabled)
    step = graphed(lambda x: x * 2, dynamic={"x": 0}, sizes=(4,), options=options.replace(capture_after=1))
    with torch.no_grad(), caplog.at_level(logging.DEBUG, logger="graphdispatch"):
        for rows in (3, 4, 3, 4):
            step(torch.randn(rows, 3))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in lines] == ["captured"] + ["replaying", "replaying"] * enabled
    assert not enabled or lines[1].endswith("for 3 rows")


def test_captures_evictions_and_new_reasons_are_lines_without_repeats(caplog: pytest.LogCaptureFixture) -> None:
    """Each names what it is about; a reason that comes again and again is logged once, and ways to a graph never."""
    layer = torch.nn.Linear(3, 3).eval().requires_grad_(False)
    step = graphed(layer, dynamic={"input": 0}, sizes=(4, 8), options=CUDAGraphOptions(max_cached_graphs=1))
    with caplog.at_level(logging.INFO, logger="graphdispatch"):
        for rows in (3, 3, 3, 9, 9, 9, 7, 7, 9):
            step(torch.randn(rows, 3))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in lines] == ["captured", "eager", "evicted", "captured"]
    assert lines[0].startswith("captured callable=Linear mode=FULL rows=4 ms=")
    assert lines[1] == (
        "eager callable=Linear reason=above_largest_size rows=9: the batch is larger than the largest graph; "
        "raise max_size to cover it (largest: 8)"
    )
    assert lines[2].startswith("evicted tokens=4 cause=count replays=0 freed_bytes=")


def test_a_refused_capture_is_logged_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    """Once, however often the call comes."""
    step = graphed(lambda x: x * float(x.sum()), dynamic={"x": 0}, sizes=(4,), options=AT_ONCE)
    with caplog.at_level(logging.INFO, logger="graphdispatch"):
        for _ in range(40):
            step(torch.randn(4, 3))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "reason=capture_unsafe rows=4: aten._local_scalar_dense.default reads a value back to the host" in line
