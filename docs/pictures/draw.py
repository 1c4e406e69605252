"""Draws the pictures of the concepts: ``python docs/pictures/draw.py`` writes the SVG files beside this one.

A picture is 360 units wide, so that it can be read on a telephone.

Note [colours]
    Each element has its plain colours as attributes, so that a viewer without style sheets shows them. Where a viewer
    has variables, the style sheet puts the colours of the site's theme over them, or those for a dark background.
"""

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

WIDTH = 360
_INK, _GREY, _INK_IN_DARK, _GREY_IN_DARK = "#24292f", "#57606a", "#d1d7e0", "#9198a1"
_LOOKS = {
    "": f'fill="none" stroke="{_GREY}"',
    "graph": 'fill="#2a78d6" fill-opacity="0.2" stroke="#2a78d6"',
    "eager": 'fill="#d9822b" fill-opacity="0.2" stroke="#d9822b"',
    "pad": f'fill="#888888" fill-opacity="0.27" stroke="{_GREY}" stroke-dasharray="3 2"',
}
"""The looks of boxes, by kind."""
_ANCHORS = {"left": "start", "right": "end"}


def _themed(ink: str, grey: str) -> str:
    """The rules that take the theme's colours, or these where there is no theme."""
    grey = f"var(--md-default-fg-color--light, {grey})"
    rules = {"text": f"fill: var(--md-typeset-color, {ink})", "text.note, .picture .head": f"fill: {grey}"}
    return "\n".join(f".picture {name} {{ {rule}; }}" for name, rule in (rules | {".line": f"stroke: {grey}"}).items())


STYLE = f"""<style>
@supports (fill: var(--any)) {{
{_themed(_INK, _GREY)}
@media (prefers-color-scheme: dark) {{
{_themed(_INK_IN_DARK, _GREY_IN_DARK)}
}}
}}
</style>"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words with their baseline at ``y``; ``kind`` may hold ``left`` or ``right``, and ``note``, which is smaller."""
    kinds = kind.split()
    anchor = next((_ANCHORS[one] for one in kinds if one in _ANCHORS), "middle")
    look = f'class="note" fill="{_GREY}" font-size="11.5"' if "note" in kinds else f'fill="{_INK}"'
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" {look}>{escape(words)}</text>'


def box(x: float, y: float, width: float, words: str = "", kind: str = "", note: str = "", height: float = 34) -> str:
    """A box with words in it, and perhaps a note below them."""
    middle, themed = x + width / 2, "" if kind in ("graph", "eager") else ' class="line"'
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"'
    lines = [f"<rect {place} {_LOOKS[kind]}{themed}/>"]
    if words:
        lines.append(text(middle, y + height / 2 + (-3 if note else 4.5), words))
    if note:
        lines.append(text(middle, y + height / 2 + 12, note, "note"))
    return "".join(lines)


def arrow(*points: tuple[float, float]) -> str:
    """A line through the points with a head at its end."""
    (x0, y0), (x, y) = points[-2:]
    line = "M" + " L".join(f"{px:g} {py:g}" for px, py in points)
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    left, right = f"{x - 7 * dx - 4 * dy:g} {y - 7 * dy - 4 * dx:g}", f"{x - 7 * dx + 4 * dy:g} {y - 7 * dy + 4 * dx:g}"
    head = f"M{x:g} {y:g} L{left} L{right} Z"
    return (
        f'<path class="line" d="{line}" fill="none" stroke="{_GREY}" stroke-width="1.4"/>'
        f'<path class="head" d="{head}" fill="{_GREY}"/>'
    )


def column(steps: Iterable[tuple[str, str, str]], x: float, width: float, y: float = 8, step: float = 62) -> list[str]:
    """Boxes below each other, (words, note, kind), with arrows between them."""
    parts: list[str] = []
    for index, (words, note, kind) in enumerate(steps):
        top = y + index * step
        if index:
            parts.append(arrow((x + width / 2, top - step + 42), (x + width / 2, top)))
        parts.append(box(x, top, width, words, kind, note, 42))
    return parts


def call() -> tuple[str, int, list[str]]:
    """The path of a call."""
    parts = column(
        [
            ("decode(batch of 3)", "your call", ""),
            ("signature", "types, shapes, constants", ""),
            ("decision", "a graph of 4, or a reason", ""),
            ("guards", "is all as it was captured?", ""),
            ("copy in and pad", "3 real rows + 1 padding row", "graph"),
            ("replay", "all kernels in one launch", "graph"),
            ("copy out", "the 3 real rows", "graph"),
            ("the answer", "eager's, and it is yours", ""),
        ],
        10,
        190,
    )
    parts += [box(238, 132, 112, "eager run", "eager", "with a reason", 42)]
    parts += [box(238, 256, 112, "capture", "eager", "or compare", 42)]
    for y in (91, 153, 215):
        parts.append(arrow((200, y), (219, y), (219, 153), (238, 153)) if y != 153 else arrow((200, y), (238, y)))
    parts += [
        arrow((294, 174), (294, 256)),
        text(300, 212, "if one", "note left"),
        text(300, 226, "is due", "note left"),
    ]
    parts += [arrow((294, 298), (294, 463), (200, 463))]
    return "The path of a call: signature, decision, guards; then replay, or an eager run with a reason", 500, parts


