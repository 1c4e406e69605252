"""Measures everything, or the parts that are named, and prints a table.

python -m benchmarks [--only PART ...] [--turns N] [--traces FILE ...] [--json FILE]
"""

import argparse
import json
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from graphdispatch.native import tape

from . import (
    adaptive,
    capture,
    decisions,
    decoder,
    eager,
    eviction,
    front,
    generate,
    guard,
    lengths,
    models,
    peers,
    piecewise,
    price,
    structure,
    wrapper,
)
from .timing import Effort, Row


class _Part(NamedTuple):
    title: str
    rows: Callable[[Effort], list[Row]]


_PARTS = {
    "wrapper": _Part(wrapper.TITLE, wrapper.rows),
    "graphed": _Part(front.TITLE, front.rows),
    "eager": _Part(eager.TITLE, eager.rows),
    "guard": _Part(guard.TITLE, guard.rows),
    "decoder": _Part(decoder.TITLE, decoder.rows),
    "peers": _Part(peers.TITLE, peers.rows),
    "piecewise": _Part(piecewise.TITLE, piecewise.rows),
    "capture": _Part(capture.TITLE, capture.rows),
    "price": _Part(price.TITLE, price.rows),
    "structure": _Part(structure.TITLE, structure.rows),
    "lengths": _Part(lengths.TITLE, lengths.rows),
    "models": _Part(models.TITLE, models.rows),
    "decisions": _Part(decisions.TITLE, decisions.rows),
    "adaptive": _Part(adaptive.TITLE, adaptive.rows),
    "eviction": _Part(eviction.TITLE, eviction.rows),
    "generate": _Part(generate.TITLE, generate.rows),
}


def main() -> None:
    """Measure, print, and write the file of results."""
    options = _options()
    effort = Effort(turns=options.turns, traces=tuple(options.traces))
    where = _where()
    print("  ".join(f"{name}: {value}" for name, value in where.items()))
    print(f"medians of {effort.turns} turns taken by both sides alternately, captures of {effort.captures}")
    measured: dict[str, list[Row]] = {}
    torch.set_num_threads(1)
    with torch.inference_mode():
        for name in options.only:
            measured[name] = _PARTS[name].rows(effort)
            print(f"\n{_PARTS[name].title}\n{_table(measured[name])}", flush=True)
    if options.json is not None:
        content = {"where": where, "parts": {name: list(map(_plain, rows)) for name, rows in measured.items()}}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ratios measured in one run.")
    parser.add_argument("--only", nargs="+", choices=list(_PARTS), default=list(_PARTS), metavar="PART")
    parser.add_argument("--turns", type=int, default=Effort.turns, help="turns of each side (default %(default)s)")
    parser.add_argument("--traces", nargs="+", type=Path, default=[], metavar="FILE", help="instead of generated ones")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return parser.parse_args()


def _where() -> dict[str, str]:
    return {
        "device": _processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "threads": "1",
        "graphs on the CPU": "native" if tape.TAPE.wait() else f"Python's loop, since {tape.TAPE.why_not}",
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _table(rows: list[Row]) -> str:
    width = max(len(line.case) for line in rows)
    unit = rows[0].unit
    columns = f"{'compared':>12}{'extra':>12}{'better':>10}" if any(line.base is not None for line in rows) else ""
    columns += f"{'least':>12}{'compared':>12}" if any(line.least is not None for line in rows) else ""
    head = f"{'':{width}}{unit:>12}{columns}"
    return "\n".join([head, *(_line(line, width) for line in rows)])


def _line(line: Row, width: int) -> str:
    text = f"{line.case:{width}}{line.value:12.2f}"
    if line.base is None or line.extra is None or line.speedup is None:
        return text
    text += f"{line.base:12.2f}{line.extra:12.2f}{line.speedup:9.2f}x"
    return text if line.least is None else f"{text}{line.least:12.2f}{line.base_least:12.2f}"


def _plain(line: Row) -> dict[str, str | float | None]:
    figures = {
        line.unit: line.value,
        f"base_{line.unit}": line.base,
        "least": line.least,
        "base_least": line.base_least,
    }
    return {"case": line.case, **{name: figure for name, figure in figures.items() if figure is not None}}


if __name__ == "__main__":
    main()
