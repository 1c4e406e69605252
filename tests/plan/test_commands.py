"""The commands that plan, simulate and lint: what they print and write, and one line for every mistake."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphdispatch.cli.app import main
from graphdispatch.cli.options import parse_bytes, parse_seconds, parse_share
from graphdispatch.memory.admission import Admission
from graphdispatch.memory.cache import GraphCache
from graphdispatch.plan.cost import CostModel
from graphdispatch.plan.dispatcher import planned_dispatcher
from graphdispatch.plan.plan import Plan
from graphdispatch.plan.planner import plan_capture_sizes
from graphdispatch.plan.workload import Workload
from graphdispatch.simulation.simulator import simulate

RNG = np.random.default_rng(0)
REQS = RNG.integers(1, 33, 300)
TOKENS = np.where(RNG.random(300) < 0.9, REQS, REQS + 60)
STEPS = "num_tokens,num_reqs\n" + "".join(f"{t},{r}\n" for t, r in zip(TOKENS, REQS, strict=True))
REQUESTS = "arrival_ms,prompt_tokens,output_tokens\n" + "".join(f"{20 * i},{5 + i % 7},30\n" for i in range(40))
LOG = """| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
| --- | --- | --- | --- | --- |
| 3 | 4 | 1 | FULL | 5 |
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of steps."""
    return put(tmp_path, STEPS, "steps.csv")


def put(folder: Path, content: str | bytes, name: str) -> Path:
    """A file of this content."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def figures(command: str, *arguments: object, folder: Path, code: int = 0) -> Any:
    """The figures that a command writes; it must exit with ``code``."""
    path = folder / "figures.json"
    assert main([command, *map(str, arguments), "--json", str(path)]) == code
    return json.loads(path.read_text())


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line on stderr of a command that must exit with 2."""
    assert main([*map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("graphdispatch: error: ")
    return line


def test_the_plan_is_the_planner_s_on_all_steps(trace: Path, tmp_path: Path) -> None:
    """The file holds what ``plan_capture_sizes`` gives for the whole trace and the budgets of the options."""
    output = tmp_path / "plan.json"
    options = ["--max-graphs", "9", "--memory", "1GiB", "--capture-time", "2s", "--multiple-of", "2"]
    options += ["--must-include", "6, 2", "--max-size", "64", "--mode", "full_decode_only", "--output", str(output)]
    assert main(["plan", str(trace), *options]) == 0
    expected = plan_capture_sizes(
        Workload.from_trace(trace),
        max_graphs=9,
        memory=2.0**30,
        capture_time=2.0,
        multiple_of=2,
        must_include=(2, 6),
        max_size=64,
        mode=Plan.load(output).mode,
    )
    assert Plan.load(output) == expected
    assert expected.mode.name == "FULL_DECODE_ONLY"


def test_the_comparison_is_out_of_sample(trace: Path, tmp_path: Path) -> None:
    """The plan of the table is made of the first steps, and all rows are judged on the others."""
    written = figures("plan", trace, "--max-graphs", 6, "--split", 0.25, "--compare", "pow2,dense", folder=tmp_path)
    seen, unseen = Workload.from_trace(trace).split(0.25)
    rows = {row["name"]: row for row in written["comparison"]}
    assert list(rows) == ["plan", "pow2", "dense"]
    largest = 96  # the largest step is of 92 tokens
    planned = plan_capture_sizes(seen, max_graphs=6, max_size=largest)
    assert rows["plan"]["sizes"] == list(planned.sizes)
    for name, made in {"plan": planned, "pow2": Plan.from_sizes("pow2", largest)}.items():
        assert rows[name]["step_ms"] == pytest.approx(made.evaluate(unseen).step_ms)
    assert rows["dense"]["padding"] == 0.0
    assert [graph["size"] for graph in written["graphs"]] != rows["plan"]["sizes"]


def test_without_order_the_table_says_that_it_is_in_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log counts steps and has no first half."""
    assert main(["plan", str(put(tmp_path, LOG, "server.log"))]) == 0
    assert "Judged on the steps that it was planned for" in capsys.readouterr().out


