"""The GPU benchmarks run: each section on the CPU backend, small, without ``torch.compile``."""

import json
import math
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the source distribution")

from benchmarks.gpu import adaptive, capture, compiled, copies, decode, fields, generate, overhead
from benchmarks.gpu.bars import BARS
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.report import earlier, save, where

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = (generate, decode, compiled, capture, overhead, copies, fields, adaptive)


NEEDS_MORE = (
    "reduce-overhead",
    "static cache, compiled",
    "tensordict CudaGraphModule",
    "torch.compile reduce-overhead",
    "graphed(), two launches",
)
"""Sides that only ``torch.compile`` or CUDA has."""


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.__name__)
def test_a_section_gives_figures_for_each_side(section: object, tmp_path: Path) -> None:
    """No side fails, what a side computes is what eager computes, and the report holds every row."""
    if section is generate:
        pytest.importorskip("transformers")
    rows: list[Row] = []
    cpu = torch.device("cpu")
    bench = Bench(cpu, True, False, None, math.inf, rows.append)
    section.run(bench)  # type: ignore[attr-defined]
    assert len(rows) >= 3
    assert [row for row in rows if "error" in row.figures] == []
    assert all(float(row.figures.get("difference", 0)) < 1e-4 for row in rows)
    assert all(row.figures.get("same_tokens", 1.0) == 1.0 for row in rows)
    assert all(row.figures.get("by_graphs", 1.0) == 1.0 for row in rows)
    name = section.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    for bar in BARS[name]:
        found = [row for row in rows if fnmatchcase(row.side, bar.side) and bar.figure in row.figures]
        assert found or bar.side in NEEDS_MORE, f"no row has the figure of {bar}"
    result = {"title": "t", "status": "complete", "seconds": 1.0, "rows": json.loads(json.dumps(rows)), "bars": []}
    save(tmp_path, where(cpu, "none"), {"section": result})
    assert earlier(tmp_path, where(cpu, "none")) == {"section": result}
    assert earlier(tmp_path, where(cpu, "another commit")) == {}
    assert all(f"| {row.case} | {row.side} |" in (tmp_path / "gpu.md").read_text() for row in rows)


def test_a_run_ends_with_its_bars(tmp_path: Path) -> None:
    """On its output, in its report and by its exit code: a CPU has not the peers that a bar compares a call with."""
    run = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--device", "cpu", "--no-compile", "--out", str(tmp_path)]
    done = subprocess.run([*run, "--only", "overhead"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("bar ")]
    assert any(line.startswith("bar reached: 4 inputs, 300 parameters, bare replay: host_us: ") for line in lines)
    missed = "bar not measured: 4 inputs, 300 parameters, tensordict CudaGraphModule: host_us: no row"
    assert missed in lines
    assert json.loads((tmp_path / "gpu.json").read_text())["sections"]["overhead"]["bars"] == lines
    assert f"- {missed}" in (tmp_path / "gpu.md").read_text().splitlines()
