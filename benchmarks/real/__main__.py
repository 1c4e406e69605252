"""Runs the programs of ``programs.py`` beside eager, and compares every answer.

    python -m benchmarks.real                 all of them, each in a process of its own; prints a table
    python -m benchmarks.real --only timm     those whose name has this text
    python -m benchmarks.real --write         also writes the table of docs/real.md

Times are processor time of the thread, eager and served in turns, in one thread. The loop that replays graphs on the
CPU is compiled before.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from .measure import Figures, measure
from .programs import PROGRAMS
from .table import page, row_of

_PAGE = Path(__file__).parents[2] / "docs" / "real.md"


def main() -> int:
    """Measure, and return 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real")
    parser.add_argument("--only", default="", metavar="TEXT", help="programs whose name has this text")
    parser.add_argument("--calls", type=int, default=1000, help="calls of the callable with its defaults")
    parser.add_argument("--jobs", type=int, default=1, help="programs at once, which disturb each other a little")
    parser.add_argument("--write", action="store_true", help="write docs/real.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(measure(options.one, options.calls))))
        return 0
    names = [name for name in PROGRAMS if options.only.lower() in name.lower()]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda name: _in_own_process(name, options.calls), names))
    if options.write:
        _PAGE.write_text(page(found))
    return int(any(figures.wrong for figures in found))


def _in_own_process(name: str, calls: int) -> Figures:
    command = [sys.executable, "-m", "benchmarks.real", "--one", name, "--calls", str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        figures = Figures(name, failed=(done.stderr.strip().splitlines() or ["it ended without a word"])[-1])
    else:
        figures = Figures(**json.loads(lines[-1]))
    print(row_of(figures), flush=True)
    return figures


if __name__ == "__main__":
    sys.exit(main())
