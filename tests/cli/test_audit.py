"""``graphdispatch audit``; what it finds is tested where the audit is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_the_exit_code_says_whether_graphs_can_hold_the_model(folder: Path, run: Callable[..., Any]) -> None:
    """0 and the sizes that were captured, or 1 and why not."""
    code, out, _ = run("audit", "audited:fine", "--sizes", "2,4")
    assert code == 0
    assert "capturable: FULL graphs of 2, 4 rows" in out
    code, out, _ = run("audit", "audited:unsafe", "--mode", "piecewise")
    assert code == 1
    assert "NOT capturable" in out
