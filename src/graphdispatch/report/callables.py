"""The report on a live callable: what graphs served, what they did not and why, and what they hold."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..reasons import Reason
from ..stats import CUDAGraphStats
from ..units import count, milliseconds, percent, storage
from . import charts
from .page import Chart, Content, Note, Report, Section, Table, Tile, make_report

if TYPE_CHECKING:
    from ..api.graphed import Graphed
    from ..capture.piecewise import BreakFigures
    from ..memory.accounting import MemoryReport
    from ..memory.entry import CUDAGraphEntry

__all__ = ["callable_report", "memory_section", "reasons_section", "stats_content"]

_NO_CALL = "Nothing was called yet"


def callable_report(served: "Graphed[..., Any]") -> Report:
    """What ``served`` did so far, as a page to look at. It runs nothing and holds no lock for long.

    If the callable is in use, its figures may be from slightly different moments. Raises ``ConfigError`` if plotly is
    not installed.
    """
    fn, stats = served.unwrap(), served.stats
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    entries, memory = list(served.entries), served.memory_report()
    _, headline, facts, tiles, (reasons, *evictions) = stats_content(stats)
    facts = [f"sizes {_listed(served.sizes)}", *facts]
    tiles = [
        *tiles,
        Tile("Graphs", count(len(entries)), f"{count(stats.evictions)} evicted so far"),
        Tile("Memory", storage(memory.total), f"{storage(memory.pool_bytes)} of it the pool"),
    ]
    sections = [
        *_rows(served, entries), reasons, _graphs(entries), memory_section(memory), *_breaks(served.breaks), *evictions,
    ]  # fmt: skip
    return make_report(Content(f"graphdispatch: {name}", headline, facts, tiles, sections))


def stats_content(stats: CUDAGraphStats) -> Content:
    """What ``stats`` counted. It has no charts."""
    figures, calls = stats.to_dict(), stats.calls
    headline = f"Graphs served {percent(figures['graph_ratio'])} of {count(calls)} calls" if calls else _NO_CALL
    facts = [
        f"{count(figures['captures'])} captures, {count(figures['capture_failures'])} failed",
        f"{count(figures['verifications'])} comparisons with eager",
    ]
    tiles = [
        Tile("Served by graphs", percent(figures["graph_ratio"]), f"{count(figures['hits'])} of {count(calls)} calls"),
        Tile("Ran eagerly", percent(figures["fallbacks"] / max(calls, 1)),
             f"{count(figures['fallbacks'])} calls, without captures"),
        Tile("Padding", percent(figures["padding_ratio"]), "of all rows that graphs computed"),
        Tile("Captures", milliseconds(figures["capture_time_ms"]), f"{count(figures['captures'])} graphs captured"),
    ]  # fmt: skip
    sections = [reasons_section(stats.reasons, calls), *_evictions(stats)]
    return Content("graphdispatch: counters", headline, facts, tiles, sections)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes if len(sizes) <= 8 else [*sizes[:4], "...", *sizes[-3:]]))


def _rows(served: "Graphed[..., Any]", entries: "Sequence[CUDAGraphEntry]") -> list[Section]:
    rows = dict(sorted(served.stats.rows.items()))
    if not rows:
        return []
    total = sum(rows.values())
    captured = sorted({entry.size for entry in entries})
    sets = [
        charts.Series("captured", "--graph", captured),
        charts.Series("to capture", "--reference", served.sizes),
    ]
    sizes, calls = np.array(list(rows), np.int64), np.array(list(rows.values()), np.float64)
    top = max(*served.sizes, 1)
    above = float(calls[sizes > top].sum()) / total
    lead = "How many calls had each number of rows, and the sizes that have a graph now."
    if above:
        lead += f" {percent(above)} of the calls had more than {count(top)} rows, the largest size, and are not drawn."
    figure = charts.traffic([charts.Series("calls", "--graph-soft", sizes, calls / total)], sets, top, "rows")
    table = Table(
        ("rows", "calls", "share"),
        [(str(size), count(number), percent(number / total, 2)) for size, number in rows.items()],
        summary=f"{len(rows)} different numbers of rows",
    )
    return [Section("Calls by number of rows", lead, [Chart("Histogram of calls by rows", figure), table])]


def reasons_section(counted: Counter[Reason], calls: int) -> Section:
    """The calls that no graph served, of so many, by their reasons."""
    reasons = counted.copy().most_common()
    if not reasons:
        return Section("Calls that no graph served", "", [Note("None", "Every call so far was served by a graph.")])
    missed = sum(number for _, number in reasons)
    on_the_way = sum(number for reason, number in reasons if reason.leads_to_graph)
    lead = (
        f"{count(missed)} calls ran without a graph. {count(on_the_way)} of them were on the way to one: the first "
        "call of a size, a capture or a comparison."
    )
    rows = [(reason.value, count(number), percent(number / max(calls, 1), 2), reason.text)
            for reason, number in reasons]  # fmt: skip
    marked = frozenset(index for index, (reason, _) in enumerate(reasons) if not reason.leads_to_graph)
    return Section("Calls that no graph served", lead, [Table(("reason", "calls", "of all", "meaning"), rows, marked)])


def _graphs(entries: "Sequence[CUDAGraphEntry]") -> Section:
    if not entries:
        return Section("Graphs", "", [Note("None", "No graph is captured now; calls run eagerly.", True)])
    total = sum(entry.replay_count for entry in entries) or 1
    rows = [
        (str(entry.size), entry.mode.name, entry.state.value, count(entry.replay_count),
         percent(entry.replay_count / total), milliseconds(entry.capture_time_ms), storage(entry.nbytes))
        for entry in entries
    ]  # fmt: skip
    columns = ("size", "mode", "state", "replays", "of all", "capture", "bytes of its own")
    lead = f"{count(total)} replays of the graphs that exist now, checks included."
    return Section("Graphs", lead, [Table(columns, rows)])


def memory_section(memory: "MemoryReport", *, has_chart: bool = True) -> Section:
    """What graphs hold, by part."""
    parts = (
        ("pool", "--graph", memory.pool_bytes),
        ("static inputs", "--other", memory.input_bytes),
        ("output ring", "--graph-soft", memory.ring_bytes),
        ("graphs", "--eager", memory.entry_bytes),
        ("driver", "--reference", memory.driver_bytes),
    )
    bars = [charts.Series(name, color, (), [amount / memory.total]) for name, color, amount in parts if amount]
    chart = [Chart("Memory by part", charts.shares(["held"], bars))] if bars and has_chart else []
    table = Table(("part", "held"), [*((name, storage(amount)) for name, _, amount in parts),
                                     ("total", storage(memory.total))], frozenset({len(parts)}))  # fmt: skip
    lead = "The memory held now. Graphs share the pool, the static inputs and the output ring; each byte counts once."
    return Section("Memory", lead, [*chart, table])


def _breaks(breaks: "Sequence[BreakFigures]") -> list[Section]:
    if not breaks:
        return []
    rows = [(one.name, one.where, count(one.runs), milliseconds(one.time_ms), percent(one.share)) for one in breaks]
    lead = "The parts that run eagerly between the graphs of a call, and their share of the time of those replays."
    return [Section("Breaks", lead, [Table(("break", "where", "runs", "time", "of the replays"), rows)])]


def _evictions(stats: CUDAGraphStats) -> list[Section]:
    latest = stats.last_evictions[::-1]
    if not latest:
        return []
    rows = [
        (str(one.descriptor.num_tokens), one.reason.value, one.tag, count(one.replays),
         milliseconds(one.capture_time_ms), storage(one.freed_bytes))
        for one in latest
    ]  # fmt: skip
    given_back = storage(stats.evicted_bytes)
    lead = f"{count(stats.evictions)} graphs were evicted, which freed {given_back}. The latest come first."
    return [Section("Evictions", lead, [Table(("size", "reason", "tag", "replays", "capture", "freed"), rows)])]
