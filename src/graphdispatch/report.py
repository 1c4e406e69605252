"""``Report``: what a served callable did, as plain data, and as a page, a notebook's tables or text.

It is read from the front end's counters, graphs and failures; that runs nothing and takes no lock.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .descriptors import size_text
from .reasons import Reason
from .showing import count, html_table, milliseconds, percent, shortened, storage
from .stats import CUDAGraphStats, Gain

if TYPE_CHECKING:
    from rich.console import Group

    from .runtime.entry import CUDAGraphEntry
    from .runtime.group import GraphGroup

_UNKNOWN = "not measured"
_MOST_BARS = 64
_MOST_DETAILS = 3
_ASK = "explain() with such a call, or the log at level INFO, says more, and audit() looks at the whole callable"
_MEND = "mend what the failed capture names, or mark it with eager_break and use mode PIECEWISE"


class GraphRow(NamedTuple):
    """One graph that is held now. None stands for what nobody measured.

    Attributes:
        size: The size as the front end names it: ``8``, ``4 x 128``.
        mode: The runtime mode.
        hits: The calls that this graph served.
        padding: The padding as a share of the rows that it computed for them.
        gain: The times of a replay of a full batch and of an eager call, the shortest of those that were measured.
        nbytes: The bytes that releasing it frees; what all graphs share is not among them.
    """

    size: str
    mode: str
    hits: int
    padding: float | None
    gain: Gain | None
    nbytes: int

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of ``GRAPH_COLUMNS``."""
        padding = percent(self.padding) if self.padding is not None else _UNKNOWN
        times = [self.gain.eager_ms, self.gain.replay_ms, self.gain.ms] if self.gain is not None else []
        gain = map(milliseconds, times) if times else [_UNKNOWN] * 3
        return self.size, self.mode, count(self.hits), padding, *gain, storage(self.nbytes)


class GraphTable(tuple[GraphRow, ...]):
    """The graphs that are held now, in a tuple that shows itself as a table: as text, and in notebooks."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(_aligned([GRAPH_COLUMNS, *(row.cells() for row in self)]))

    def _repr_html_(self) -> str:
        return html_table("Graphs", GRAPH_COLUMNS, [row.cells() for row in self])


class ReasonRow(NamedTuple):
    """Why calls ran eagerly.

    Attributes:
        reason: The value of the ``Reason``.
        calls: The number of calls.
        share: The share of all calls.
        sentence: The reason in words.
        remedy: What to do; empty where such calls come before a graph.
        details: What failed captures say of it, such as a line of the model.
    """

    reason: str
    calls: int
    share: float
    sentence: str
    remedy: str
    details: tuple[str, ...] = ()

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of ``REASON_COLUMNS``."""
        why = "\n".join((self.sentence, *self.details))
        return self.reason, count(self.calls), percent(self.share), why, self.remedy or "nothing"


class Bar(NamedTuple):
    """The calls with some numbers of rows.

    Attributes:
        rows: The numbers of rows.
        graph: The calls that graphs served.
        eager: The other calls.
    """

    rows: str
    graph: int
    eager: int


GRAPH_COLUMNS = ("size", "mode", "hits", "padding", "eager", "replay", "gain", "own memory")
REASON_COLUMNS = ("reason", "calls", "of all", "why", "what to do")