def padding() -> tuple[str, int, list[str]]:
    """A batch of three rows in a graph of four."""
    parts = [text(62, 20, "batch"), text(180, 20, "static input"), text(298, 20, "answer")]
    for row in range(3):
        y = 32 + 34 * row
        parts += [box(20, y, 84, f"row {row}", "", height=28), box(138, y, 84, f"row {row}", "graph", height=28)]
        parts += [box(256, y, 84, f"row {row}", "", height=28), arrow((104, y + 14), (138, y + 14))]
        parts += [arrow((222, y + 14), (256, y + 14))]
    parts += [box(138, 134, 84, "padding", "pad", height=28), text(62, 152, "pad rule →", "note")]
    parts += [text(298, 152, "cut off", "note"), text(121, 182, "copy in", "note")]
    parts += [text(239, 182, "replay, copy out", "note")]
    title = "Three rows are copied into a graph of four; a pad rule fills the fourth, and it is cut off again"
    return title, 192, parts


def checks() -> tuple[str, int, list[str]]:
    """From an eager call to a graph that serves."""
    parts = column(
        [
            ("run eagerly, watched", "this is the caller's answer", "eager"),
            ("undo what it wrote", "caches, counters, random state", ""),
            ("warm up, undo", "workspaces grow now", "eager"),
            ("record", "the kernels, on static memory", "graph"),
            ("replay, compare, undo", "outputs and written state", "graph"),
            ("replay with other padding", "the real rows keep their bits", "graph"),
            ("put the first effects back", "as after one execution", ""),
            ("compare on the next batch", "a frozen value shows here", "eager"),
            ("serve", "guards are checked at each hit", "graph"),
        ],
        10,
        220,
    )
    parts += [arrow((230, 277), (262, 277)), arrow((230, 339), (262, 339)), arrow((230, 463), (262, 463))]
    for y, instead in ((277, "stays eager"), (339, "full batches"), (463, "stays eager")):
        parts += [text(266, y - 2, "differs:", "note left"), text(266, y + 13, instead, "note left")]
    return "A capture runs eagerly, undoes, records, replays and compares before a graph serves", 556, parts


def memory() -> tuple[str, int, list[str]]:
    """What graphs of three sizes share."""
    parts = [text(10, 22, "static inputs: one buffer of the largest size", "left")]
    parts += [box(10, 32, width, "", "graph", height=26) for width in (340, 170, 85)]
    parts += [text(52, 49, "4"), text(138, 49, "8"), text(265, 49, "16")]
    parts += [text(10, 88, "pool: intermediates, shared by all graphs", "left")]
    for y, width, rows in ((98, 340, 16), (128, 200, 8), (158, 120, 4)):
        parts.append(box(10, y, width, f"graph of {rows} rows", "graph", height=26))
    parts += [text(138, 176, "one replay at a time, same memory", "note left")]
    parts += [text(10, 214, "outputs: cloned for the caller (default)", "left")]
    parts += [box(10, 224, 120, "graph's output", "graph", height=26), box(230, 224, 120, "your tensor", "", height=26)]
    parts += [arrow((130, 237), (230, 237)), text(180, 230, "real rows", "note")]
    return "Graphs of all sizes share static inputs and one pool; outputs are copied to the caller", 262, parts


def modes() -> tuple[str, int, list[str]]:
    """One graph, or graphs between breaks."""
    parts = [text(10, 20, "FULL", "left"), box(10, 28, 340, "one graph for the call", "graph")]
    parts += [text(10, 96, "PIECEWISE", "left"), box(10, 104, 105, "graph", "graph")]
    parts += [box(127, 104, 106, "attention", "eager"), box(245, 104, 105, "graph", "graph")]
    parts += [arrow((115, 121), (127, 121)), arrow((233, 121), (245, 121))]
    parts += [text(180, 153, "runs eagerly: a break", "note")]
    parts += [text(10, 186, "FULL_AND_PIECEWISE", "left"), box(10, 194, 165, "uniform decode", "graph", "FULL", 42)]
    parts += [box(185, 194, 165, "other batches", "eager", "PIECEWISE", 42)]
    return "FULL is one graph; PIECEWISE is graphs around parts that run eagerly", 246, parts


PICTURES: tuple[Callable[[], tuple[str, int, list[str]]], ...] = (call, padding, checks, memory, modes)


def svg(picture: Callable[[], tuple[str, int, list[str]]]) -> str:
    """The file of one picture."""
    title, height, parts = picture()
    return document(title, WIDTH, height, parts)


def document(title: str, width: int, height: int, parts: Iterable[str], head: str = 'class="picture"') -> str:
    """A picture as SVG."""
    font = 'font-family="system-ui, sans-serif" font-size="13"'
    top = f'<svg xmlns="http://www.w3.org/2000/svg" {head} viewBox="0 0 {width} {height}" {font} role="img">'
    return "\n".join([top, f"<title>{escape(title)}</title>", STYLE, *parts, "</svg>\n"])


if __name__ == "__main__":
    for one in PICTURES:
        Path(__file__).with_name(f"{one.__name__}.svg").write_text(svg(one))
