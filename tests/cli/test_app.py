"""What all commands share, ``audit`` and ``plan``; what these find is tested where audit and planning are."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphdispatch.plan import Plan, Workload, plan_sizes

from ..helpers import run_python

OF_THE_COMMANDS = [
    ("audit nowhere.model:build", "'nowhere.model:build' cannot be loaded: ModuleNotFoundError"),
    ("audit audited:nothing", "has no attribute 'nothing'; expected a function without parameters"),
    ("audit audited:failing", "ValueError: no weights"),
    ("audit audited:needs", "missing 1 required positional argument: 'size'"),
    ("audit audited:wrong", "must return a callable, the keyword arguments of one call as a dict"),
    ("audit audited:fine --mode half", "mode must be"),
    ("audit audited:fine --sizes 0", "must be an integer >= 1, got 0"),
    ("demo --preset huge", "preset must be one of tiny, small, 1b, got 'huge'"),
    ("demo --preset 1b --device cpu", "preset '1b' needs a GPU, and this would run on the CPU; choose tiny or small"),
    ("demo --device tpu", "backend 'tpu' is unknown; expected one of 'auto', 'cpu'"),
    ("plan nowhere.csv", "nowhere.csv cannot be read"),
    ("plan steps.csv --memory 1KiB", "memory"),
    ("plan steps.csv --mode half", "mode must be"),
    ("plan steps.csv --measure nowhere:build", "--measure 'nowhere:build' cannot be loaded"),
]
OF_TYPER = [
    ("nosuch", "nosuch"),
    ("demo --steps 0", "--steps"),
    ("audit audited:fine --sizes 1,x", "expected sizes such as 1,8,64, got '1,x'"),
    ("plan --memory 2GX", "expected a size such as 2GiB or 500MB, got '2GX'"),
    ("plan --max-graphs 0", "--max-graphs"),
    ("plan --capture-time -1", "--capture-time"),
]


@pytest.mark.parametrize(("words", "named"), OF_THE_COMMANDS + OF_TYPER)
def test_a_mistake_is_named(words: str, named: str, folder: Path, run: Callable[..., Any]) -> None:
    """On stderr, with exit code 2 and nothing on stdout; what the commands find themselves is one line."""
    code, out, err = run(*words.split())
    assert (code, out) == (2, "")
    assert named in err
    assert err.count("\n") == 1 or (words, named) in OF_TYPER


def test_a_plan_that_cannot_be_written_is_named(folder: Path, run: Callable[..., Any]) -> None:
    """After it was printed."""
    code, _, err = run("plan", "steps.csv", "--output", "nowhere/plan.json")
    assert (code, err.count("\n")) == (2, 1)
    assert "--output nowhere/plan.json cannot be written: No such file" in err


def test_the_exit_code_of_an_audit_says_whether_graphs_can_hold_it(folder: Path, run: Callable[..., Any]) -> None:
    """0 and the sizes that were captured, or 1 and why not."""
    code, out, _ = run("audit", "audited:fine", "--sizes", "2,4")
    assert code == 0
    assert "capturable: FULL graphs of 2, 4 rows" in out
    code, out, _ = run("audit", "audited:unsafe", "--mode", "piecewise")
    assert code == 1
    assert "NOT capturable" in out
    assert "PIECEWISE graphs" in run("audit", "audited:pieces").out
    assert "FULL graphs" in run("audit", "audited:pieces", "--mode", "full").out


def test_without_a_command_help_is_shown(run: Callable[..., Any]) -> None:
    """Whoever types the bare name learns the commands, and a script sees that nothing was done."""
    code, out, err = run()
    assert code == 2
    assert all(command in out + err for command in ("demo", "doctor", "audit", "plan"))


def test_the_package_runs_as_a_module() -> None:
    """``python -m graphdispatch`` is the command line, too."""
    assert run_python("-m", "graphdispatch", "--version").startswith("graphdispatch ")


def test_a_missing_extra_is_one_line(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install."""
    for command in ("audit", "demo", "plan"):
        monkeypatch.delitem(sys.modules, f"graphdispatch.cli.{command}", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    code, _, err = run("demo")
    assert (code, err.count("\n")) == (2, 1)
    assert "pip install '.[cli]'" in err


def test_help_needs_no_torch() -> None:
    """Help and the completion of a shell come without the seconds that torch takes to load."""
    code = """
import contextlib, sys; from graphdispatch.cli.app import main
with contextlib.suppress(SystemExit): main(['plan', '--help'])
raise SystemExit('torch' in sys.modules)
"""
    run_python("-c", code)


def test_a_plan_is_printed_judged_and_saved(folder: Path, run: Callable[..., Any]) -> None:
    """It is of all steps; one of the first half is judged on the second, as are vLLM's sizes."""
    code, out, _ = run("plan", "steps.csv", "--max-graphs", 2, "--memory", "1GiB", "--output", "plan.json")
    seen, judged = (workload := Workload.from_trace("steps.csv")).split()
    limits: dict[str, Any] = {"max_graphs": 2, "memory": 2**30, "max_size": 7}
    assert code == 0
    assert Plan.load("plan.json") == plan_sizes(workload, **limits)
    tried = plan_sizes(seen, **limits)
    assert f"on the second half\n{tried}\n{tried.evaluate(judged)}\n" in out
    named = Plan.from_sizes("vllm", 7)
    assert f"vLLM's sizes, judged on these steps\n{named}\n{named.evaluate(judged)}\n" in out


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
    assert "this plan, judged on the same steps" in out


def test_measured_costs_are_printed(folder: Path, run: Callable[..., Any]) -> None:
    """A line for each size that was measured, and whose they are."""
    code, out, err = run("plan", "steps.csv", "--max-size", 2, "--measure", "audited:fine")
    assert code == 0, err
    assert [line.split()[:2] for line in out.splitlines()[:2]] == [["1", "rows"], ["2", "rows"]]
    assert out.splitlines()[2] == "costs: those of audited:fine, measured here"
