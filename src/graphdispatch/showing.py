"""How people are shown amounts and results: in units that fit, and in notebooks as a plain table in their colours."""

import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup


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


def percent(share: float, digits: int = 1) -> str:
    """``0.125`` as ``12.5 %``."""
    return f"{100 * share:.{digits}f} %"


def milliseconds(time_ms: float) -> str:
    """A time in the unit that fits it."""
    if time_ms >= 1000:
        return f"{time_ms / 1e3:.1f} s"
    return f"{time_ms:.{3 if time_ms < 10 else 2 if time_ms < 100 else 0}f} ms"


def storage(amount: float) -> str:
    """Bytes in the unit that fits them."""
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


def count(number: float) -> str:
    """A number of things, with separated thousands. A weight that is not a whole number gets four digits."""
    return f"{number:,.0f}" if number == int(number) else f"{number:,.4g}"


def rows_text(rows: object) -> str:
    """A number of rows, or the lengths of a batch: ``1 row``, ``3 x 20 rows``."""
    return f"{rows} row{'s' * (rows != 1)}"


def shortened(things: Sequence[object]) -> str:
    """Things in a row, many of them shortened in the middle: ``1, 2, 4``."""
    shown = things if len(things) <= 12 else (*things[:10], "...", things[-1])
    return ", ".join(map(str, shown))


def without_numbers(text: str) -> str:
    """A text that is the same where only the numbers in it differ, to put such texts together."""
    return re.sub(r"\d[\d.e+-]*", "", text)
