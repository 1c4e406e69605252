"""How notebooks show results: as one plain table, in the colours of the notebook."""

from collections.abc import Iterable, Sequence

from markupsafe import Markup

__all__ = ["html_table"]


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table of ``rows`` under ``columns``, with ``title`` as its caption; every text is escaped.

    Args:
        title: What the table shows.
        columns: The heads of the columns.
        rows: For each row, a value for each column, shown as its text.
    """
    side, left = "caption-side: top; text-align: left", "text-align: left"
    heads = Markup("").join(Markup('<th style="{}">{}</th>').format(left, name) for name in columns)
    cell = Markup('<td style="{}">{}</td>').format
    lines = (Markup("<tr>{}</tr>").format(Markup("").join(cell(left, value) for value in row)) for row in rows)
    table = '<table><caption style="{}">{}</caption><thead><tr>{}</tr></thead><tbody>{}</tbody></table>'
    return str(Markup(table).format(side, title, heads, Markup("").join(lines)))
