"""Tables in files: columns of integers and of text from CSV, JSON lines or Parquet, with the place of every fault."""

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from io import BytesIO, StringIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..errors import ConfigError
from .traffic import Ints

__all__ = ["Field", "Table", "decode_text", "open_table"]

_FLAGS = {"0": 0, "1": 1, "false": 0, "true": 1, "False": 0, "True": 1}
_MOST_DIGITS = 18


class Field(NamedTuple):
    """A column of integers, and the range in which they lie; one from 0 to 1 may also be written as booleans."""

    name: str
    least: int
    most: int

    @property
    def is_flag(self) -> bool:
        """Whether it holds booleans."""
        return (self.least, self.most) == (0, 1)

    def parse(self, value: object) -> int | None:
        """The integer that a text or a JSON value stands for; None if it is none, or out of range."""
        if self.is_flag and (isinstance(value, bool) or value in _FLAGS):
            return int(_FLAGS.get(value, value))  # type: ignore[arg-type]
        if isinstance(value, str):
            text = value.strip()
            value = int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return value if is_whole and self.least <= value <= self.most else None  # type: ignore[operator, return-value]


class Table(ABC):
    """A table of which columns are read by name; rows count from 0. Every fault is a ``ConfigError``."""

    names: Sequence[str]
    """The columns that it has."""

    def __init__(self, path: str | Path) -> None:
        self.path = path

    @abstractmethod
    def integers(self, fields: Sequence[Field]) -> list[Ints]:
        """The columns ``fields``, checked."""

    @abstractmethod
    def texts(self, name: str) -> list[str]:
        """The column ``name`` as text."""

    @abstractmethod
    def place(self, row: int) -> str:
        """Where a row is, for a message."""

    def fail(self, row: int, name: str, message: str) -> NoReturn:
        """Raise for a value of column ``name``."""
        raise ConfigError(f"{self.path}, {self.place(row)}, column {name}: {message}")

    def need(self, names: Iterable[str]) -> None:
        """Raise unless there are all of ``names``."""
        missing = [name for name in names if name not in self.names]
        if missing:
            raise ConfigError(
                f"{self.path} lacks the column(s) {', '.join(missing)}; it has {', '.join(self.names)[:200] or 'none'}"
            )

    def check(self, field: Field, values: Iterable[object]) -> list[int]:
        """``values`` as the integers of ``field``; raises for the first that is none."""
        parsed = []
        for row, value in enumerate(values):
            number = field.parse(value)
            if number is None:
                self.fail(row, field.name, f"expected {_range(field)}, got {str(value)[:40]!r}")
            parsed.append(number)
        return parsed


def decode_text(path: str | Path, data: bytes) -> str:
    """The text in ``data``, the content of the file ``path``."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is neither text nor Parquet: {error}") from error


def open_table(path: str | Path, data: bytes) -> Table:
    """The table in ``data``, the content of the file ``path``."""
    if data.startswith(b"PAR1"):
        return _Parquet(path, data)
    text = decode_text(path, data)
    return _JsonLines(path, text) if text.lstrip().startswith("{") else _Csv(path, text)


class _Csv(Table):
    """Comma-separated values under a line of names."""

    def __init__(self, path: str | Path, text: str) -> None:
        super().__init__(path)
        self._text = text
        records = [record for _, record in islice(self._records(), 2)]
        self.names = [name.strip() for name in records[0]] if records else []
        self._is_empty = len(records) < 2

    def integers(self, fields: Sequence[Field]) -> list[Ints]:
        self.need(field.name for field in fields)
        if self._is_empty:
            raise ConfigError(f"{self.path} has no rows below its line of names")
        columns = [self.names.index(field.name) for field in fields]
        flags = {column: _FLAGS.__getitem__ for column, field in zip(columns, fields, strict=True) if field.is_flag}
        try:
            found = self._load(columns, np.int64, flags)
        except (ValueError, KeyError, OverflowError) as error:
            self._diagnose(fields)
            raise ConfigError(f"{self.path} cannot be read as a table of integers: {error}") from error
        for field, column in zip(fields, found.T, strict=True):
            if column.min() < field.least or column.max() > field.most:
                self._diagnose(fields)
        return list(found.T)

    def texts(self, name: str) -> list[str]:
        self.need([name])
        column = self.names.index(name)
        return [record[column] for _, record in self._rows(column)]

    def place(self, row: int) -> str:
        return f"line {next(islice(self._records(), row + 1, None))[0]}"

    def _load(self, columns: list[int], dtype: Any, converters: Any) -> Any:
        lines = StringIO(self._text)
        return np.loadtxt(
            lines, dtype, comments=None, delimiter=",", converters=converters or None, skiprows=1, usecols=columns,
            ndmin=2, encoding=None, quotechar='"',
        )  # fmt: skip

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Line number and values, without empty lines."""
        reader = csv.reader(StringIO(self._text, newline=""))
        try:
            for record in reader:
                if record:
                    yield reader.line_num, record
        except csv.Error as error:
            raise ConfigError(f"{self.path}, line {reader.line_num}: {error}") from error

    def _rows(self, column: int) -> Iterator[tuple[int, list[str]]]:
        for row, (line, record) in enumerate(islice(self._records(), 1, None)):
            if len(record) <= column:
                self.fail(row, self.names[column], f"expected {len(self.names)} values, got {len(record)}")
            yield line, record

    def _diagnose(self, fields: Sequence[Field]) -> None:
        for field in fields:
            column = self.names.index(field.name)
            self.check(field, (record[column] for _, record in self._rows(column)))


