"""Reports, and results in notebooks: they say what was measured, need nothing else, and hold no HTML of a user's."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import graphdispatch as gd
from graphdispatch.engines import Gain
from graphdispatch.plan import Workload, plan_sizes
from graphdispatch.runtime.gain import EagerTimes

from ..helpers import AT_ONCE, check_calls, check_rows, run_python

HOSTILE = "</td><script>alert(1)</script><b>\"'&{{ 7 * 7 }}"


class Page:
    """HTML read back strictly, as XML: its text, its tags and attributes, and the cells of its tables."""

    def __init__(self, html: str) -> None:
        root = ElementTree.fromstring(re.sub(r"(<meta [^>]*)>", r"\1/>", f"<page>{html}</page>"))
        for style in root.iter("style"):
            style.text = ""
        self.text = "".join(root.itertext())
        self.tags = [part.tag for part in root.iter()]
        self.names = {name for part in root.iter() for name in part.attrib}
        self.rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]


def served(**options: Any) -> gd.Graphed[..., Any]:
    """A callable of three sizes that hit, padded, failed to capture and was called above its largest size."""

    def score(x: torch.Tensor, is_checked: bool = False) -> torch.Tensor:
        if is_checked and x.sum() > 0:
            return x
        return x * 2 + 1

    score.__qualname__ = "score"
    serve = gd.graphed(score, dynamic={"x": 0}, sizes=(2, 4, 8), **options)
    check_rows(serve, 4, 4, 3, 3, 3, 4, 4, 2, 2, 1, 1, 1, 2, 9)
    check_calls(serve, *[(torch.randn(2, 3), True)] * 4)
    return serve


def rows_of(report: Any) -> dict[str, Any]:
    """The graphs of a report by size."""
    return {row.size: row for row in report.graphs}


def test_figures_are_those_of_the_counters() -> None:
    """Calls, hits, padding, captures and memory of the whole, and for each graph its size, hits and padding."""
    serve = served()
    report, stats = serve.report(), serve.stats
    assert (report.calls, report.hits, report.captures) == (stats.calls, stats.hits, stats.captures)
    assert report.padding == stats.padding_ratio > 0
    assert report.memory_bytes == serve.memory_report().total > 0
    rows, entries = rows_of(report), {str(entry.size): entry for entry in serve.entries}
    assert {size: row.hits for size, row in rows.items()} == {size: one.replay_count for size, one in entries.items()}
    assert sum(row.hits for row in report.graphs) == stats.hits
    assert {size: row.padding for size, row in rows.items()} == pytest.approx({"2": 1 / 3, "4": 1 / 8})
    assert report.waiting == ("8",)
    assert f"{100 * stats.hits / stats.calls:.1f} % of {stats.calls} calls of score" in report.headline


def test_each_reason_has_its_sentence_its_remedy_and_what_failed_captures_said() -> None:
    """Those that somebody can do something about come first."""
    serve = served()
    reasons = {row.reason: row for row in serve.report().reasons}
    assert {gd.Reason(reason): row.calls for reason, row in reasons.items()} == serve.stats.reasons
    above, unsafe = reasons["above_largest_size"], reasons["capture_unsafe"]
    assert above.sentence == "the batch is larger than the largest graph"
    assert above.remedy.startswith("add a larger size to those that you gave, or raise max_size=")
    assert above.share == 1 / serve.stats.calls
    (detail,) = unsafe.details
    assert "if is_checked and x.sum() > 0" in detail
    assert "eager_break" in unsafe.remedy
    assert reasons["verified_now"].remedy == ""
    assert {*list(reasons)[:2]} == {"above_largest_size", "capture_unsafe"}


def test_what_nobody_measured_is_said_to_be_so() -> None:
    """The gain where none was taken, and the padding where the rows of a graph's own hits are not known."""
    serve = served(options=gd.CUDAGraphOptions(verify=False))
    assert {(row.gain, row.cells()[6]) for row in serve.report().graphs} == {(None, "not measured")}
    wrapper = gd.CUDAGraphWrapper(torch.nn.ReLU())
    with gd.cudagraph_context(gd.CUDAGraphMode.FULL, gd.BatchDescriptor(4)):
        for _ in range(4):
            wrapper(torch.randn(4, 3))
    report = wrapper.report()
    (row,) = report.graphs
    assert (row.size, row.hits, row.padding, report.padding, report.bars) == ("4", 2, None, None, ())
    assert row.cells()[3] == "not measured"
    assert ("padding", "not measured") in report.facts


def test_a_gain_that_was_measured_is_shown() -> None:
    """The shortest of what was measured, as eager runs behind the capture; by ``print(serve.graphs)``, too."""
    serve = served()
    for group in serve._route.groups:
        group.gain.times = EagerTimes()
        for entry in group.all_entries:
            entry.gain = Gain(7.5, 1.0)
            for eager_s in (7.5e-3, 1.25e-3, 3e-3):
                group.gain.times.note(entry.size, eager_s)
    assert {row.cells()[4:7] for row in serve.graphs} == {("1.250 ms", "1.000 ms", "0.250 ms")}
    assert f"{serve.graphs}".count("0.250 ms") == len(serve.entries)
    assert serve.graphs._repr_html_().count("0.250 ms") == len(serve.entries)


def test_padding_is_unknown_of_a_graph_that_took_the_place_of_another() -> None:
    """The hits by rows are those of both."""
    serve = served()
    before = rows_of(serve.report())["4"]
    serve.invalidate()
    check_rows(serve, *[3] * 4)
    after = rows_of(serve.report())["4"]
    assert (before.padding, after.padding) == (pytest.approx(1 / 8), None)
    assert 0 < after.hits < before.hits + after.hits


