"""The charts, as plotly figures in plain data. Their colours are custom properties of ``page.css``."""

import html
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ..plan.workload import Floats, Ints
from ..units import percent, size_range

__all__ = ["Series", "frontier", "padding", "shares", "traffic"]

_MOST_POINTS = 16_384
_MOST_RULES = 128  # more lines than this would hide the chart

_BESIDE = ("top center", "middle right")  # alternating, so that the names of neighbours do not overlap
_BELOW = ("bottom center",)

Figure = dict[str, Any]


class Series(NamedTuple):
    """One series of a chart: its name in the legend, its colour, and what is drawn, as the chart says."""

    name: str
    color: str
    x: Sequence[int] | Ints
    y: Sequence[float] | Floats = ()
    labels: Sequence[str] = ()
    """The names of its points."""


def traffic(parts: Sequence[Series], captured: Sequence[Series], top: int, unit: str) -> Figure:
    """The distribution of sizes up to ``top``, with a row for each set of capture sizes below it.

    A part has sizes and their shares of all steps; a set of capture sizes has no ``y``. Lines through the distribution
    show the first set.
    """
    data = [_distribution(part, top, unit) for part in parts]
    data += [_row(one, unit) for one in captured]
    rows = len(captured)
    height = 310 + 26 * rows
    split = 26 * rows / (height - 100)
    layout = _layout(height, f"size of the batch, in {unit}", "share of all, %")
    layout["xaxis"] |= _octaves(top) | {"anchor": "y2"}
    layout["yaxis"] |= {"domain": [split + 0.04, 1], "rangemode": "tozero"}
    layout["yaxis2"] = {
        "domain": [0, split], "type": "category", "range": [rows - 0.5, -0.5], "showgrid": False, "zeroline": False,
        "fixedrange": True, "automargin": True, "tickfont": {"color": "--text"},
    }  # fmt: skip
    if len(captured[0].x) <= _MOST_RULES:
        layout["shapes"] = [_rule(size) for size in captured[0].x]
    return {"data": data, "layout": layout}


