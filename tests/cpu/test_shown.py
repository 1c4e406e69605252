"""Results show themselves in notebooks as one escaped table with their figures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch.showing import html_table
from graphdispatch.units import storage

from .test_report import HOSTILE, Page, served

STEPS = gd.plan.Workload.from_steps([1, 2, 3, 5, 8, 40, 8, 8, 3])


def dispatched() -> gd.DispatchStats:
    """What a dispatcher counted."""
    stats = gd.DispatchStats()
    stats.record(gd.DispatchMode.EAGER, gd.Reason.ABOVE_LARGEST_SIZE, 1000)
    return stats


def prewarmed() -> Any:
    """What a prewarm said that had no time for the second size."""
    serve = gd.graphed(torch.nn.ReLU(), dynamic={"input": 0}, sizes=(2, 4))
    serve.prewarm(torch.randn(4, 3), sizes=[4])
    return serve.prewarm(torch.randn(4, 3), max_seconds=1e-9)


ABOVE = ["above_largest_size", "1", gd.Reason.ABOVE_LARGEST_SIZE.text]
MADE: dict[str, tuple[Callable[[], Any], Callable[[Any], list[str]]]] = {
    "stats": (lambda: served().stats, lambda stats: ABOVE),
    "decisions": (dispatched, lambda stats: ABOVE),
    "memory": (lambda: served().memory_report(), lambda memory: ["total", storage(memory.total)]),
    "prewarm": (prewarmed, lambda report: ["2", "FULL", report.left_out[gd.CUDAGraphMode.FULL, 2]]),
    "evaluation": (
        lambda: gd.plan_capture_sizes(STEPS, max_graphs=3).evaluate(STEPS),
        lambda result: ["step_ms", f"{result.step_ms:.4g}"],
    ),
}


@pytest.mark.parametrize(("made", "row"), MADE.values(), ids=MADE)
def test_a_result_shows_its_figures(made: Callable[[], Any], row: Callable[[Any], list[str]]) -> None:
    """As one table, which is well-formed."""
    result = made()
    page = Page(result._repr_html_())
    assert page.tags.count("table") == 1
    assert row(result) in page.rows


def test_an_audit_shows_the_lines_of_its_text() -> None:
    """Its verdict, and each finding."""
    found = gd.audit(lambda x: x * 2 if x.sum() > 0 else x, (torch.randn(4, 2),))
    assert [[line] for line in str(found).splitlines()] == Page(found._repr_html_()).rows[1:]
    assert ["NOT capturable"] in Page(found._repr_html_()).rows


def test_a_table_escapes_all_that_it_is_given() -> None:
    """Title, columns and cells come back as they were; a cell is shown as its text."""
    page = Page(html_table(HOSTILE, [HOSTILE, "number"], [(HOSTILE, 3)]))
    assert page.rows == [[HOSTILE, "number"], [HOSTILE, "3"]]
    assert page.text.startswith(HOSTILE)
    assert {*page.tags} == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
