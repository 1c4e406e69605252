"""The command line: one clear line for every mistake, and exit codes that a script can use."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from graphdispatch.cli.app import main
from graphdispatch.demo import run

SMALL = ["demo", "--steps", "12", "--device", "cpu"]


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command that must exit with 2."""
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("graphdispatch: error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", "0"], "--steps"),
        (["--steps", "many"], "--steps"),
        (["--seed", "-1"], "--seed"),
        (["--preset", "huge"], "'tiny', 'small', '1b'"),
        (["--device", "tpu"], "--device"),
        (["--max-size", "0"], "--max-size"),
        (["--mode", "half"], "'full', 'piecewise'"),
        (["--trace", "/none.csv"], "/none.csv cannot be read"),
        (["--json", "/none/figures.json"], "--json /none/figures.json cannot be written"),
        (["--bogus"], "--bogus"),
    ],
)
def test_a_bad_value_is_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the option or what it may be; nothing is run."""
    assert named in fails(["demo", *arguments], capsys)


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """So is a command that is not there."""
    assert "nosuch" in fails(["nosuch"], capsys)


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever types the bare name learns the commands, and a script sees that nothing was done."""
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "demo" in captured.out + captured.err


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the name and a version, and succeeds."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("graphdispatch ")


def test_the_package_runs_as_a_module() -> None:
    """``python -m graphdispatch`` is the same command line."""
    done = subprocess.run([sys.executable, "-m", "graphdispatch", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("graphdispatch ")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without typer, the line says what to install."""
    monkeypatch.setitem(sys.modules, "typer", None)
    assert "pip install 'graphdispatch[cli]'" in fails(["demo"], capsys)


def test_the_demo_succeeds_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose outputs agree exits with 0, shows its verdict and writes JSON."""
    figures = tmp_path / "figures.json"
    assert main([*SMALL, "--json", str(figures)]) == 0
    assert "all 12 steps agree with eager" in capsys.readouterr().out
    written = json.loads(figures.read_text())
    assert (written["steps"], written["differing_steps"], written["device"]) == (12, 0, "cpu")


def test_a_difference_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose outputs differ beyond the tolerance says so and exits with 1."""
    monkeypatch.setattr(run, "_TOLERANCES", dict.fromkeys(run._TOLERANCES, -1.0))
    assert main(SMALL) == 1
    assert "WRONG: 12 of 12 steps differ" in capsys.readouterr().out


def test_a_trace_file_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--trace runs the steps of the file and no others."""
    trace = tmp_path / "t.csv"
    trace.write_text("num_tokens,num_reqs,max_query_len,max_seq_len,uniform_decode,num_prefill_reqs\n5,1,5,5,0,1\n")
    assert main(["demo", "--trace", str(trace), "--device", "cpu"]) == 0
    assert "1 (0 / 1)" in capsys.readouterr().out


def test_the_largest_size_is_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--max-size is the size of the largest graph, and larger steps run eagerly."""
    figures = tmp_path / "figures.json"
    assert main([*SMALL, "--max-size", "4", "--json", str(figures)]) == 0
    assert "raise max_size" in capsys.readouterr().out
    assert json.loads(figures.read_text())["largest_size"] == 4


@pytest.mark.parametrize("mode", ["piecewise", "FULL_AND_PIECEWISE", "none"])
def test_the_mode_is_run_and_named(mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--mode takes every mode's name in any case, and the table and the figures name it."""
    figures = tmp_path / "figures.json"
    assert main([*SMALL, "--mode", mode, "--json", str(figures)]) == 0
    assert f"in mode {mode.upper()}" in capsys.readouterr().out
    assert json.loads(figures.read_text())["mode"] == mode.upper()
