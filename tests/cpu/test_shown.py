"""What notebooks show: whole and escaped HTML with the figures of the object, which loads nothing."""

import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import graphdispatch as gd
from graphdispatch.units import count, percent, storage

from .test_report import HOSTILE, served


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


def hostile_audit() -> gd.Audit:
    """An audit with a name, lines and findings that would break a page that did not escape them."""

    def call(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    call.__qualname__ = HOSTILE
    return gd.audit(call, (torch.randn(4, 2),))


def prewarmed() -> tuple[gd.Graphed[..., Any], Any]:
    """A callable with the graph of one size, and what the prewarm said that had no time for the other."""
    serve = gd.graphed(torch.nn.ReLU(), dynamic={"input": 0}, sizes=(2, 4))
    assert ["FULL", "4"] in Shown(serve.prewarm(torch.randn(4, 3), sizes=[4])).rows
    return serve, serve.prewarm(torch.randn(4, 3), max_seconds=1e-9)


MADE: dict[str, Callable[[], Any]] = {
    "stats": lambda: served().stats,
    "no calls": gd.CUDAGraphStats,
    "decisions": dispatched,
    "audit": hostile_audit,
    "memory": lambda: served().memory_report(),
    "prewarm": lambda: prewarmed()[1],
    "report": lambda: served().report(),
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


def test_an_audit_shows_its_findings() -> None:
    """Its verdict with the name as it is, and each finding; its ``repr`` is one line."""
    audit = hostile_audit()
    shown = Shown(audit)
    assert f"{audit.name} is not capturable" in shown.text
    assert HOSTILE in audit.name
    assert [finding.what for finding in audit.forbidden] == [
        row[0] for row in shown.rows if len(row) == 5 and row[0].startswith("aten")
    ]
    assert repr(audit) == f"<Audit {audit.name}: NOT capturable, {audit.operators} operators, 1 that CUDA forbids>"


def test_a_report_is_shown_in_a_frame() -> None:
    """The whole page, in a frame that runs scripts and can reach nothing around it."""
    report = served().report()
    assert Shown(report).frames == [report.html]
    assert '<iframe sandbox="allow-scripts"' in report._repr_html_()


def test_showing_needs_no_plotly_and_is_loaded_when_it_shows() -> None:
    """Counters are shown without plotly and torch; nothing that shows is loaded before."""
    code = """
import sys
sys.modules["plotly"] = sys.modules["torch"] = None
import graphdispatch.stats
assert not any("report" in name for name in sys.modules)
assert "Nothing was called yet" in graphdispatch.stats.CUDAGraphStats()._repr_html_()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
