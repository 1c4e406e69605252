"""``graphdispatch demo``, and the run and the trace behind it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphdispatch import Reason
from graphdispatch.demo import DemoResult, SideBySide, generate_trace


def test_both_sides_go_through_the_trace_and_a_wrong_cache_is_found() -> None:
    """Up to the largest size, each step is a replay that agrees with eager, until the graphs' cache is changed."""
    both = SideBySide(max_size=4)
    records = both.run(generate_trace(40, 6))
    result = DemoResult(tuple(next(records) for _ in range(20)), both.tolerance)
    large = sum(record.rows > 4 for record in result.records)
    assert (result.differing, result.eager_reasons) == (0, {Reason.ABOVE_LARGEST_SIZE: large})
    assert all(record.size in (1, 2, 4) for record in result.records if record.rows <= 4)
    both.graphed.unwrap().cache_values.add_(1.0)
    assert DemoResult(tuple(records), both.tolerance).differing > 0


def test_the_figures_follow_from_the_records() -> None:
    """Hit rate and padding, medians, and the groups by graph; a difference that is no number differs."""
    some = next(SideBySide(max_size=1).run(generate_trace(1, 1)))
    exact = some._replace(rows=4, size=4, reason=Reason.EXACT, eager=3e-3, graphed=1e-3, difference=1e-6)
    padded = exact._replace(rows=1, reason=Reason.PADDED, difference=float("nan"))
    large = exact._replace(rows=9, size=0, reason=Reason.ABOVE_LARGEST_SIZE, eager=8e-3, graphed=8e-3, difference=0.0)
    result = DemoResult((exact, padded, large, exact), 1e-4)
    assert (result.hit_rate, result.padding, result.differing) == (0.75, pytest.approx(3 / 9), 1)
    assert result.median_ms == pytest.approx((3.0, 1.0))
    assert {size: len(group.records) for size, group in result.by_graph().items()} == {4: 3, 0: 1}


def test_the_command_ends_with_its_verdict(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each graph, why steps ran eagerly, and the verdict; 0 if all agree."""
    code, out, _ = run("demo", "--steps", 12, "--max-size", 2, "--device", "cpu")
    assert code == 0
    assert "steps ran eagerly: the batch is larger than the largest" in out
    assert out.splitlines()[-1] == "all 12 steps agree with eager"


def test_a_difference_is_exit_code_1(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict counts the steps."""
    monkeypatch.setattr("graphdispatch.demo.run._TOLERANCES", {torch.float32: -1.0})
    code, out, _ = run("demo", "--steps", 2, "--max-size", 1, "--device", "cpu")
    assert (code, out.splitlines()[-1]) == (1, "WRONG: 2 of 2 steps differ from eager")
