"""What notebooks show: whole and escaped HTML with the figures of the object, which loads nothing."""

import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch.units import count, milliseconds, percent, storage

from .test_report import HOSTILE, planned, served

STEPS = gd.Workload.from_steps([1, 2, 3, 5, 8, 40, 8, 8, 3])
CALLS = [(1, 8), (2, 8), (2, 16), (3, 12), (2, 16)]


class Shown(HTMLParser):
    """HTML read back strictly: its text, its tags, and the rows of its tables."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.text, self.rows, self.tags, self.frames = "", [], [], []
        self._open: list[str] = []
        self.feed(thing._repr_html_())
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "onload", "onerror"} & {name for name, _ in attrs}
        self._open.append(tag)
        self.tags.append(tag)
        self.frames += [value for name, value in attrs if name == "srcdoc"]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif self._open[-1] != "style":
            self.text += data + "\n"


def dispatched() -> gd.DispatchStats:
    """What a dispatcher counted."""
    stats = gd.DispatchStats()
    stats.record(gd.DispatchMode.CUDAGRAPH, gd.Reason.EXACT, 2000)
    stats.record(gd.DispatchMode.EAGER, gd.Reason.ABOVE_LARGEST_SIZE, 1000)
    return stats


def prewarmed() -> tuple[gd.Graphed[..., Any], Any]:
    """A callable with the graph of one size, and what the prewarm said that had no time for the other."""
    serve = gd.graphed(torch.nn.ReLU(), dynamic={"input": 0}, sizes=(2, 4))
    assert ["FULL", "4"] in Shown(serve.prewarm(torch.randn(4, 3), sizes=[4])).rows
    return serve, serve.prewarm(torch.randn(4, 3), max_seconds=1e-9)


MADE: dict[str, Callable[[], Any]] = {
    "stats": lambda: served().stats,
    "no calls": gd.CUDAGraphStats,
    "decisions": dispatched,
    "plan": lambda: gd.plan_capture_sizes(STEPS, max_graphs=3),
    "no graphs": lambda: gd.Plan(gd.CUDAGraphMode.FULL, ()),
    "evaluation": lambda: gd.plan_capture_sizes(STEPS, max_graphs=3).evaluate(STEPS),
    "grid": lambda: gd.plan_capture_grid(CALLS, max_graphs=3),
    "grid evaluation": lambda: gd.plan_capture_grid(CALLS, max_graphs=3).evaluate(CALLS),
    "memory": lambda: served().memory_report(),
    "prewarm": lambda: prewarmed()[1],
    "report": planned,
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_it_is_whole_and_loads_nothing(made: Callable[[], Any]) -> None:
    """Every element is closed, none names an address, and only the style that is written here is there."""
    shown = Shown(made())
    assert shown.tags.count("style") == (0 if shown.frames else 1)
    assert not {"script", "link", "img", "b"} & {*shown.tags}


def test_it_stands_in_the_colours_of_the_notebook() -> None:
    """No text and no ground has a colour of its own, so that light and dark notebooks can be read."""
    style = dispatched()._repr_html_().split("<style>")[1].split("</style>")[0]
    assert {rule.strip() for rule in style.replace("{", ";").replace("}", ";").split(";") if "color:" in rule} == {
        "color: inherit",
        "border-color: #e08a1e",
    }
    assert "url(" not in style
    assert "@import" not in style


def test_counters_are_those_of_the_object() -> None:
    """Calls, padding, reasons and evictions, with a hostile tag escaped."""
    stats = served().stats
    shown = Shown(stats)
    assert f"Graphs served {percent(stats.graph_ratio)} of {count(stats.calls)} calls" in shown.text
    assert percent(stats.padding_ratio) in shown.text
    told = {row[0]: row[1] for row in shown.rows if len(row) == 4}
    assert {reason.value: str(number) for reason, number in stats.reasons.items()}.items() <= told.items()
    assert any(HOSTILE in row for row in shown.rows)
    assert "Nothing was called yet" in Shown(gd.CUDAGraphStats()).text
    assert "Graphs serve 50.0 % of 2 calls" in Shown(dispatched()).text
    assert ["above_largest_size", "1", "50.00 %", gd.Reason.ABOVE_LARGEST_SIZE.text] in Shown(dispatched()).rows


def test_a_plan_shows_its_graphs() -> None:
    """Each with its mode and what it serves, and the proof; an evaluation shows its figures."""
    plan = gd.plan_capture_sizes(STEPS, max_graphs=3)
    shown = Shown(plan)
    assert [row[:2] for row in shown.rows[1:]] == [[str(graph.size), graph.mode.name] for graph in plan.graphs]
    assert plan.proof is not None
    assert f"expected {plan.proof.expected_ms:.3f} ms a step" in shown.text
    result = plan.evaluate(STEPS)
    assert {milliseconds(result.step_ms), storage(result.memory)} <= {*Shown(result).text.split("\n")}


def test_a_grid_shows_its_points() -> None:
    """By length; an evaluation shows its figures."""
    plan = gd.plan_capture_grid(CALLS, max_graphs=3)
    points = [(int(size), int(length)) for length, sizes in Shown(plan).rows[1:] for size in sizes.split()]
    assert sorted(points) == sorted(plan.points)
    result = plan.evaluate(CALLS)
    assert {milliseconds(result.step_ms), percent(result.padding)} <= {*Shown(result).text.split("\n")}


def test_memory_and_prewarm_are_shown() -> None:
    """Each part and graph with its bytes; what was captured, what was left out, and why."""
    serve, report = prewarmed()
    memory = serve.memory_report()
    shown = Shown(memory)
    assert f"1 graphs hold {storage(memory.total)}" in shown.text
    assert ["total", storage(memory.total)] in shown.rows
    assert [str(memory.entries[0].size), "FULL", storage(memory.entries[0].own)] in [row[:3] for row in shown.rows]
    assert [(row[0], row[2]) for row in Shown(report).rows if len(row) == 3][1:] == [
        (str(size), why) for (_, size), why in report.left_out.items()
    ]
    assert report.left_out


def test_a_report_is_shown_in_a_frame() -> None:
    """The whole page, in a frame that runs scripts and can reach nothing around it."""
    report = planned()
    assert Shown(report).frames == [report.html]
    assert '<iframe sandbox="allow-scripts"' in report._repr_html_()


def test_showing_needs_no_plotly_and_is_loaded_when_it_shows() -> None:
    """Counters are shown without plotly and torch; nothing that shows is loaded before."""
    code = """
import sys
sys.modules["plotly"] = sys.modules["torch"] = None
import graphdispatch.stats, graphdispatch.plan.plan
assert not any("report" in name for name in sys.modules)
assert "Nothing was called yet" in graphdispatch.stats.CUDAGraphStats()._repr_html_()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
