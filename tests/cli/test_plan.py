"""``graphdispatch plan``; how it chooses is tested where planning is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphdispatch.plan import CostModel, Plan, Workload, plan_sizes


def test_a_plan_is_printed_judged_and_saved(folder: Path, run: Callable[..., Any]) -> None:
    """It is of all steps; one of the first half is judged on the second, as are vLLM's sizes."""
    code, out, _ = run("plan", "steps.csv", "--max-graphs", 2, "--memory", "1GiB", "--output", "plan.json")
    seen, judged = (workload := Workload.from_trace("steps.csv")).split()
    limits: dict[str, Any] = {"max_graphs": 2, "memory": 2**30, "max_size": 7}
    assert code == 0
    assert Plan.load("plan.json") == plan_sizes(workload, **limits)
    assert f"on the second\n{plan_sizes(seen, **limits).evaluate(judged)}\n" in out
    assert f"vLLM's sizes, on the same steps\n{Plan.from_sizes('vllm', 7).evaluate(judged)}\n" in out


def test_without_a_trace_the_demo_s_is_planned(run: Callable[..., Any]) -> None:
    """So that the command can be tried at once; the largest step of the generated trace has 128 tokens."""
    code, out, _ = run("plan", "--max-graphs", 4)
    assert code == 0
    assert "2000 steps" in out
    assert "up to 128" in out


def test_one_step_is_judged_on_itself(tmp_path: Path, run: Callable[..., Any]) -> None:
    """There is nothing to hold out."""
    (tmp_path / "one.csv").write_text("num_tokens\n3\n")
    code, out, _ = run("plan", tmp_path / "one.csv")
    assert code == 0
    assert "planned for these steps, on the same" in out


def test_measured_costs_are_printed_and_saved(folder: Path, run: Callable[..., Any]) -> None:
    """A line for each size that was measured, and a file that --cost takes."""
    words = ["--max-size", 2, "--measure", "audited:fine", "--save-cost", "cost.json"]
    code, out, err = run("plan", "steps.csv", *words)
    assert code == 0, err
    assert [line.split()[:2] for line in out.splitlines()[:2]] == [["1", "rows"], ["2", "rows"]]
    assert list(CostModel.load("cost.json").eager_ms) == [1, 2]
    assert run("plan", "steps.csv", "--max-size", 2, "--cost", "cost.json").code == 0