def test_the_text_explains_plan_costs_and_lint(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows by name, the sizes, where the costs come from, and what the lint finds for the scheduler's limits."""
    assert main(["plan", str(trace), "--max-size", "16", "--max-num-seqs", "32", "--compare", "vllm"]) == 0
    printed = capsys.readouterr().out
    for text in ("planned on the first 50 %", "vllm", "eager", "Planned on all steps: <Plan", "costs: default"):
        assert text.lower() in printed.lower()
    assert "lint, largest_below_limit: the largest FULL graph for decode serves 16 tokens" in printed
    assert "sends up to 32" in printed


def test_several_traces_are_one_workload(trace: Path, tmp_path: Path) -> None:
    """Steps follow each other; a saved workload is a trace as well."""
    saved = tmp_path / "saved.json"
    Workload.from_trace(trace).save(saved)
    assert figures("plan", trace, saved, folder=tmp_path)["steps"] == 600


def test_requests_are_batched_within_the_limits(tmp_path: Path) -> None:
    """The scheduler model makes the steps, and its limits are the options'."""
    requests = put(tmp_path, REQUESTS, "requests.csv")
    few = figures("plan", requests, "--requests", "--max-num-seqs", 2, folder=tmp_path)
    many = figures("plan", requests, "--requests", folder=tmp_path)
    assert few["steps"] > many["steps"]


def test_without_a_trace_a_generated_one_is_planned(tmp_path: Path) -> None:
    """So that the command can be tried at once."""
    assert figures("plan", folder=tmp_path)["steps"] == 2000


def test_measured_costs_decide(trace: Path, tmp_path: Path) -> None:
    """With costs by which graphs gain nothing above 20 tokens there is no larger one."""
    cost = tmp_path / "cost.json"
    CostModel.of({1: 5.0, 400: 5.5}, {1: 1.0, 20: 1.0, 21: 9.0, 400: 9.1}).save(cost)
    sizes = [graph["size"] for graph in figures("plan", trace, "--cost", cost, folder=tmp_path)["graphs"]]
    assert max(sizes) == 20


def test_a_simulation_is_the_simulator_s(trace: Path, tmp_path: Path) -> None:
    """The same figures as ``simulate`` gives for the plan's dispatcher, a cache of that room, and admission."""
    workload, cost = Workload.from_trace(trace), CostModel.default()
    plan = plan_capture_sizes(workload, max_graphs=8)
    plan.save(tmp_path / "plan.json")
    dispatcher = planned_dispatcher(plan, max_num_reqs=workload.largest)
    ahead = figures("simulate", trace, "--plan", tmp_path / "plan.json", folder=tmp_path)
    assert ahead == {"plan": ahead["plan"], **simulate(workload, cost, dispatcher).to_dict()}
    assert ahead["plan"] == {"mode": "FULL", "sizes": list(plan.sizes)}
    options = ["--on-demand", "--max-graphs", 3, "--eviction", "lru"]
    lazy = figures("simulate", trace, "--plan", tmp_path / "plan.json", *options, folder=tmp_path)
    cache = GraphCache(3, eviction="lru")
    expected = simulate(workload, cost, dispatcher, cache=cache, admission=Admission(2)).to_dict()
    assert lazy == {"plan": ahead["plan"], **expected}
    assert lazy["stats"]["captures"] > 3


def test_a_simulation_takes_sizes_a_budget_and_a_policy(trace: Path, tmp_path: Path) -> None:
    """Sizes by number or name, vLLM's without; room in bytes; and a policy that turns away from slow graphs."""
    assert figures("simulate", trace, "--sizes", "8,32", folder=tmp_path)["plan"]["sizes"] == [8, 32]
    assert figures("simulate", trace, folder=tmp_path)["plan"]["sizes"][:4] == [1, 2, 4, 8]
    small = figures("simulate", trace, "--memory", "100MiB", folder=tmp_path)
    assert small["peak_bytes"] <= 100 * 2**20
    cost = tmp_path / "cost.json"
    CostModel.of(1.0, 9.0).save(cost)
    slow = figures("simulate", trace, "--cost", cost, "--policy", "adaptive", folder=tmp_path)
    assert slow["steps"]["NONE"] > slow["steps"]["FULL"]


def test_a_lint_exits_with_one_for_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a plan's file or of sizes; nothing found is exit code 0."""
    Plan.from_sizes((1, 8, 32, 64)).save(tmp_path / "plan.json")
    limits = ["--max-num-seqs", 32, "--max-num-batched-tokens", 32]
    (finding,) = figures("lint", tmp_path / "plan.json", *limits, folder=tmp_path, code=1)
    assert (finding["code"], finding["sizes"]) == ("unreachable_graph", [64])
    assert "lint, " in capsys.readouterr().out
    assert figures("lint", "--sizes", "1,8,32", *limits, folder=tmp_path) == []
    assert "lint: nothing found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "2GiB", 2 * 2**30),
        (parse_bytes, " 1.5 mib", 1.5 * 2**20),
        (parse_bytes, "500MB", 5e8),
        (parse_bytes, "7b", 7),
        (parse_seconds, "30s", 30),
        (parse_seconds, "250ms", 0.25),
        (parse_seconds, "2min", 120),
        (parse_share, "25%", 0.25),
        (parse_share, "0.5", 0.5),
    ],
)
def test_amounts_have_units(parse: Any, text: str, value: float) -> None:
    """In any case, with or without a space."""
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--memory", "2GX"], "--memory"),
        (["--memory", "2000"], "expected a size such as 2GiB"),
        (["--memory", "-1GiB"], "expected a size"),
        (["--memory", "nanGiB"], "expected a size"),
        (["--memory", "0GiB"], "memory must be a finite number above 0"),
        (["--capture-time", "30"], "expected a time such as 30s"),
        (["--max-padding", "much"], "expected a share such as 25%"),
        (["--memory", "1MiB"], "memory=1.04858e+06 is too small for one graph"),
        (["--capture-time", "1ms"], "capture_time=0.001 is too small for one graph"),
        (["--max-graphs", "0"], "--max-graphs"),
        (["--must-include", "1,x"], "--must-include must be sizes such as 1,2,4; got '1,x'"),
        (["--must-include", "vllm"], "--must-include must be sizes"),
        (["--must-include", "4000"], "must_include must not exceed max_size"),
        (["--compare", "vllm,nobody"], "--compare must name capture sizes"),
        (["--split", "1"], "fraction must leave steps on both sides"),
        (["--mode", "none"], "--mode"),
        (["--cost", "nowhere.json"], "nowhere.json cannot be read"),
        (["--output", "/nowhere/plan.json"], "--output /nowhere/plan.json cannot be written"),
        (["--output", "."], "--output . cannot be written: it is a folder"),
        (["--json", "same", "--output", "same"], "--output and --json must be different files"),
    ],
)
def test_a_bad_option_of_plan_is_one_line(
    arguments: list[str], named: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and the line names the option or the budget."""
    assert named in fails(capsys, "plan", trace, *arguments)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("t.csv", "", "t.csv is empty"),
        ("t.csv", "num_tokens\n", "t.csv has no rows"),
        ("t.csv", "num_tokens\n5\n-3\n", "t.csv, line 3, column num_tokens: expected an integer from 1"),
        ("t.csv", "num_tokens\n5\nmany\n", "t.csv, line 3, column num_tokens"),
        ("t.csv", "step,num_reqs\n0,1\n", "t.csv lacks the column(s) num_tokens"),
        ("t.csv", "num_tokens\n99999999999999999999\n", "t.csv, line 2, column num_tokens"),
        ("t.csv.gz", gzip.compress(STEPS.encode())[:-20], "t.csv.gz cannot be read"),
        ("t.csv", bytes(range(256)), "t.csv is neither text nor Parquet"),
        ("t.json", "[" * 100_000, "t.json is not valid at the whole"),
        ("t.json", '{"format": "graphdispatch.plan", "version": 1}', "t.json is not valid at format"),
        (
            "t.json",
            '{"format": "graphdispatch.workload", "version": 1, "steps": {"num_tokens": [1e999], "is_decode": [true]}}',
            "t.json is not valid at steps.num_tokens.0",
        ),
    ],
)
def test_a_bad_trace_is_one_line_and_nothing_is_overwritten(
    name: str, content: str | bytes, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names file, and line or field; the files of an earlier run are as they were, and no others are left."""
    path, old = put(tmp_path, content, name), put(tmp_path, "old", "plan.out")
    before = sorted(tmp_path.iterdir())
    line = fails(capsys, "plan", path, "--output", old, "--json", tmp_path / "new.out")
    assert named in line
    assert old.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sizes": [4, 1]}, "cost.json is not valid at eager_ms: Value error, expected sizes in strictly increasing"),
        ({"values": [1.0, -2.0]}, "cost.json is not valid at eager_ms.values.1"),
        ({"values": [1.0]}, "cost.json is not valid at eager_ms"),
        ({"bogus": 1}, "cost.json is not valid at eager_ms.bogus"),
    ],
)
def test_a_bad_cost_is_one_line(
    change: dict[str, Any], named: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the file and the field."""
    path = tmp_path / "cost.json"
    CostModel.of({1: 2.0, 4: 3.0}, {1: 1.0, 4: 2.0}).save(path)
    written = json.loads(path.read_text())
    written["eager_ms"] |= change
    path.write_text(json.dumps(written))
    assert named in fails(capsys, "plan", trace, "--cost", path)


def test_costs_that_fall_are_fitted_aloud(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Noise that makes a larger step cheaper is no error, and the text says how far points were moved."""
    CostModel.of({1: 9.0, 64: 9.0}, {1: 2.0, 64: 1.0}, capture_ms=1.0).save(tmp_path / "cost.json")
    assert main(["plan", str(trace), "--cost", str(tmp_path / "cost.json")]) == 0
    assert "fit moved points by up to 33.3 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["simulate", "--eviction", "lru"], "--eviction goes with --on-demand"),
        (["simulate", "--on-demand", "--eviction", "best"], "eviction must be one of"),
        (["simulate", "--plan", "p.json", "--sizes", "1,2"], "either a plan's file or --sizes"),
        (["simulate", "--plan", "p.json", "--mode", "full"], "--mode and --max-size go with --sizes"),
        (["simulate", "--plan", "p.json"], "p.json cannot be read"),
        (["simulate", "--sizes", "8,x"], "--sizes must be sizes such as 1,2,4, or one of vllm"),
        (["simulate", "--sizes", "0"], "integer >= 1"),
        (["simulate", "--requests"], "--requests needs a TRACE"),
        (["lint", "--max-num-seqs", "4", "--max-num-batched-tokens", "8"], "either a plan's file or --sizes"),
        (["lint", "--sizes", "vllm"], "--max-num-seqs"),
    ],
)
def test_a_bad_option_of_the_others_is_one_line(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As of ``plan``."""
    monkeypatch.chdir(tmp_path)
    assert named in fails(capsys, *arguments)


def test_an_unordered_workload_cannot_be_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log has no order to serve its steps in."""
    path = put(tmp_path, LOG, "server.log")
    assert "workload must have ordered steps" in fails(capsys, "simulate", path)
