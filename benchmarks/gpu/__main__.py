"""Measures what graphs are worth on a GPU, each figure beside its peers, and writes ``gpu.json`` and ``gpu.md``.

    python -m benchmarks.gpu [--only SECTION ...] [--quick] [--device cuda] [--trace FILE] [--out FOLDER]
                            [--no-compile [SECTION ...]]

Another accelerator is named by ``--device``, and by ``--import`` the module that makes torch and this library know it.

Each section runs in a process of its own, with a time limit; a row is kept as soon as it is measured, so that a section
that is cut off, or that takes the device down with it, costs neither its own rows so far nor the other sections.
Each section ends with its bars, which are those of a GPU and of the full sizes. The exit code is 0 if every section was
complete and every bar reached, 3 if a bar was not, and 1 if a section was not complete.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from . import adaptive, capture, compiled, copies, decode, fields, generate, overhead
from .bars import Outcome, Row, judge
from .bench import Bench
from .report import earlier, save, table, where

_SECTIONS: dict[str, Any] = {
    "generate": generate,
    "decode": decode,
    "compiled": compiled,
    "capture": capture,
    "overhead": overhead,
    "copies": copies,
    "fields": fields,
    "adaptive": adaptive,
}
_LIMITS_S = {
    "generate": (90, 240),
    "decode": (110, 300),
    "compiled": (10, 60),
    "capture": (45, 120),
    "overhead": (30, 60),
    "copies": (30, 0),
    "fields": (35, 150),
    "adaptive": (40, 0),
}
"""Seconds for each section, and what ``torch.compile`` may take beyond that."""
_MISSED = 3  # the exit code of a complete run that misses a bar
_GRACE_S = 20.0  # a section looks at the clock only between measurements


def main() -> None:
    """Run the chosen sections; or, in a process started for it, one section."""
    options = _options()
    if options.rows is not None:
        _run_section(options)
        return
    place = where(_device(options), options.commit)
    print("  ".join(f"{name}: {value}" for name, value in place.items()), flush=True)
    sections = earlier(options.out, place)
    for name in options.only:
        sections[name] = _measure(name, options)
        save(options.out, place, sections)
        print(f"\n{name}: {sections[name]['status']}, {sections[name]['seconds']:.0f} s", flush=True)
        print(table([Row(*row) for row in sections[name]["rows"]]), flush=True)
        print("\n".join(sections[name]["bars"]), flush=True)
    if any(sections[name]["status"] != "complete" for name in options.only):
        sys.exit(1)
    if not all(line.startswith(f"bar {Outcome.REACHED}:") for name in options.only for line in sections[name]["bars"]):
        sys.exit(_MISSED)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What graphs are worth on a GPU.")
    parser.add_argument("--only", nargs="+", choices=list(_SECTIONS), default=list(_SECTIONS), metavar="SECTION")
    parser.add_argument("--quick", action="store_true", help="small models and few turns: to see that it works")
    parser.add_argument("--device", default="cuda", help="cpu, cuda or another type of torch's (default %(default)s)")
    parser.add_argument("--import", dest="plugin", metavar="MODULE", help="import it first: it registers the device")
    parser.add_argument("--trace", type=Path, help="batch sizes from this file (default: a generated trace)")
    parser.add_argument(
        "--no-compile",
        nargs="*",
        choices=list(_SECTIONS),
        metavar="SECTION",
        help="leave torch.compile out of these sections; of all, if none is named",
    )
    parser.add_argument("--limit", type=float, help="seconds for each section (default: by section)")
    parser.add_argument("--commit", help="what to write as the commit where there is no repository")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.no_compile = list(_SECTIONS) if options.no_compile == [] else options.no_compile or []
    return options


def _device(options: argparse.Namespace) -> torch.device:
    if options.plugin is not None:
        importlib.import_module(options.plugin)
    return torch.device("cpu") if options.device == "cpu" else torch.device(options.device, 0)


def _measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One section in a process of its own: its title, how it ended, its seconds, rows and bars."""
    options.out.mkdir(parents=True, exist_ok=True)
    rows = options.out / f"gpu-{name}.rows"
    rows.unlink(missing_ok=True)
    alone, compiling = _LIMITS_S[name]
    limit = options.limit or alone + compiling * (name not in options.no_compile)
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", name, "--rows", str(rows), "--limit", str(limit)]
    command += ["--device", options.device]
    command += ["--import", options.plugin] if options.plugin is not None else []
    command += ["--trace", str(options.trace)] if options.trace is not None else []
    command += ["--quick"] if options.quick else []
    command += ["--no-compile"] if name in options.no_compile else []
    start = time.monotonic()
    try:
        code = subprocess.run(command, timeout=limit + _GRACE_S, check=False).returncode
        status = "complete" if code == 0 else f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        status = f"cut off after {limit + _GRACE_S:.0f} s"
    lines = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
    found = [json.loads(line) for line in lines]
    rows.unlink(missing_ok=True)
    seconds = time.monotonic() - start
    title = _SECTIONS[name].TITLE
    bars = [str(verdict) for verdict in judge(name, [Row(*row) for row in found])]
    return {"title": title, "status": status, "seconds": seconds, "rows": found, "bars": bars}


def _run_section(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    device = _device(options)
    with options.rows.open("w", encoding="utf-8", buffering=1) as file, torch.no_grad():
        bench = Bench(
            device=device,
            quick=options.quick,
            compiles=options.only[0] not in options.no_compile,
            trace=options.trace,
            deadline=time.monotonic() + options.limit,
            emit=lambda row: print(json.dumps(row), file=file),
        )
        _SECTIONS[options.only[0]].run(bench)


if __name__ == "__main__":
    main()
