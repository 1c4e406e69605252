"""Results show themselves in notebooks as one escaped table with their figures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch.plan import Workload, plan_sizes

from .test_report import Page, served

STEPS = Workload.from_steps([1, 2, 3, 5, 8, 40, 8, 8, 3])


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
    "memory": (lambda: served().memory_report(), lambda memory: ["total", f"{memory.total} B"]),
    "prewarm": (prewarmed, lambda report: ["2", "FULL", report.left_out[gd.CUDAGraphMode.FULL, 2]]),
    "plan": (lambda: plan_sizes(STEPS, max_graphs=3), lambda plan: ["FULL", " ".join(map(str, plan.sizes))]),
    "evaluation": (
        lambda: plan_sizes(STEPS, max_graphs=3).evaluate(STEPS),
        lambda result: ["padding", f"{100 * result.padding:.2f} %"],
    ),
}


@pytest.mark.parametrize(("made", "row"), MADE.values(), ids=MADE)
def test_a_result_shows_its_figures(made: Callable[[], Any], row: Callable[[Any], list[str]]) -> None:
    """As one table, which is well-formed."""
    result = made()
    page = Page(result._repr_html_())
    assert page.tags.count("table") == 1
    assert row(result) in page.rows
