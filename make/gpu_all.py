"""Everything that only a GPU can show, in one run: tests, the runtime's rules, benchmarks. Run by ``make gpu-all``.

    python make/gpu_all.py --out FOLDER [--parts NAME ...] [--seconds SECONDS] [--scale FACTOR] [--commit NAME]

The parts run one after another, the most important first, each with a time limit of its own and all together with one.
What they print goes to ``log.txt`` in the folder, and ``summary.txt`` gets a line as each one ends, so that a run that
is cut off shows most. A part of the benchmarks ends with its bars. A table ends the whole. The exit code is 0 only if
every part ran to its end, every test passed and every bar was reached.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:benchmark", "-ra", "--durations=5")
# What needs no device, or starts processes of its own, is left out here.
GPU_ALONE = ("tests/gpu", *(f"--ignore=tests/gpu/test_{name}.py" for name in ("unseen_kernels", "benchmarks", "bars")))
CONFORMANCE = "tests/backends/test_conformance.py"
ANY_DEVICE = (
    "tests/property/test_piecewise.py",
    "tests/property/test_sequences.py",
    "tests/behaviour/test_surroundings.py",
    "tests/behaviour/test_footguns_rows.py",
    "tests/behaviour/test_footguns_breaks.py",
    "tests/behaviour/test_footguns_dims.py",
    *("--front-ends", "graphed", "-k", "not pickle and not fork"),
)
GRACE_S = 30.0
"""What a part of the benchmarks may take beyond its own limit: to start, and until it looks at the clock again."""
LEAST_S = 20.0
"""A part does not begin with less time than this."""


class Part(NamedTuple):
    """One command: its limit in seconds, what it needs in the environment, and whether it ends with bars."""

    limit_s: float
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    has_bars: bool = False


class Ended(NamedTuple):
    """How a part ended: its exit code (None if it was cut off or never began), seconds, bars and last line."""

    name: str
    code: int | None
    seconds: float
    bars: tuple[str, ...]
    last: str


def bench(section: str, limit_s: float, *more: str) -> Part:
    """A section of the benchmarks."""
    return Part(limit_s + GRACE_S, (sys.executable, "-m", "benchmarks.gpu", "--only", section, *more), has_bars=True)


PARTS = {
    "generate": bench("generate", 130),
    "decode": bench("decode", 100, "--no-compile"),
    "compiled": bench("compiled", 45),
    "capture": bench("capture", 45, "--no-compile"),
    "overhead": bench("overhead", 40),
    "copies": bench("copies", 30, "--no-compile"),
    # Alone, since some of them measure the device's memory.
    "tests": Part(90, (*PYTEST, *GPU_ALONE)),
    "parallel": Part(100, (*PYTEST, "-n", "6", CONFORMANCE, "tests/gpu/test_unseen_kernels.py")),
    # Alone, too: what another process takes of the device's memory would count as that of a graph.
    "soak": Part(90, (*PYTEST, "tests/soak"), (("GRAPHDISPATCH_TEST_DEVICE", "cuda"),)),
    "rules": Part(60, ("tests/gpu/runtime/run.sh", sys.executable, "build/rules")),
    "anywhere": Part(120, (*PYTEST, "-n", "8", *ANY_DEVICE), (("GRAPHDISPATCH_TEST_DEVICE", "cuda"),)),
    "fields": bench("fields", 35, "--no-compile"),
    "adaptive": bench("adaptive", 40, "--no-compile"),
}
BY_NAME = ("anywhere", "fields", "adaptive")
"""Parts that run only where they are named, so that the others find the time."""


def main() -> None:
    """Run the parts, and say at the end which of them passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=[*PARTS],
        metavar="NAME",
        help=f"{', '.join(PARTS)}; without it, all but {', '.join(BY_NAME)}",
    )
    parser.set_defaults(parts=[name for name in PARTS if name not in BY_NAME])
    parser.add_argument("--seconds", type=float, default=540.0, help="for all parts together (default %(default)g)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the time limits of the parts")
    parser.add_argument("--commit", default="unknown", help="what the figures are of")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline, ended = time.monotonic() + options.seconds, []
    for name in options.parts:
        limit_s = allotted(PARTS[name].limit_s * options.scale, deadline - time.monotonic())
        done = Ended(name, None, 0.0, (), "") if limit_s is None else run(name, limit_s, options)
        ended.append(done)
        tell(options.out, "\n".join([line(done), *("  " + bar for bar in done.bars)]))
    tell(options.out, table(ended))
    sys.exit(exit_code(ended))


