"""Reads traffic from files: step traces and request traces as CSV, JSON lines or Parquet, and vLLM's metrics log.

Files are told apart by what they hold, not by their names; any may be compressed with gzip. Every fault is a
``ConfigError`` that names the file, the line and the field.
"""

import math
import re
import zlib
from collections.abc import Mapping
from gzip import GzipFile
from io import BytesIO
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from .tables import Field, TraceFile, decode_text, open_trace, parse_cell
from .traffic import LARGEST_STEP, Floats, Requests, Steps, booleans, floats, integers

__all__ = ["read_bytes", "read_requests", "read_trace"]

_MOST_BYTES = 2**31  # a small .gz can unpack to any number of bytes
_LONGEST_REQUEST = 2**31

_TOKENS = Field("num_tokens", 1, LARGEST_STEP)
_REQS = Field("num_reqs", 1, LARGEST_STEP)
_KINDS = tuple(Field(name, 0, 1) for name in ("uniform_decode", "is_decode", "is_uniform_decode"))

_ARRIVALS = {"arrival_ms": 1.0, "arrival_s": 1e3, "timestamp": 1.0, "TIMESTAMP": 0.0}
"""Milliseconds of one unit in each column of arrivals; 0 for dates."""
_PROMPTS = ("prompt_tokens", "input_length", "ContextTokens")
_OUTPUTS = ("output_tokens", "output_length", "GeneratedTokens")

_LOG_COLUMNS = ("Unpadded Tokens", "Padded Tokens", "Num Paddings", "Runtime Mode", "Count")
_LOG_HEADER = re.compile(rb"\|\s*Unpadded Tokens\s*\|")


def read_trace(path: str | Path) -> Steps | tuple[Mapping[int, float], Mapping[int, float]]:
    """The steps of a trace, or, of a log with vLLM's ``--cudagraph-metrics`` tables, all and uniform steps by size.

    A trace has a column ``num_tokens``; ``uniform_decode`` (or ``is_decode``; 1 or 0), or else ``num_reqs``, tells the
    kind of a step, and without both all steps are uniform decode.
    """
    data = read_bytes(path)
    if _LOG_HEADER.search(data):
        return _parse_log(path, decode_text(path, data))
    trace = open_trace(path, data)
    kind = next((field for field in _KINDS if field.name in trace.names), None)
    wanted = [_TOKENS, *([kind] if kind else []), *([_REQS] if _REQS.name in trace.names else [])]
    found = dict(zip((field.name for field in wanted), trace.integers(*wanted), strict=True))
    tokens = integers("num_tokens", found["num_tokens"])
    reqs = integers("num_reqs", found["num_reqs"]) if "num_reqs" in found else None
    kinds = found[kind.name] if kind else np.ones(len(tokens), bool) if reqs is None else tokens == reqs
    return Steps(tokens, booleans("uniform_decode", kinds), reqs)


def read_requests(path: str | Path) -> Requests:
    """The requests of a trace in the order of their arrival, the first at 0 ms.

    Columns: ``arrival_ms`` or ``arrival_s``, ``prompt_tokens`` and ``output_tokens``; or, as in Mooncake's traces,
    ``timestamp`` (milliseconds), ``input_length`` and ``output_length``; or, as in Azure's, ``TIMESTAMP`` (a date),
    ``ContextTokens`` and ``GeneratedTokens``.
    """
    trace = open_trace(path, read_bytes(path))
    prompts, outputs = (
        Field(next((name for name in names if name in trace.names), names[0]), 1, _LONGEST_REQUEST)
        for names in (_PROMPTS, _OUTPUTS)
    )
    prompt, output = trace.integers(prompts, outputs)
    arrival = _arrivals(path, trace)
    order = np.argsort(arrival, kind="stable")
    return Requests(
        floats("arrival_ms", arrival[order] - arrival[order[0]]),
        integers("prompt_tokens", prompt[order], _LONGEST_REQUEST),
        integers("output_tokens", output[order], _LONGEST_REQUEST),
    )


def _arrivals(path: str | Path, trace: TraceFile) -> Floats:
    """Arrivals in milliseconds, as they stand in the file."""
    name = next((name for name in _ARRIVALS if name in trace.names), None)
    if name is None:
        raise ConfigError(f"{path} lacks a column of arrivals; expected one of {', '.join(_ARRIVALS)}")
    unit, arrivals = _ARRIVALS[name], []
    for where, (value,) in trace.rows(name):
        # A date of a trace has one time zone at most, which makes no difference to its arrivals.
        text = str(value).removesuffix("Z").removesuffix("+00:00")
        try:
            arrival = float(text) * unit if unit else np.datetime64(text, "ns")
        except ValueError:
            arrival = math.nan
        if not np.isfinite(arrival):
            expected = "a number" if unit else "a date such as 2023-11-16 18:17:03.97"
            raise ConfigError(f"{where}, column {name}: expected {expected}, got {str(value)[:40]!r}")
        arrivals.append(arrival)
    found = np.array(arrivals)
    return found if unit else (found - found.min()) / np.timedelta64(1, "ms")


def read_bytes(path: str | Path) -> bytes:
    """The content of a file that is not empty, unpacked. Raises ``ConfigError`` that names it."""
    try:
        data = Path(path).read_bytes()
        if data.startswith(b"\x1f\x8b"):
            with GzipFile(fileobj=BytesIO(data)) as file:
                data = file.read(_MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path} holds more than {_MOST_BYTES} bytes; split it, or save a histogram")
    if not data.strip():
        raise ConfigError(f"{path} is empty; expected a header line and a line for each step or request")
    return data


def _parse_log(path: str | Path, text: str) -> tuple[dict[int, float], dict[int, float]]:
    """Steps by size, all and those that ran FULL; tables of one log add up, and lines may have a prefix."""
    counts: dict[int, float] = {}
    decode: dict[int, float] = {}
    in_table = False
    for number, line in enumerate(text.splitlines(), 1):
        cells = tuple(cell.strip() for cell in line.split("|")[1:-1])
        if cells == _LOG_COLUMNS:
            in_table = True
        elif not cells:
            in_table = False
        elif in_table and set("".join(cells)) != {"-"}:
            size, count, mode = _log_row(f"{path}, line {number}", cells)
            counts[size] = counts.get(size, 0) + count
            if mode == "FULL":
                decode[size] = decode.get(size, 0) + count
    if not counts:
        raise ConfigError(f"{path} has no rows in its tables of graph statistics; run vLLM with --cudagraph-metrics")
    return counts, decode


def _log_row(where: str, cells: tuple[str, ...]) -> tuple[int, int, str]:
    if len(cells) != len(_LOG_COLUMNS):
        raise ConfigError(f"{where}: expected the {len(_LOG_COLUMNS)} columns {', '.join(_LOG_COLUMNS)}, got {cells}")
    numbers = []
    for name, cell in zip(_LOG_COLUMNS, cells, strict=True):
        if name != "Runtime Mode":
            field = Field(name, 1, _LONGEST_REQUEST) if name == "Count" else Field(name, 0, LARGEST_STEP)
            numbers.append(field.check(parse_cell(cell), where))
    size, padded, padding, count = numbers
    if size < 1 or padded - padding != size:
        raise ConfigError(f"{where}: expected Padded Tokens = Unpadded Tokens + Num Paddings, got {cells}")
    return size, count, cells[3].removeprefix("CUDAGraphMode.")