class _JsonLines(Table):
    """One JSON object in each line."""

    def __init__(self, path: str | Path, text: str) -> None:
        super().__init__(path)
        lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
        self._lines = list(lines)
        self._records: list[dict[str, Any]] = []
        for number, line in lines.items():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(record, dict):
                raise ConfigError(f"{path}, line {number}: expected a JSON object, got {type(record).__name__}")
            self._records.append(record)
        self.names = list(self._records[0])

    def integers(self, fields: Sequence[Field]) -> list[Ints]:
        self.need(field.name for field in fields)
        found = []
        for field in fields:
            values = list(self._column(field.name))
            kinds = {int, bool} if field.is_flag else {int}
            if not set(map(type, values)) <= kinds or min(values) < field.least or max(values) > field.most:
                self.check(field, (None if isinstance(value, str) else value for value in values))
            found.append(np.array(values, np.int64))
        return found

    def texts(self, name: str) -> list[str]:
        self.need([name])
        return [str(value) for value in self._column(name)]

    def place(self, row: int) -> str:
        return f"line {self._lines[row]}"

    def _column(self, name: str) -> Iterator[Any]:
        for row, record in enumerate(self._records):
            try:
                yield record[name]
            except KeyError:
                self.fail(row, name, "the value is missing")


class _Parquet(Table):
    """An Apache Parquet file. Needs pyarrow."""

    def __init__(self, path: str | Path, data: bytes) -> None:
        super().__init__(path)
        try:
            parquet = import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(
                f"{path} is Parquet, which needs pyarrow: pip install 'graphdispatch[parquet]'"
            ) from error
        try:
            self._table = parquet.read_table(BytesIO(data))
        except Exception as error:
            raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error
        self.names = list(self._table.column_names)

    def integers(self, fields: Sequence[Field]) -> list[Ints]:
        self.need(field.name for field in fields)
        found = []
        for field in fields:
            column = self._table.column(field.name)
            values = None if column.null_count else column.to_numpy()
            kinds = "biu" if field.is_flag else "iu"
            if values is None or values.dtype.kind not in kinds or not _within(values, field):
                self.check(field, column.to_pylist())
            found.append(np.asarray(values, np.int64))
        return found

    def texts(self, name: str) -> list[str]:
        self.need([name])
        return [str(value) for value in self._table.column(name).to_pylist()]

    def place(self, row: int) -> str:
        return f"row {row}"


def _within(values: Any, field: Field) -> bool:
    return bool(values.size and values.min() >= field.least and values.max() <= field.most)


def _range(field: Field) -> str:
    return "0 or 1" if field.is_flag else f"an integer from {field.least} to {field.most}"
