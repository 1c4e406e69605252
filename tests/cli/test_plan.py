"""``graphdispatch plan``; how it chooses is tested where planning is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphdispatch.plan import CostModel, Plan, Workload, plan_sizes

MODEL = """
import torch

def build():
    return torch.nn.Linear(4, 2).requires_grad_(False), {"input": torch.randn(4, 4)}
"""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps of 3 and 7 tokens in turn, then of 5 and 7, in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "steps.csv"
    path.write_text("num_tokens\n" + "3\n7\n" * 50 + "5\n7\n" * 50)
    return path


def test_a_plan_is_printed_judged_and_saved(trace: Path, run: Callable[..., Any]) -> None:
    """It is of all steps; one of the first half is judged on the second, as are vLLM's sizes."""
    code, out, _ = run("plan", trace, "--max-graphs", 2, "--memory", "1GiB", "--output", "plan.json")
    seen, judged = (workload := Workload.from_trace(trace)).split()
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


def test_measured_costs_are_printed_and_saved(trace: Path, run: Callable[..., Any]) -> None:
    """A line for each size that was measured, and a file that --cost takes."""
    (trace.parent / "measured.py").write_text(MODEL)
    words = ["--max-size", 2, "--measure", "measured:build", "--save-cost", "cost.json"]
    code, out, err = run("plan", trace, *words)
    assert code == 0, err
    assert [line.split()[:2] for line in out.splitlines()[:2]] == [["1", "rows"], ["2", "rows"]]
    assert list(CostModel.load("cost.json").eager_ms) == [1, 2]
    assert run("plan", trace, "--max-size", 2, "--cost", "cost.json").code == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nowhere.csv"], "nowhere.csv cannot be read"),
        (["steps.csv", "--cost", "nowhere.json"], "nowhere.json cannot be read"),
        (["steps.csv", "--memory", "1KiB"], "memory"),
        (["steps.csv", "--mode", "half"], "mode must be"),
        (["steps.csv", "--output", "nowhere/plan.json"], "--output nowhere/plan.json cannot be written: No such file"),
        (["steps.csv", "--save-cost", "cost.json"], "--save-cost needs --measure"),
        (["steps.csv", "--cost", "a", "--measure", "b:c"], "--cost and --measure contradict each other"),
        (["steps.csv", "--measure", "nowhere:build"], "--measure 'nowhere:build' cannot be loaded"),
    ],
)
def test_an_error_is_one_line_that_names_the_argument(
    words: list[str], named: str, trace: Path, run: Callable[..., Any]
) -> None:
    """Exit code 2, on stderr."""
    code, _, err = run("plan", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert named in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--memory", "2GX"], "expected a size such as 2GiB or 500MB, got '2GX'"),
        (["--max-graphs", "0"], "--max-graphs"),
        (["--capture-time", "-1"], "--capture-time"),
    ],
)
def test_an_impossible_amount_is_named(words: list[str], named: str, run: Callable[..., Any]) -> None:
    """By typer: exit code 2, on stderr."""
    code, out, err = run("plan", *words)
    assert (code, out) == (2, "")
    assert named in err
