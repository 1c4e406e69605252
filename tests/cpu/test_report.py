"""Reports: the pages say what was measured, need nothing but themselves, and hold nothing that a name could break."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from graphdispatch.api.graphed import Graphed, graphed
from graphdispatch.backends.base import Graph
from graphdispatch.call.breaks import eager_break
from graphdispatch.errors import ConfigError
from graphdispatch.modes import CUDAGraphMode
from graphdispatch.report import Report, callable_report
from graphdispatch.report.page import Chart, Content, Section, Table, make_report
from graphdispatch.units import count, milliseconds, percent, size_range, storage

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
BOTH, DECODE_ONLY = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY
HOSTILE = "</script><script>alert(1)</script><b>\"'&"


class Page(HTMLParser):
    """A page read back: its text, tables, figures, and what it would load."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.text, self.loads, self.tags = "", [], []
        self.tables: list[list[list[str]]] = []
        self.figures: list[dict[str, Any]] = []
        self._script: str | None = None
        self._in_cell = False
        self.feed(report.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag in ("script", "style"):
            self._script = given.get("type") or tag
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._script = None
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._script == "application/json":
            self.figures.append(json.loads(data))
        elif self._script is None:
            self.text += data
            if self._in_cell:
                self.tables[-1][-1][-1] += data

    def table(self, column: str) -> list[list[str]]:
        """The rows of the first table with a column of that name."""
        return next(rows for head, *rows in self.tables if column in head)


@cache
def served() -> Graphed[..., Any]:
    """A callable in pieces that hit, padded, missed, evicted and was called above its largest size."""

    @eager_break
    def middle(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def double(x: torch.Tensor) -> torch.Tensor:
        return middle(x + 1) - 1

    call = graphed(double, dynamic={"x": 0}, sizes=(2, 4, 8), mode="PIECEWISE", max_cached_graphs=2)
    with torch.no_grad():
        for rows in [4, 4, 3, 3, 3, 2, 2, 1, 1, 9, 9]:
            call(torch.randn(rows, 3))
        call.invalidate(HOSTILE)
        for _ in range(4):
            call(torch.randn(3, 3))
    return call


PAGES: dict[str, Callable[[], Report]] = {
    "callable": lambda: callable_report(served()),
}
every_page = pytest.mark.parametrize("made", PAGES.values(), ids=PAGES)


@every_page
def test_a_page_loads_nothing(made: Callable[[], Report]) -> None:
    """No element names an address, no style does, and the page forbids its scripts to fetch."""
    report = made()
    page = Page(report)
    assert page.loads == []
    assert not set(page.tags) & {"link", "iframe", "img", "object", "embed", "base"}
    assert "default-src 'none'" in report.html
    assert "connect-src" not in report.html
    assert re.findall(r"@import|url\(", report.html.split("</style>")[0]) == []


@every_page
def test_figures_are_what_plotly_takes(made: Callable[[], Report]) -> None:
    """Every property of every chart is one of plotly's, with a value that it allows; every colour is in the theme."""
    from plotly.graph_objects import Figure

    report = made()
    style = report.html.split("</style>")[0]
    figures = Page(report).figures
    assert figures
    for figure in figures:
        text = json.dumps(figure)
        assert all(f"{name}: " in style for name in re.findall(r'"(--[a-z-]+)"', text))
        assert Figure(json.loads(re.sub(r'"--[a-z-]+"', '"#000"', text))).data


def test_no_figure_can_end_its_script() -> None:
    """Whatever a chart's data holds comes back as it was."""
    chart = Chart(HOSTILE, {"data": [{"name": HOSTILE}]})
    page = Page(make_report(Content(HOSTILE, HOSTILE, [HOSTILE], [], [Section(HOSTILE, HOSTILE, [chart])])))
    assert page.figures == [chart.figure]
    assert page.tags.count("script") == 3


def test_numbers_stand_under_each_other() -> None:
    """A column of amounts is set to the right; words, lists and the first column are not."""
    rows = [("1", "67 % at 3", "1 2 3 4 5", "FULL"), ("2", "1.5 GiB", "7", "3")]
    html = make_report(Content("", "", [], [], [Section("", "", [Table(("a", "b", "c", "d"), rows)])])).html
    assert '<tr><td>1</td><td class="n">67 % at 3</td><td>1 2 3 4 5</td><td>FULL</td></tr>' in html


def test_a_callable_is_told_in_numbers() -> None:
    """Calls, reasons, graphs, memory, breaks and evictions are what the callable's own figures say."""
    call = served()
    page, stats = Page(callable_report(call)), call.stats
    assert f"Graphs served {percent(stats.graph_ratio)} of {stats.calls} calls" in page.text
    assert {row[0]: row[1] for row in page.table("rows")} == {str(n): str(k) for n, k in stats.rows.items()}
    assert {row[0]: row[1] for row in page.table("reason")} == {
        reason.value: str(number) for reason, number in stats.reasons.items()
    }
    assert [row[:4] for row in page.table("replays")] == [
        [str(entry.size), "PIECEWISE", entry.state.value, str(entry.replay_count)] for entry in call.entries
    ]
    assert dict(page.table("held"))["total"] == storage(call.memory_bytes)
    assert [row[1] for row in page.table("where")] == [one.where for one in call.breaks]
    assert [row[2] for row in page.table("freed")] == [one.tag for one in stats.last_evictions[::-1]]
    assert HOSTILE in page.text


def test_a_callable_before_its_first_call() -> None:
    """Its page says so."""
    page = Page(callable_report(graphed(torch.relu, dynamic={"input": 0})))
    assert "Nothing was called yet" in page.text
    assert "No graph is captured now" in page.text
    assert page.figures == []


def test_a_report_runs_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one only reads."""
    call = served()
    before = call.stats.to_dict()
    for entry in call.entries:
        monkeypatch.setattr(type(entry.graph), "replay", lambda graph: pytest.fail("replayed"))
        assert isinstance(entry.graph, Graph)
    callable_report(call)
    assert call.stats.to_dict() == before


def test_a_report_is_written(tmp_path: Path) -> None:
    """A page replaces another."""
    report, path = callable_report(served()), tmp_path / "report.html"
    path.write_text("old")
    report.save(path)
    assert path.read_text("utf-8") == report.html
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    """A folder that is missing, or a path that is a folder, is one error that names it."""
    for path in (tmp_path / "none" / "report.html", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            callable_report(served()).save(path)
    assert list(tmp_path.iterdir()) == []


def test_without_plotly_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install; the package itself does not import plotly."""
    code = "import sys, graphdispatch.report; raise SystemExit('plotly' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"pip install 'graphdispatch\[report\]'"):
        callable_report(served())


def test_units() -> None:
    """Amounts are written as people read them."""
    assert [storage(n) for n in (0, 1023, 2048, 3 * 2**30)] == ["0 B", "1023 B", "2.0 KiB", "3.00 GiB"]
    assert [milliseconds(t) for t in (0.5, 12.345, 120.4, 1500)] == ["0.500 ms", "12.35 ms", "120 ms", "1.5 s"]
    assert [count(n) for n in (1234567, 0.123456)] == ["1,234,567", "0.1235"]
    assert (size_range(3, 3), size_range(3, 5)) == ("3", "3\N{EN DASH}5")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium, to look at the page")
def test_the_charts_are_drawn_without_a_network(tmp_path: Path) -> None:
    """A browser that reaches nothing makes a drawing of every chart."""
    report = callable_report(served())
    report.save(tmp_path / "report.html")
    alone = ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--disable-component-update"]
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=2000"]
    done = subprocess.run(
        ["chromium", *quiet, *alone, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
         (tmp_path / "report.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    drawn = re.findall(r'class="chart[^"]*js-plotly-plot', done.stdout)
    assert len(drawn) == len(Page(report).figures)
    assert done.stdout.count('class="main-svg"') >= len(drawn)
