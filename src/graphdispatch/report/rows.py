"""What a report shows, read from the front end's counters, graphs and failures. It runs nothing and takes no lock."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..descriptors import size_text
from ..stats import CUDAGraphStats
from .page import Bar, GraphRow, GraphTable, ReasonRow, Report

if TYPE_CHECKING:
    from ..memory.entry import CUDAGraphEntry
    from ..serve.group import GraphGroup

__all__ = ["make_report"]

_MOST_BARS = 64
_MOST_DETAILS = 3
_ASK = "explain() with such a call says more, and audit() looks at the whole callable"
_MEND = "mend what the failed capture names, or mark it with eager_break and use mode PIECEWISE"


def make_report(
    name: str,
    stats: CUDAGraphStats,
    entries: Iterable["CUDAGraphEntry"],
    groups: Iterable["GraphGroup"],
    memory_bytes: int,
) -> Report:
    """The report on a front end. If it is in use, the figures may be from slightly different moments.

    Args:
        name: What the report calls it.
        stats: Its counters.
        entries: The graphs that it holds.
        groups: Its groups, with their failed captures.
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
        graphs=GraphTable(_graph_row(entry, hits, sizes) for entry in entries),
        waiting=tuple(size_text(point) for size, point in sorted(points.items()) if size not in held),
        reasons=tuple(_reason_rows(stats, groups)),
        bars=bars,
        marks=marks,
    )


def _graph_row(entry: "CUDAGraphEntry", hits: Mapping[int, int], sizes: Sequence[int]) -> GraphRow:
    """All that a report says of one graph."""
    return GraphRow(
        size=size_text(entry.key),
        mode=entry.mode.name,
        hits=entry.replay_count,
        padding=_padding(entry, hits, sizes),
        gain=entry.gain,
        nbytes=entry.nbytes,
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


def _reason_rows(stats: CUDAGraphStats, groups: Iterable["GraphGroup"]) -> Iterable[ReasonRow]:
    failures = {(failure.reason, failure.detail): None for group in groups for failure in list(group.failures.values())}
    counted = stats.reasons.copy().most_common()
    for reason, number in sorted(counted, key=lambda one: one[0].leads_to_graph):
        told = (detail for why, detail in failures if why is reason and detail and detail != reason.text)
        details = tuple(islice(told, _MOST_DETAILS))
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
