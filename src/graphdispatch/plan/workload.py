"""``Workload``: how often steps of each shape come, from recorded steps, traces, logs, counters or a histogram."""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..descriptors import DispatchKey
from ..errors import ConfigError, shown
from ..stats import CUDAGraphStats

LARGEST_SIZE = 2**20
"""The largest size in any dimension, as in ``CUDAGraphConfig``."""

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Shape: TypeAlias = int | tuple[int, ...]
"""The rows or tokens of a step; with several dynamic dimensions, the size of each, as (8, 64)."""

_LOG_HEADER = re.compile(r"\|\s*Unpadded Tokens\s*\|")
_LOG_ROW = re.compile(r"\|\s*(\d+)\s*\|\s*\d+\s*\|\s*\d+\s*\|\s*(?:CUDAGraphMode\.)?(\w+)[^|\n]*\|\s*(\d+)\s*\|")
_FLAGS = {"0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True, eq=False)
class Workload:
    """Steps with their weights. Make it with one of the constructors; threads may share it.

    Attributes:
        shapes: int64, a row for each step, a column for each dynamic dimension.
        is_decode: Whether a step is uniform decode, which some modes serve by ``FULL`` graphs alone.
        weights: How often each step came.
        is_ordered: Whether the rows stand in the order in which the steps ran.
    """

    shapes: Ints
    is_decode: NDArray[np.bool_]
    weights: Floats
    is_ordered: bool

    @classmethod
    def from_steps(cls, steps: Iterable[Shape | DispatchKey], is_decode: Iterable[bool] | None = None) -> Self:
        """The workload of steps in the order in which they ran.

        Args:
            steps: A number of rows or tokens for each step, a tuple with a size for each dynamic dimension, or a
                ``DispatchKey``, of which the tokens count.
            is_decode: For each step, whether it is uniform decode. By default every step is, but for keys of prefill.

        Raises:
            ConfigError: If there are no steps, or one is impossible.
        """
        steps = list(steps)
        if steps and all(isinstance(step, DispatchKey) for step in steps):
            keys: Sequence[Any] = steps
            steps = [key.num_tokens for key in keys]
            is_decode = [not key.is_prefill for key in keys] if is_decode is None else is_decode
        shapes = _checked_shapes("steps", steps)
        kinds = np.ones(len(shapes), bool) if is_decode is None else np.asarray(list(is_decode))
        if kinds.shape != (len(shapes),) or not np.isin(kinds, (0, 1)).all():
            raise ConfigError(f"is_decode must hold a boolean for each of {len(shapes)} steps, got {shown(is_decode)}")
        return cls(shapes, kinds.astype(bool), np.ones(len(shapes)), True)

    @classmethod
    def from_histogram(cls, counts: Mapping[Shape, float], decode: Mapping[Shape, float] | None = None) -> Self:
        """The workload of ``counts[shape]`` steps of each shape, in no known order.

        Args:
            counts: How often each shape came.
            decode: How many of these were uniform decode. By default all.

        Raises:
            ConfigError: If there are no steps, a weight is impossible, or ``decode`` exceeds ``counts``.
        """
        shapes, uniform = _checked_shapes("counts", list(counts)), counts if decode is None else decode
        try:
            every, first = (np.array([float(each.get(shape, 0.0)) for shape in counts]) for each in (counts, uniform))
        except (OverflowError, TypeError, ValueError):
            every = first = np.full(len(counts), np.nan)
        both = np.concatenate([first, every - first])
        if not (set(uniform) <= set(counts) and np.isfinite(both).all() and both.min() >= 0 and both.any()):
            raise ConfigError(
                "counts must hold finite weights from 0, one at least above 0, and decode for some of these shapes "
                f"weights from 0 to theirs, got {shown(counts)} and {shown(decode)}"
            )
        kept, kinds = both > 0, np.repeat([True, False], len(shapes))
        return cls(np.concatenate([shapes, shapes])[kept], kinds[kept], both[kept], False)

    @classmethod
    def from_stats(cls, stats: CUDAGraphStats) -> Self:
        """The calls that live counters have seen, by number of rows; all count as uniform decode.

        Args:
            stats: The counters, such as ``serve.stats``.

        Raises:
            ConfigError: If no call with a known number of rows was counted.
        """
        if not stats.rows:
            raise ConfigError(
                "stats must have counted calls by rows, got none: serve some traffic first; a wrapper's calls arrive "
                "padded, and their real rows are not known"
            )
        return cls.from_histogram({rows: float(count) for rows, count in stats.rows.items()})

    @classmethod
    def from_trace(cls, path: str | Path, columns: Sequence[str] = ("num_tokens",)) -> Self:
        """The steps in a file: CSV, JSON lines, Parquet, or a vLLM log with ``--cudagraph-metrics`` tables; also .gz.

        ``uniform_decode`` or ``is_decode`` (0 or 1) says whether a step is uniform decode. Without these, a step is if
        its ``num_reqs`` equals its tokens, and without that too, every step is. A column ``count`` says how often a
        step came, as the tables of a log do; the steps have no order then. Steps of a log that ran in FULL graphs count
        as uniform decode. Parquet needs pyarrow.

        Args:
            path: The file.
            columns: The column of each dynamic dimension.

        Raises:
            ConfigError: If the file cannot be read. It names the file, and the line at fault.
        """
        steps, kinds, weights, is_ordered = [], [], [], True
        for line, row in _rows(path):
            try:
                steps.append([int(str(row[name])) for name in columns])
                kinds.append(_is_decode(row, steps[-1]))
                weights.append(float(int(str(row.get("count", 1)))))
                is_ordered &= "count" not in row
                if not (all(1 <= size <= LARGEST_SIZE for size in steps[-1]) and weights[-1] > 0):
                    raise ValueError
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
                raise ConfigError(
                    f"{path}, line {line}: expected {', '.join(columns)} from 1 to {LARGEST_SIZE}, and if it has them "
                    f"uniform_decode as 0 or 1, num_reqs and count as integers, got {str(row)[:200]}"
                ) from None
        if not steps:
            raise ConfigError(f"{path} has no steps; expected a header line and a line for each step")
        return cls(np.array(steps), np.array(kinds), np.array(weights), is_ordered)

    @cached_property
    def histogram(self) -> tuple[Ints, Floats, Floats]:
        """The different shapes in increasing order, with the weights of uniform decode steps and of all others."""
        shapes, index = np.unique(self.shapes, axis=0, return_inverse=True)
        parts = np.zeros((2, len(shapes)))
        np.add.at(parts, (1 - self.is_decode, index.ravel()), self.weights)
        return shapes, parts[0], parts[1]

    @property
    def total(self) -> float:
        """The weight of all steps."""
        return float(self.weights.sum())

    @property
    def largest(self) -> int:
        """The most tokens of a step: the product of its sizes."""
        return int(self.shapes.prod(1).max())

    def split(self, fraction: float = 0.5) -> tuple[Self, Self]:
        """The first steps and the rest, to plan on one part and judge on the other.

        Args:
            fraction: The share of the steps that comes first.

        Raises:
            ConfigError: If the order of the steps is not known, or no step is left on one side.
        """
        if not self.is_ordered:
            raise ConfigError("a workload without an order cannot split in time; make it with from_steps or from_trace")
        first = round(fraction * len(self.weights)) if 0 < fraction < 1 else 0
        if not 0 < first < len(self.weights):
            raise ConfigError(f"fraction must leave steps on both sides, got {fraction} of {len(self.weights)} steps")
        parts = slice(first), slice(first, None)
        one, other = (type(self)(self.shapes[p], self.is_decode[p], self.weights[p], True) for p in parts)
        return one, other

    def __repr__(self) -> str:
        share = 100 * float(self.weights @ self.is_decode) / self.total
        order = "in order" if self.is_ordered else "in no known order"
        return (
            f"<Workload {self.total:g} steps of {len(self.histogram[0])} shapes up to {self.largest} tokens, "
            f"{share:.1f} % uniform decode, {order}>"
        )


def _checked_shapes(name: str, values: Sequence[Any]) -> Ints:
    """The shapes as int64 in two dimensions. Raises ``ConfigError`` that names the first at fault."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.empty(0)
    if array.ndim not in (1, 2) or not array.size or array.dtype.kind not in "iu":
        raise ConfigError(
            f"{name} must hold at least one integer, or tuple of integers, all equally long, got {shown(values)}"
        )
    array = array.reshape(len(array), -1)
    wrong = ((array < 1) | (array > LARGEST_SIZE)).any(1)
    if wrong.any():
        index = int(wrong.argmax())
        raise ConfigError(f"{name}[{index}] must be from 1 to {LARGEST_SIZE}, got {values[index]}")
    return array.astype(np.int64)


def _rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """The rows of a file of CSV, JSON lines or Parquet, also as .gz, each with its number: that of its line.

    Those of a vLLM log have the columns ``num_tokens``, ``uniform_decode`` and ``count``. Raises ``ConfigError``.
    """
    if Path(path).suffix == ".parquet":
        try:
            # Without pyarrow's threads: a process that ends soon after they ran may abort (apache/arrow#34314).
            file = import_module("pyarrow.parquet").ParquetFile(path, pre_buffer=False)
            yield from enumerate(file.read(use_threads=False).to_pylist(), 1)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"{path} cannot be read as Parquet, which needs pyarrow: {error}") from error
        return
    try:
        with (gzip.open if Path(path).suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as text:
            lines = text.read().splitlines()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if any(map(_LOG_HEADER.search, lines)):
        for number, line in enumerate(lines, 1):
            for tokens, mode, count in _LOG_ROW.findall(line):
                yield number, {"num_tokens": tokens, "uniform_decode": int(mode == "FULL"), "count": count}
    elif lines and lines[0].startswith("{"):
        for number, line in enumerate(lines, 1):
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None
    else:
        reader = csv.DictReader(lines, skipinitialspace=True)
        try:
            yield from ((reader.line_num, row) for row in reader)
        except csv.Error as error:
            raise ConfigError(f"{path}, line {reader.line_num + 1} is not CSV: {error}") from None


def _is_decode(record: Mapping[str, Any], sizes: Sequence[int]) -> bool:
    for name in ("uniform_decode", "is_decode"):
        if name in record:
            return _FLAGS[str(record[name]).strip().lower()]
    return "num_reqs" not in record or int(str(record["num_reqs"])) == sizes[0]