def test_several_dimensions_and_a_manager_have_reports() -> None:
    """Sizes as they are given; where no number of rows is known, there is no chart."""
    serve = gd.graphed(torch.nn.ReLU(), dynamic={"input": {0: "batch", 1: gd.Dim("seq", sizes=[8])}}, sizes=(2, 4))
    manager = gd.CUDAGraphManager(gd.CUDAGraphConfig(capture_sizes=(2, 4), options=AT_ONCE))
    for _ in range(4):
        serve(torch.randn(3, 5))
        manager.execute_or_capture(3, 1, torch.nn.functional.relu, {"input": torch.randn(3, 2)})
    report = serve.report()
    assert ([row.size for row in report.graphs], report.waiting, report.bars) == (["4 x 8"], ("2 x 8",), ())
    report = manager.report()
    assert (report.name, report.hits, rows_of(report)["4 x 1"].padding) == ("relu", 2, 0.25)


def test_the_bars_are_the_calls_by_rows() -> None:
    """One for each number of rows, or for several; calls far above the largest size share the last."""
    serve = served()
    bars = serve.report().bars
    assert [bar.rows for bar in bars] == [str(rows) for rows in range(1, 10)]
    assert [bar.graph + bar.eager for bar in bars] == [serve.stats.rows.get(rows, 0) for rows in range(1, 10)]
    assert sum(bar.graph for bar in bars) == serve.stats.hits
    assert serve.report().marks == (2, 4, 8)
    serve(torch.randn(1000, 3))
    assert [bar.rows for bar in serve.report().bars][-2:] == ["16", "more than 16"]
    wide = gd.graphed(torch.nn.ReLU(), dynamic={"input": 0}, sizes=(256,))
    check_rows(wide, 1, 129, 256, 256)
    report = wide.report()
    assert len(report.bars) == 64
    assert (report.bars[0].rows, report.bars[32].rows, report.bars[-1].rows) == ("1 to 4", "129 to 132", "253 to 256")
    assert report.marks == (64.0,)


@pytest.mark.parametrize("is_called", [True, False])
def test_the_page_is_one_document_that_loads_nothing(is_called: bool, tmp_path: Path) -> None:
    """It parses, names no address, runs no script, and shows each graph and reason."""
    report = served().report() if is_called else gd.graphed(torch.nn.ReLU(), dynamic={"input": 0}).report()
    report.save(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text("utf-8")
    page = Page(text.removeprefix("<!doctype html>"))
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & {*page.tags}
    assert not {"src", "href", "srcset", "action", "onload", "onclick"} & page.names
    assert not re.search(r"https?:|//\w|url\(|@import", text)
    assert "default-src 'none'" in text
    assert page.rows[1:] == [list(row.cells()) for row in report.graphs]
    assert report.headline in page.text
    assert all(row.sentence in page.text and row.remedy in page.text for row in report.reasons)
    assert page.tags.count("rect") == 2 * len(report.bars)


def hostile() -> gd.Graphed[..., Any]:
    """A callable whose name, argument and failed capture would break a page that did not escape them."""

    class Refusing(torch.nn.Module):
        def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
            (x,) = inputs.values()
            return x * 2 if x.sum() > 0 else x  # </td><script>alert(1)</script><b>

    Refusing.__qualname__ = HOSTILE
    serve = gd.graphed(Refusing().eval(), dynamic={HOSTILE: 0}, max_size=4)
    for _ in range(4):
        serve(**{HOSTILE: torch.randn(2, 3)})
    return serve


def test_a_users_texts_stay_texts() -> None:
    """The name of a callable and of an argument, and a line of code, on the page and in a notebook."""
    report = hostile().report()
    assert report.name == HOSTILE
    assert any("<script>" in detail for row in report.reasons for detail in row.details)
    for html in (report.html().removeprefix("<!doctype html>"), report._repr_html_()):
        page = Page(html)
        assert HOSTILE in page.text
        assert not {"script", "b"} & {*page.tags}


def test_a_notebook_and_a_terminal_show_the_same_rows() -> None:
    """As HTML tables, as tables of rich, and as plain text."""
    console = pytest.importorskip("rich.console")
    report = served().report()
    shown = Page(report._repr_html_()).rows
    cells = [list(row.cells()) for row in (*report.graphs, *report.reasons)]
    assert [row for row in shown if row in cells] == cells
    with (terminal := console.Console(width=400)).capture() as captured:
        terminal.print(report)
    for text in (captured.get(), str(report)):
        squeezed = " ".join(text.split())
        assert all(" ".join(row.cells()) in squeezed for row in report.graphs)
        assert all(row.remedy in squeezed and row.sentence in squeezed for row in report.reasons)


def test_a_report_changes_and_runs_nothing() -> None:
    """Neither a counter nor a graph; and what it says stays when calls go on."""
    serve = served()
    before, entries = serve.stats.to_dict(), [(entry, entry.replay_count) for entry in serve.entries]
    report = serve.report()
    text = str(report)
    assert (serve.stats.to_dict(), [(entry, entry.replay_count) for entry in serve.entries]) == (before, entries)
    serve(torch.randn(4, 3))
    assert str(report) == text


def test_reports_need_no_torch_and_load_jinja_when_a_page_is_made() -> None:
    """What imports the library does not pay for reports."""
    code = "import sys; sys.modules['torch'] = None; import graphdispatch.report; "
    run_python("-c", code + "raise SystemExit('jinja2' in sys.modules or 'rich' in sys.modules)")


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
    "prewarm": (prewarmed, lambda report: ["2", report.left_out[2]]),
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
