"""``graphdispatch plan``: traffic in, capture sizes out."""

from pathlib import Path

import pytest

from graphdispatch.cli.app import main
from graphdispatch.plan import CostModel, Plan, Workload, plan_sizes


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Steps of 1 to 20 tokens, in order."""
    path = tmp_path / "trace.csv"
    path.write_text("num_tokens\n" + "".join(f"{1 + 7 * step % 20}\n" for step in range(60)))
    return path


def test_the_plan_is_the_planner_s_on_all_steps(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within the limits, and written to a file; the table judges a plan of the first half beside engines' sizes."""
    arguments = ["plan", str(trace), "--max-graphs", "5", "--memory", "2GiB", "--output", str(tmp_path / "plan.json")]
    assert main([*arguments, "--compare", "vllm,sglang"]) == 0
    plan = plan_sizes(Workload.from_trace(trace), max_graphs=5, max_size=32)
    assert Plan.load(tmp_path / "plan.json") == plan
    told = capsys.readouterr().out
    assert "judged on the other" in told
    assert all(name in told for name in ("vllm", "sglang"))
    assert str(plan) in told


def test_costs_come_from_a_file(trace: Path, tmp_path: Path) -> None:
    """As ``CostModel.save`` wrote it: with graphs that never gain, nothing is captured."""
    CostModel(eager_ms=1, full_ms=2).save(tmp_path / "cost.json")
    command = ["plan", str(trace), "--cost", str(tmp_path / "cost.json"), "--output", str(tmp_path / "plan.json")]
    assert main(command) == 0
    assert Plan.load(tmp_path / "plan.json").sizes == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none.csv"], "none.csv cannot be read"),
        (["--memory", "2 apples"], "expected a size such as 2GiB"),
        (["--memory", "1KiB"], "must leave room for a graph"),
        (["--compare", "mine"], "--compare must name capture sizes"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, with exit code 2."""
    assert main(["plan", *options]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
