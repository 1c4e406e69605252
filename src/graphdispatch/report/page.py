"""``Report``: a self-contained page, made from plain data.

Only this module writes HTML, so everything that comes from users is escaped in one place. Tables and sentences repeat
what a chart shows, because a page may be read without scripts, or by a screen reader.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..errors import ConfigError

__all__ = [
    "Chart",
    "Content",
    "Note",
    "Part",
    "Report",
    "Section",
    "Table",
    "Tile",
    "inline",
    "make_report",
    "save_text",
]

_NUMBER = re.compile(r"[\d\N{MINUS SIGN}\N{EN DASH}]\S*( \S+){0,3}$")  # a number with its unit, and where it occurs


def save_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` in place of an old file. Raises ``ConfigError`` if that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"path={str(path)!r} cannot be written: {error.strerror}; name a file in a folder "
            "that exists and may be written to"
        ) from error


@dataclass(frozen=True, repr=False)
class Report:
    """A report as one HTML document that loads no other file. Immutable."""

    title: str
    html: str = field(compare=False)

    def save(self, path: str | Path) -> None:
        """Write the page to ``path`` in place of an old file. Raises ``ConfigError`` if that fails."""
        save_text(path, self.html)

    def _repr_html_(self) -> str:
        """The page in a frame, as notebooks show it; it cannot reach what is around it."""
        frame = 'sandbox="allow-scripts" style="width: 100%; height: 45rem; border: 0"'
        return f'<iframe {frame} title="{escape(self.title)}" srcdoc="{escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        return f"<Report {self.title!r}, {len(self.html) / 2**20:.1f} MiB>"


class Tile(NamedTuple):
    """One important figure."""

    label: str
    value: str
    note: str = ""


class Table(NamedTuple):
    """Rows of text under ``columns``. ``marked`` rows are highlighted. A ``summary`` folds the table away behind it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()
    summary: str = ""


class Chart(NamedTuple):
    """A plotly figure as plain data, with a ``label`` for readers who cannot see it.

    A text that begins with ``--`` names a custom property in ``page.css``: a colour of the theme.
    """

    label: str
    figure: dict[str, Any]


class Note(NamedTuple):
    """A box with a heading and a sentence. It may be a ``warning``."""

    heading: str
    text: str
    warning: bool = False


Part: TypeAlias = Table | Chart | Note


class Section(NamedTuple):
    """A part of the page under a heading. ``lead`` explains what it shows."""

    title: str
    lead: str
    parts: Sequence[Part]


class Content(NamedTuple):
    """What a page shows, from above to below. ``facts`` stand under the ``headline``."""

    title: str
    headline: str
    facts: Iterable[str]
    tiles: Sequence[Tile]
    sections: Iterable[Section]


def make_report(page: Content) -> Report:
    """The page as a document. plotly draws the charts; without it this raises ``ConfigError``."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ConfigError("a report needs plotly: pip install 'graphdispatch[report]'") from error
    here = files(__package__)
    html = (here / "page.html").read_text("utf-8")
    for name, text in (
        ("title", escape(page.title)),
        ("style", (here / "page.css").read_text("utf-8")),
        ("body", _body(page)),
        ("plotly", get_plotlyjs()),
        ("script", (here / "page.js").read_text("utf-8")),
    ):
        html = html.replace(f"<!-- {name} -->", text, 1)
    return Report(page.title, html)


def inline(page: Content) -> str:
    """A page without charts as a part of another one, in its colours. It loads nothing, and needs no plotly."""
    style = (files(__package__) / "notebook.css").read_text("utf-8")
    return f'<div class="graphdispatch"><style>{style}</style>{_body(page)}</div>'


def _body(page: Content) -> str:
    tiles = "".join(
        f'<div class="tile"><dt>{escape(tile.label)}</dt><dd>{escape(tile.value)}'
        f"<small>{escape(tile.note)}</small></dd></div>"
        for tile in page.tiles
    )
    return (
        f"<header><p>{escape(page.title)}</p><h1>{escape(page.headline)}</h1>"
        f'<ul class="facts">{"".join(f"<li>{escape(fact)}</li>" for fact in page.facts)}</ul></header>'
        f'<dl class="tiles">{tiles}</dl>{"".join(map(_section, page.sections))}'
    )


def _section(section: Section) -> str:
    lead = f'<p class="lead">{escape(section.lead)}</p>' if section.lead else ""
    return f"<section><h2>{escape(section.title)}</h2>{lead}{''.join(map(_part, section.parts))}</section>"


def _part(part: Part) -> str:
    if isinstance(part, Chart):
        # A "<" could end the script element. JSON allows to write it as an escape.
        figure = json.dumps(part.figure, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        return (
            f'<div class="chart" role="img" aria-label="{escape(part.label)}"></div>'
            f'<script type="application/json">{figure}</script>'
        )
    if isinstance(part, Note):
        kind = "warning" if part.warning else "good"
        return f'<div class="note {kind}"><strong>{escape(part.heading)}</strong><p>{escape(part.text)}</p></div>'
    return _table(part)


def _table(table: Table) -> str:
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.columns)
    kinds = [
        "" if index == 0 or not all(map(_NUMBER.match, column)) else ' class="n"'
        for index, column in enumerate(columns)
    ]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, table.columns, strict=True))
    rows = "".join(
        f"<tr{' class=marked' if index in table.marked else ''}>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for index, row in enumerate(table.rows)
    )
    html = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return f"<details><summary>{escape(table.summary)}</summary>{html}</details>" if table.summary else html