def allotted(limit_s: float, left_s: float) -> float | None:
    """The seconds of a part: its limit, or what is left; None where that is too little to begin."""
    return min(limit_s, left_s) if left_s >= min(limit_s, LEAST_S) else None


def command_of(part: Part, limit_s: float, out: Path, commit: str) -> list[str]:
    """The command of a part that may take so many seconds. Benchmarks end by themselves before that."""
    if not part.has_bars:
        return [*part.command]
    own_s = max(1.0, limit_s - GRACE_S)
    return [*part.command, "--limit", f"{own_s:.0f}", "--out", str(out), "--commit", commit]


def run(name: str, limit_s: float, options: argparse.Namespace) -> Ended:
    """Run one part, and end it and all that it has started at its limit."""
    part, log, start = PARTS[name], options.out / "log.txt", time.monotonic()
    command = command_of(part, limit_s, options.out, options.commit)
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **dict(part.environment), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with log.open("ab") as file:
        file.write(f"\n==== {name}: {' '.join(command)}\n".encode())
        file.flush()
        begin, code = file.tell(), within(command, limit_s, environment, file.fileno())
    with log.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").splitlines()
    return ended_with(name, code, time.monotonic() - start, lines)


def within(command: Sequence[str], limit_s: float, environment: dict[str, str], file: int) -> int | None:
    """The exit code of a command; None if it takes longer, and then it is ended with all its processes."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended_with(name: str, code: int | None, seconds: float, lines: Sequence[str]) -> Ended:
    """How a part ended that printed these lines."""
    bars = tuple(text for text in lines if text.startswith("bar ")) if PARTS[name].has_bars else ()
    last = next((text.strip() for text in reversed(lines) if text.strip()), "")
    return Ended(name, code, seconds, bars, last[:200])


def passed(part: Ended) -> bool:
    """Whether a part ran to its end without a failure, and, if it has bars, named them and reached them all."""
    return part.code == 0 and bool(part.bars) == PARTS[part.name].has_bars and reached(part) == len(part.bars)


def reached(part: Ended) -> int:
    """How many of its bars a part reached."""
    return sum(bar.startswith("bar reached:") for bar in part.bars)


def result(part: Ended) -> str:
    """How a part ended, in a few words."""
    if part.code is None:
        return "cut off" if part.seconds else "not begun: no time"
    if passed(part):
        return "passed"
    if PARTS[part.name].has_bars and not part.bars:
        return f"failed with {part.code}, without a word on its bars"
    return "bars missed" if part.code in (0, 3) and part.bars else f"failed with {part.code}"


def line(part: Ended) -> str:
    """A part in one line."""
    tail = f": {part.last}" if part.last and not part.bars else ""
    return f"{part.name}: {result(part)} after {part.seconds:.0f} s{tail}"


def table(ended: Sequence[Ended]) -> str:
    """All parts as a Markdown table, and a sentence on the whole."""
    rows = [("part", "result", "seconds", "bars reached"), ("---", "---", "---:", "---:")]
    for part in ended:
        bars = f"{reached(part)} of {len(part.bars)}" if part.bars else ""
        rows.append((part.name, result(part), f"{part.seconds:.0f}", bars))
    good = sum(map(passed, ended))
    whole = "Every part passed." if good == len(ended) else f"{len(ended) - good} of {len(ended)} parts did not pass."
    return "\n".join(["", *(f"| {' | '.join(row)} |" for row in rows), "", whole])


def exit_code(ended: Sequence[Ended]) -> int:
    """0 if something ran and every part passed, else 1."""
    return 0 if ended and all(map(passed, ended)) else 1


def tell(out: Path, text: str) -> None:
    """Print, and put into the summary."""
    print(text, flush=True)
    with (out / "summary.txt").open("a", encoding="utf-8") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    main()
