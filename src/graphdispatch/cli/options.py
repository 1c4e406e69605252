"""Options that several commands share, and amounts with units: ``2GiB``, ``30s``, ``25%``."""

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..sizes import NAMED_SIZES

__all__ = [
    "CostFile",
    "GraphMode",
    "JsonFile",
    "MaxSize",
    "ModeOption",
    "Requests",
    "Sequences",
    "SizesOption",
    "Tokens",
    "Traces",
    "parse_bytes",
    "parse_seconds",
    "parse_share",
]

_BYTES = {"b": 1.0}
for _power, _letter in enumerate("kmgt", 1):
    _BYTES |= {f"{_letter}ib": 1024.0**_power, f"{_letter}b": 1000.0**_power}
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SHARES = {"": 1.0, "%": 0.01}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?([a-z%]*)")
_LONGEST = 40


class GraphMode(StrEnum):
    """The modes that have graphs: ``CUDAGraphMode``'s names."""

    FULL = "FULL"
    PIECEWISE = "PIECEWISE"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"


def parse_bytes(text: str) -> float:
    """Bytes in ``2GiB`` or ``500MB``. Raises ``typer.BadParameter``, as the other two do."""
    return _parse(text, _BYTES, "a size such as 2GiB, 500MB or 4096B")


def parse_seconds(text: str) -> float:
    """Seconds in ``30s``, ``500ms``, ``2min`` or ``1h``."""
    return _parse(text, _SECONDS, "a time such as 30s, 500ms or 2min")


def parse_share(text: str) -> float:
    """The share that ``25%`` or ``0.25`` is."""
    return _parse(text, _SHARES, "a share such as 25% or 0.25")


def _parse(text: str, units: Mapping[str, float], expected: str) -> float:
    found = _AMOUNT.fullmatch(text.strip().lower())
    if found is None or len(text) > _LONGEST or found[2] not in units:
        raise typer.BadParameter(f"expected {expected}, got {text[:_LONGEST]!r}")
    return float(found[1]) * units[found[2]]


Traces = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Steps as CSV, JSON lines or Parquet, a vLLM log with --cudagraph-metrics tables, any of them as .gz; or "
        "a .json that Workload.save wrote. Several files follow one another. Default: a small generated trace.",
        metavar="TRACE",
        show_default=False,
    ),
]
Requests = Annotated[
    bool,
    typer.Option(
        "--requests", help="The traces hold requests (arrivals, tokens in and out), which a scheduler model batches."
    ),
]
Sequences = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs", help="The scheduler's limit of requests. Default: 256 for --requests, else the most seen.",
        min=1, show_default=False,
    ),
]  # fmt: skip
Tokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        help="The scheduler's limit of tokens. Default: 8192 for --requests, else the most seen.",
        min=1, show_default=False,
    ),
]  # fmt: skip
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
CostFile = Annotated[
    Path | None,
    typer.Option(
        "--cost",
        help="What steps and graphs cost, as calibrate wrote it. Default: figures for an 8B model on one large GPU.",
        metavar="FILE", show_default=False,
    ),
]  # fmt: skip
SizesOption = Annotated[
    str | None,
    typer.Option(
        "--sizes", help=f"Instead of a plan: capture sizes such as 1,2,4,8, or a name: {', '.join(NAMED_SIZES)}.",
        metavar="SIZES", show_default=False,
    ),
]  # fmt: skip
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the figures to this file as JSON.", metavar="FILE", show_default=False),
]
