"""The GPU benchmarks run: each section on the CPU backend, small, without ``torch.compile``."""

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the source distribution")

from benchmarks.gpu import adaptive, capture, decode, fields, generate, overhead
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.report import earlier, save, where


@pytest.mark.parametrize("section", [overhead, decode, capture, fields, generate, adaptive], ids=lambda s: s.__name__)
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
    result = {"title": "t", "status": "complete", "seconds": 1.0, "rows": json.loads(json.dumps(rows))}
    save(tmp_path, where(cpu, "none"), {"section": result})
    assert earlier(tmp_path, where(cpu, "none")) == {"section": result}
    assert earlier(tmp_path, where(cpu, "another commit")) == {}
    assert all(f"| {row.case} | {row.side} |" in (tmp_path / "gpu.md").read_text() for row in rows)
