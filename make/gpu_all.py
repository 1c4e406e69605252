"""Everything that only a GPU can show, in one run: tests, the runtime's rules, benchmarks. Run by ``make gpu-all``.

    python make/gpu_all.py --out FOLDER [--parts NAME ...] [--scale FACTOR] [--commit NAME]

The parts run one after another, the most important first, each with a time limit of its own. What they print goes to
``log.txt`` in the folder, and ``summary.txt`` gets a line as each one ends, so that a run that is cut off shows most.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:benchmark", "-ra", "--durations=5")
GPU_ALONE = ("tests/gpu", "--ignore", "tests/gpu/test_unseen_kernels.py", "--ignore", "tests/gpu/test_benchmarks.py")
CONFORMANCE = ("tests/backends/test_conformance_capture.py", "tests/backends/test_conformance_device.py")
ANY_DEVICE = (
    "tests/property/test_piecewise.py",
    "tests/property/test_sequences.py",
    "tests/behaviour/test_surroundings.py",
    "tests/behaviour/test_footguns_rows.py",
    "tests/behaviour/test_footguns_breaks.py",
    "tests/behaviour/test_footguns_dims.py",
    *("--front-ends", "graphed", "-k", "not pickle and not fork"),
)


class Part(NamedTuple):
    """One command: its limit in seconds, and what it needs in the environment."""

    limit_s: float
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


def bench(section: str, limit_s: float, *more: str) -> Part:
    """A section of the benchmarks."""
    command = (sys.executable, "-m", "benchmarks.gpu", "--only", section, "--limit", f"{limit_s:.0f}", *more)
    return Part(limit_s + 30, command)


PARTS = {
    # Alone, since some of them measure the device's memory.
    "tests": Part(90, (*PYTEST, *GPU_ALONE)),
    "rules": Part(60, ("tests/gpu/runtime/run.sh", sys.executable, "build/rules")),
    "parallel": Part(100, (*PYTEST, "-n", "6", *CONFORMANCE, "tests/gpu/test_unseen_kernels.py")),
    "anywhere": Part(120, (*PYTEST, "-n", "8", *ANY_DEVICE), (("GRAPHDISPATCH_TEST_DEVICE", "cuda"),)),
    # Alone, too: what another process takes of the device's memory would count as that of a graph.
    "soak": Part(90, (*PYTEST, "tests/soak"), (("GRAPHDISPATCH_TEST_DEVICE", "cuda"),)),
    "overhead": bench("overhead", 90),
    "decode": bench("decode", 130, "--no-compile"),
    "capture": bench("capture", 45, "--no-compile"),
    "generate": bench("generate", 60, "--no-compile"),
    "fields": bench("fields", 35, "--no-compile"),
    "adaptive": bench("adaptive", 40, "--no-compile"),
}


def main() -> None:
    """Run the parts, and say at the end whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS], metavar="NAME")
    parser.add_argument("--scale", type=float, default=1.0, help="of the time limits")
    parser.add_argument("--commit", default="unknown", help="what the figures are of")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    passed = [run(name, options) for name in options.parts]
    sys.exit(not all(passed))


def run(name: str, options: argparse.Namespace) -> bool:
    """Run one part; whether it passed."""
    part, log, start = PARTS[name], options.out / "log.txt", time.monotonic()
    command = [*part.command]
    if "benchmarks.gpu" in command:
        command += ["--out", str(options.out), "--commit", options.commit]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **dict(part.environment), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with log.open("ab") as file:
        file.write(f"\n==== {name}: {' '.join(command)}\n".encode())
        file.flush()
        limit_s, begin = part.limit_s * options.scale, file.tell()
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            )
            code, ended = done.returncode, "passed" if done.returncode == 0 else f"failed with {done.returncode}"
        except subprocess.TimeoutExpired:
            code, ended = 1, "cut off"
    with log.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "")
    line = f"{name}: {ended} after {time.monotonic() - start:.0f} s: {last.strip()[:200]}"
    print(line, flush=True)
    with (options.out / "summary.txt").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    return code == 0


if __name__ == "__main__":
    main()
