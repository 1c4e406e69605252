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


def test_a_side_that_fails_does_not_stop_the_others() -> None:
    """Its error is its row."""
    rows: list[Row] = []
    bench = Bench(torch.device("cpu"), True, False, None, 0.0, rows.append)

    def broken() -> None:
        raise ValueError("first line\nsecond line")

    assert bench.attempt("case", "side", broken) is None
    assert rows == [Row("case", "side", {"error": "ValueError: first line"})]
    assert not bench.has_time()
    assert not bench.has_time(1.0, "next")
    assert rows[1:] == [Row("next", "all", {"left_out": "no time"})]