@dataclass(frozen=True)
class Report:
    """What a served callable did until the report was made. Immutable plain data.

    ``str`` gives it as text; a notebook and, where rich is installed, ``rich.print`` show it as tables.

    Attributes:
        name: The callable, or the class of its front end.
        calls: All calls.
        hits: The calls that graphs served.
        padding: The padding as a share of all rows that graphs computed; None if the rows of calls are not known.
        captures: The number of captures.
        capture_ms: What they took together, in milliseconds.
        evictions: The number of graphs that were evicted.
        memory_bytes: What all graphs hold together, with their pool and buffers.
        graphs: The graphs that are held now.
        waiting: The sizes that have no graph now.
        reasons: Why calls ran eagerly; those that somebody can do something about come first.
        bars: The calls by their number of rows; none where it is not known.
        marks: Where the capture sizes lie among the bars, in bars from the left.
    """

    name: str
    calls: int
    hits: int
    padding: float | None
    captures: int
    capture_ms: float
    evictions: int
    memory_bytes: int
    graphs: GraphTable
    waiting: tuple[str, ...]
    reasons: tuple[ReasonRow, ...]
    bars: tuple[Bar, ...]
    marks: tuple[float, ...]

    @property
    def headline(self) -> str:
        """The report in one sentence."""
        if not self.calls:
            return f"{self.name} was not called yet"
        return f"Graphs served {percent(self.hits / self.calls)} of {count(self.calls)} calls of {self.name}"

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """The figures of the whole, each with its name."""
        taking = f" in {milliseconds(self.capture_ms)}" if self.captures else ""
        gone = f", {count(self.evictions)} evicted" if self.evictions else ""
        return (
            ("hits", count(self.hits)),
            ("eager calls", count(self.calls - self.hits)),
            ("padding", percent(self.padding) if self.padding is not None else _UNKNOWN),
            ("graphs", f"{len(self.graphs)}{gone}"),
            ("memory", storage(self.memory_bytes)),
            ("captures", f"{count(self.captures)}{taking}"),
        )

    @property
    def without_graph(self) -> str:
        """``waiting`` as text, shortened in the middle."""
        return shortened(self.waiting)

    def html(self) -> str:
        """The page: one document, which loads nothing and runs no script."""
        from jinja2 import Environment, StrictUndefined  # here, since a report is seldom made

        template = (files(__package__) / "report.html").read_text("utf-8")
        page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        columns = {"graph_columns": GRAPH_COLUMNS, "reason_columns": REASON_COLUMNS}
        most = max((bar.graph + bar.eager for bar in self.bars), default=1)
        return page.from_string(template).render(report=self, most=most, count=count, percent=percent, **columns)

    def save(self, path: str | Path) -> None:
        """Write the page to a file, which it replaces.

        Args:
            path: The file, such as ``report.html``.

        Raises:
            OSError: If the file cannot be written.
        """
        Path(path).write_text(self.html(), "utf-8")

    def __str__(self) -> str:
        lines = [self.headline, ", ".join(f"{name} {figure}" for name, figure in self.facts)]
        if self.graphs:
            lines += ["", str(self.graphs)]
        if self.waiting:
            lines += ["", f"no graph now: {self.without_graph}"]
        for row in self.reasons:
            reason, calls, share, why, remedy = row.cells()
            lines += ["", f"{reason}: {calls} ({share} of all calls)"]
            lines += [*(f"  {line}" for line in why.split("\n")), f"  what to do: {remedy}"]
        return "\n".join(lines)

    def _tables(self) -> Iterable[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
        yield self.headline, ("figure", "value"), list(self.facts)
        if self.graphs:
            yield "Graphs", GRAPH_COLUMNS, [row.cells() for row in self.graphs]
        if self.reasons:
            yield "Why calls ran eagerly", REASON_COLUMNS, [row.cells() for row in self.reasons]

    def _repr_html_(self) -> str:
        return "".join(html_table(*table) for table in self._tables())

    def __rich__(self) -> "Group":
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        made = []
        for title, columns, rows in self._tables():
            table = Table(*columns, title=Text(title), title_justify="left", box=box.SIMPLE)
            for row in rows:
                table.add_row(*map(Text, row))
            made.append(table)
        return Group(*made)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def make_report(
    name: str,
    stats: CUDAGraphStats,
    entries: Iterable["CUDAGraphEntry"],
    groups: Iterable["GraphGroup"],
    details: Mapping[Reason, Sequence[str]],
    memory_bytes: int,
) -> Report:
    """The report on a front end. If it is in use, the figures may be from slightly different moments.

    Args:
        name: What the report calls it.
        stats: Its counters.
        entries: The graphs that it holds.
        groups: Its groups.
        details: What is known of reasons besides their texts, as ``details_of`` the groups gives it.
        memory_bytes: The bytes of all its graphs.

    Returns:
        The report.
    """
    entries, groups = sorted(entries, key=lambda entry: (entry.size, entry.mode)), list(groups)
    points: dict[int, Any] = {}
    for group in groups:
        table = group.route.table
        if not group.route.is_single:
            points |= zip(table.sizes, table.points, strict=True)
    hits = stats.hits_by_rows
    sizes = sorted({*points, *(entry.size for entry in entries)})
    held = {entry.size for entry in entries}
    judges = [(one.gain, one.all_entries) for one in groups if one.gain is not None]
    judged = {entry: gain.of(entry, entry.size) for gain, own in judges for entry in own}
    rows = {} if any(hasattr(size, "axes") for size in sizes) else stats.rows  # several dimensions: no number of rows
    bars, marks = _bars(hits, rows, [size for size in sizes if size in points])
    return Report(
        name=name,
        calls=stats.calls,
        hits=stats.hits,
        padding=stats.padding_ratio if hits else None,
        captures=stats.captures,
        capture_ms=stats.capture_time_ms,
        evictions=stats.evictions,
        memory_bytes=memory_bytes,
        graphs=GraphTable(
            GraphRow(
                *(size_text(one.key), one.mode.name, one.replay_count, _padding(one, hits, sizes)),
                *(judged.get(one) or one.gain, one.nbytes),
            )
            for one in entries
        ),
        waiting=tuple(size_text(point) for size, point in sorted(points.items()) if size not in held),
        reasons=tuple(_reason_rows(stats, details)),
        bars=bars,
        marks=marks,
    )


def _padding(entry: "CUDAGraphEntry", hits: Mapping[int, int], sizes: Sequence[int]) -> float | None:
    """The padding of a graph's hits, where they are known to be the hits with so many rows; else None.

    Hits are counted by rows for the whole callable. Those between the next smaller size and this one are the graph's if
    it has served as many; it has not where a second graph of the size exists, or an earlier one was evicted.
    """
    if hasattr(entry.size, "axes"):
        return None
    below = max((size for size in sizes if size < entry.size), default=0)
    served = {rows: number for rows, number in hits.items() if below < rows <= entry.size}
    if not served or sum(served.values()) != entry.replay_count:
        return None
    return 1.0 - sum(rows * number for rows, number in served.items()) / (entry.size * entry.replay_count)


def _reason_rows(stats: CUDAGraphStats, known: Mapping[Reason, Sequence[str]]) -> Iterable[ReasonRow]:
    counted = stats.reasons.copy().most_common()
    for reason, number in sorted(counted, key=lambda one: one[0].leads_to_graph):
        details = tuple(known.get(reason, ())[:_MOST_DETAILS])
        remedy = reason.remedy or ("" if reason.leads_to_graph else _MEND if details else _ASK)
        yield ReasonRow(reason.value, number, number / max(stats.calls, 1), reason.sentence, remedy, details)


def _bars(
    hits: Mapping[int, int], rows: Mapping[int, int], sizes: Sequence[int]
) -> tuple[tuple[Bar, ...], tuple[float, ...]]:
    """The calls by rows in at most 64 bars, and where the sizes lie. Calls far above the largest size share a bar."""
    if not rows:
        return (), ()
    top = max(rows)
    end = min(top, 2 * sizes[-1]) if sizes else top
    width = -(-end // _MOST_BARS)
    number = -(-end // width)
    counted = [[0, 0] for _ in range(number + (top > number * width))]
    for size, calls in rows.items():
        bar = counted[min((size - 1) // width, len(counted) - 1)]
        served = hits.get(size, 0)
        bar[0] += served
        bar[1] += max(calls - served, 0)
    names = [str(i + 1) if width == 1 else f"{i * width + 1} to {(i + 1) * width}" for i in range(number)]
    names += [f"more than {number * width}"][: len(counted) - number]
    bars = tuple(Bar(name, *pair) for name, pair in zip(names, counted, strict=True))
    return bars, tuple(size / width for size in sizes if size <= number * width)