def _distribution(part: Series, top: int, unit: str) -> Figure:
    """A stepped line over the sizes, with a zero at both ends."""
    width = -(-top // _MOST_POINTS)
    first = np.arange(1, top + 1, width)
    sizes, weights = np.asarray(part.x), np.asarray(part.y)
    within = sizes <= top
    heights = np.bincount((sizes[within] - 1) // width, weights[within], len(first))
    ranges = [size_range(int(size), int(size) + width - 1) for size in first]
    return {
        "type": "scatter", "mode": "lines", "name": _text(part.name), "stackgroup": "traffic",
        "x": [0.5, *(first + (width - 1) / 2).tolist(), top + 1.0], "y": [0.0, *(100 * heights).round(6).tolist(), 0.0],
        "customdata": ["0", *ranges, f"above {top}"], "fillcolor": part.color,
        "line": {"shape": "hvh", "width": 0.5, "color": part.color},
        "hovertemplate": f"%{{customdata}} {unit}: %{{y:.3~f}} %<extra>{_text(part.name)}</extra>",
    }  # fmt: skip


def _row(captured: Series, unit: str) -> Figure:
    name = _text(captured.name)
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": list(captured.x),
        "y": [name] * len(captured.x),
        "yaxis": "y2", "showlegend": False,
        "marker": {"symbol": "line-ns", "size": 13, "line": {"width": 1.5, "color": captured.color}},
        "hovertemplate": f"%{{x}} {unit}<extra>{name}</extra>",
    }  # fmt: skip


def _octaves(top: int) -> Figure:
    """A logarithmic axis of sizes: the same relative padding is the same distance everywhere."""
    return {
        "type": "log", "tickvals": [2**octave for octave in range(top.bit_length())],
        "range": [-0.12, float(np.log10(top)) + 0.03],
    }  # fmt: skip


def padding(lines: Sequence[Series], unit: str) -> Figure:
    """The padding of a batch of each size, as a share of its rows, for several sets of graphs; NaN breaks a line."""
    data = [
        {
            "type": "scatter", "mode": "lines", "name": _text(line.name),
            "x": list(line.x), "connectgaps": False,
            "y": [None if np.isnan(share) else round(100 * float(share), 4) for share in line.y],
            "line": {"color": line.color, "width": 1 if line.color == "--reference" else 2, "shape": "hvh"},
            "hovertemplate": f"%{{x}} {unit}: %{{y:.1f}} % padding<extra>{_text(line.name)}</extra>",
        }
        for line in lines
    ]  # fmt: skip
    layout = _layout(300, f"size of the batch, in {unit}", "padding, % of the batch")
    layout["yaxis"]["rangemode"] = "tozero"
    layout["xaxis"] |= _octaves(max(line.x[-1] for line in lines))
    return {"data": data, "layout": layout}


def frontier(curve: Series, others: Sequence[Series], least_ms: float, above_ms: float) -> Figure:
    """Step time, in ms, by number of graphs. The axis goes from ``least_ms``, the best possible, to ``above_ms``."""
    data = [_marks(curve, "lines+markers"), *(_marks(points, "markers+text") for points in others)]
    most = max(chain.from_iterable(points.x for points in (curve, *others)))
    layout = _layout(360, "graphs", "mean step time, ms")
    layout["xaxis"] |= _octaves(2 * most) | {"range": [-0.05, float(np.log10(1.6 * most))]}
    room = 0.12 * (above_ms - least_ms) or 0.01 * least_ms or 1.0
    layout["yaxis"] |= {"range": [least_ms - room, above_ms + room], "tickformat": "~g"}
    layout["shapes"] = [{
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": least_ms, "y1": least_ms,
        "line": {"color": "--reference", "width": 1, "dash": "dot"},
    }]  # fmt: skip
    layout["annotations"] = [{
        "xref": "paper", "x": 0, "y": least_ms, "xanchor": "left", "yanchor": "bottom", "showarrow": False,
        "text": "a graph for every size", "font": {"color": "--muted", "size": 12},
    }]  # fmt: skip
    return {"data": data, "layout": layout}


def shares(names: Sequence[str], parts: Sequence[Series]) -> Figure:
    """One bar for each name. A part has its share of each bar, ``y``; the parts of a bar add up to the whole."""
    data = [
        {
            "type": "bar", "orientation": "h", "name": _text(part.name), "y": [_text(name) for name in names],
            "x": [100 * share for share in part.y], "marker": {"color": part.color},
            "text": [percent(share) for share in part.y],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
            "hovertemplate": f"%{{y}}: %{{x:.2f}} %<extra>{_text(part.name)}</extra>",
        }
        for part in parts
    ]  # fmt: skip
    layout = _layout(96 + 38 * len(names), "", "", is_stacked=True)
    layout["xaxis"] |= {"range": [0, 100], "ticksuffix": " %", "fixedrange": True}
    layout["yaxis"] |= {
        "type": "category", "autorange": "reversed", "fixedrange": True, "showgrid": False,
        "tickfont": {"color": "--text"},
    }  # fmt: skip
    return {"data": data, "layout": layout | {"bargap": 0.3, "uniformtext": {"mode": "hide", "minsize": 11}}}


def _text(text: str) -> str:
    """``text`` escaped for plotly, which interprets some HTML."""
    return html.escape(text, quote=False)


def _marks(points: Series, mode: str) -> Figure:
    beside = _BESIDE if len(points.labels) > 1 else _BELOW
    return {
        "type": "scatter", "mode": mode, "name": _text(points.name), "x": list(points.x),
        "y": list(points.y), "text": [_text(label) for label in points.labels],
        "textposition": [beside[index % len(beside)] for index in range(len(points.labels))],
        "line": {"color": points.color, "width": 2}, "textfont": {"color": "--text", "size": 12},
        "marker": {"color": points.color, "size": 6 if "lines" in mode else 10},
        "hovertemplate": f"%{{x}} graphs: %{{y:.4~f}} ms<extra>{'%{text}' if points.labels else _text(points.name)}"
        "</extra>",
    }  # fmt: skip


def _rule(size: int) -> Figure:
    return {
        "type": "line", "layer": "below", "yref": "paper", "x0": size, "x1": size, "y0": 0, "y1": 1,
        "line": {"color": "--graph-faint", "width": 1},
    }  # fmt: skip


def _layout(height: int, x: str, y: str, *, is_stacked: bool = False) -> Figure:
    axis = {
        "gridcolor": "--line", "zerolinecolor": "--line", "linecolor": "--line", "automargin": True,
        "tickfont": {"color": "--muted", "size": 12},
    }  # fmt: skip
    legend = {
        "orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal", "font": {"color": "--text"},
    }  # fmt: skip
    return {
        "height": height,
        "margin": {"l": 8, "r": 26, "t": 8, "b": 8},
        "paper_bgcolor": "#0000",
        "plot_bgcolor": "#0000",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "--muted"},
        "hoverlabel": {"bgcolor": "--hover", "bordercolor": "--line", "font": {"color": "--text"}},
        "legend": legend,
        "barmode": "stack" if is_stacked else "group",
        "bargap": 0,
        "xaxis": axis | {"title": {"text": x, "standoff": 10}, "showgrid": False},
        "yaxis": axis | {"title": {"text": y, "standoff": 10}},
    }
