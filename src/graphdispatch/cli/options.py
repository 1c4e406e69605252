"""Options that several commands share, and amounts with units: ``2GiB``, ``30s``."""

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "GraphMode",
    "JsonFile",
    "MaxSize",
    "ModeOption",
    "Trace",
    "parse_bytes",
    "parse_seconds",
]

_BYTES = {"b": 1.0}
for _power, _letter in enumerate("kmgt", 1):
    _BYTES |= {f"{_letter}ib": 1024.0**_power, f"{_letter}b": 1000.0**_power}
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)")
_LONGEST = 40


class GraphMode(StrEnum):
    """The modes that have graphs: ``CUDAGraphMode``'s names."""

    FULL = "FULL"
    PIECEWISE = "PIECEWISE"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"


def parse_bytes(text: str) -> float:
    """Bytes in ``2GiB`` or ``500MB``. Raises ``typer.BadParameter``, as the other does."""
    return _parse(text, _BYTES, "a size such as 2GiB, 500MB or 4096B")


def parse_seconds(text: str) -> float:
    """Seconds in ``30s``, ``500ms``, ``2min`` or ``1h``."""
    return _parse(text, _SECONDS, "a time such as 30s, 500ms or 2min")


def _parse(text: str, units: Mapping[str, float], expected: str) -> float:
    found = _AMOUNT.fullmatch(text.strip().lower())
    if found is None or len(text) > _LONGEST or found[2] not in units:
        raise typer.BadParameter(f"expected {expected}, got {text[:_LONGEST]!r}")
    return float(found[1]) * units[found[2]]


Trace = Annotated[
    Path | None,
    typer.Argument(
        help="Steps as CSV, JSON lines or Parquet, or a vLLM log with --cudagraph-metrics tables, any of them as .gz. "
        "Default: a small generated trace.",
        metavar="TRACE",
        show_default=False,
    ),
]
ModeOption = Annotated[
    GraphMode | None,
    typer.Option("--mode", help="Which graphs serve which steps. Default: FULL.", case_sensitive=False),
]
MaxSize = Annotated[
    int | None,
    typer.Option(
        help="The largest graph, in tokens. Default: 512, as in vLLM, or about the largest step if that is smaller.",
        min=1, show_default=False,
    ),
]  # fmt: skip
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the figures to this file as JSON.", metavar="FILE", show_default=False),
]
