"""Traces in files, CSV, JSON lines or Parquet: their columns by name, and the place of every fault."""

import csv
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError
from .traffic import Ints

__all__ = ["Field", "TraceFile", "decode_text", "open_trace", "parse_cell"]

_FLAGS = {"false": False, "true": True, "False": False, "True": True}
_MOST_DIGITS = 18

Records = Callable[[], Iterator[tuple[str, Mapping[str, Any]]]]
"""Reads a file from its beginning: for each row where it is, for a message, and its values by column."""


class Field(NamedTuple):
    """A column of integers, and the range in which they lie. One from 0 to 1 may also hold booleans."""

    name: str
    least: int
    most: int

    def check(self, value: object, where: str) -> int:
        """``value``, which stands at ``where``, as an integer; raises ``ConfigError`` unless it is one in range."""
        is_flag = (self.least, self.most) == (0, 1)
        if isinstance(value, int) and (is_flag or not isinstance(value, bool)) and self.least <= value <= self.most:
            return int(value)
        expected = "0 or 1" if is_flag else f"an integer from {self.least} to {self.most}"
        raise ConfigError(f"{where}, column {self.name}: expected {expected}, got {str(value)[:40]!r}")


class TraceFile:
    """The rows of one file, which are read anew each time. Every fault is a ``ConfigError`` that says where it is."""

    def __init__(self, path: str | Path, names: Sequence[str], records: Records, text: str | None = None) -> None:
        self.path = path
        self.names = names
        """The columns that it has."""
        self._records = records
        self._text = text

    def rows(self, *names: str) -> Iterator[tuple[str, list[Any]]]:
        """For each row, where it is and its values in the columns ``names``."""
        missing = [name for name in names if name not in self.names]
        if missing:
            raise ConfigError(
                f"{self.path} lacks the column(s) {', '.join(missing)}; it has {', '.join(self.names)[:200] or 'none'}"
            )
        for place, record in self._records():
            where = f"{self.path}, {place}"
            try:
                yield where, [record[name] for name in names]
            except KeyError as error:
                raise ConfigError(f"{where}, column {error.args[0]}: the value is missing") from None

    def integers(self, *fields: Field) -> list[Ints]:
        """The columns ``fields``."""
        plain = self._plain_integers(fields)
        if plain is not None:
            return plain
        columns = [array("q") for _ in fields]
        for where, values in self.rows(*(field.name for field in fields)):
            for field, column, value in zip(fields, columns, values, strict=True):
                column.append(field.check(value, where))
        if not columns[0]:
            raise ConfigError(f"{self.path} has no rows below its line of names")
        return [np.array(column, np.int64) for column in columns]

    def _plain_integers(self, fields: Sequence[Field]) -> list[Ints] | None:
        """The columns of a CSV file that holds plain integers in range, read many times as fast; else None, and reading
        row by row says what is wrong and where."""
        if self._text is None or "\n" not in self._text.strip() or any(f.name not in self.names for f in fields):
            return None
        places = [self.names.index(field.name) for field in fields]
        text = StringIO(self._text)
        try:
            read = np.loadtxt(text, np.int64, delimiter=",", comments=None, skiprows=1, usecols=places, ndmin=2)
        except (ValueError, OverflowError):
            return None
        columns = list(read.T)
        fits = all(f.least <= c.min() and c.max() <= f.most for f, c in zip(fields, columns, strict=True))
        return [np.ascontiguousarray(column) for column in columns] if fits else None


def parse_cell(text: str) -> int | bool | str:
    """What a cell of text stands for: an integer, a boolean, or else the text itself."""
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
        return int(text)
    return _FLAGS.get(text, text)


def decode_text(path: str | Path, data: bytes) -> str:
    """The text in ``data``, the content of the file ``path``."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is neither text nor Parquet: {error}") from error


def open_trace(path: str | Path, data: bytes) -> TraceFile:
    """The rows in ``data``, the content of the file ``path``. Parquet needs pyarrow."""
    if data.startswith(b"PAR1"):
        return _open_parquet(path, data)
    text = decode_text(path, data)
    if text.lstrip().startswith("{"):
        _, first = next(_json_records(path, text))
        return TraceFile(path, list(first), lambda: _json_records(path, text))
    names = [name.strip() for name in next(_csv_cells(path, text), ("", []))[1]]
    return TraceFile(path, names, lambda: _csv_records(path, text, names), text)


def _csv_cells(path: str | Path, text: str) -> Iterator[tuple[str, list[str]]]:
    reader = csv.reader(StringIO(text, newline=""))
    try:
        for cells in reader:
            if cells:
                yield f"line {reader.line_num}", cells
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error


def _csv_records(path: str | Path, text: str, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = _csv_cells(path, text)
    next(rows, None)
    for place, cells in rows:
        # A row that is too short lacks its last columns.
        yield place, dict(zip(names, map(parse_cell, cells), strict=False))


def _json_records(path: str | Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{path}, line {number}: expected a JSON object, got {type(record).__name__}")
        yield f"line {number}", record


def _open_parquet(path: str | Path, data: bytes) -> TraceFile:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"{path} is Parquet, which needs pyarrow: pip install 'graphdispatch[parquet]'") from error
    try:
        # Without pyarrow's threads: a process that ends soon after they ran may abort.
        # https://github.com/apache/arrow/issues/34314
        table = parquet.ParquetFile(BytesIO(data), pre_buffer=False).read(use_threads=False)
    except Exception as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error

    def records() -> Iterator[tuple[str, dict[str, Any]]]:
        rows: Iterable[dict[str, Any]] = (row for batch in table.to_batches() for row in batch.to_pylist())
        return ((f"row {number}", row) for number, row in enumerate(rows))

    return TraceFile(path, table.column_names, records)
