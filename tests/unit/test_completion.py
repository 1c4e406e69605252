"""Completion of the command line, asked for as the shells do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ASKED = {
    "graphdispatch pl": {"plan"},
    "graphdispatch ": {"demo", "audit", "plan", "lint", "calibrate", "doctor"},
    "graphdispatch plan --max-g": {"--max-graphs"},
    "graphdispatch demo --mode FULL_": {"FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"},
    "graphdispatch doctor --": {"--help"},
}
bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
asked = pytest.mark.parametrize(("line", "offered"), ASKED.items(), ids=ASKED)


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose home is empty, and who has the command."""
    command = tmp_path / "bin" / "graphdispatch"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m graphdispatch "$@"\n')
    command.chmod(0o755)
    return os.environ | {"HOME": str(tmp_path), "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}


def printed(*command: str, **environment: str) -> str:
    """What a command prints that succeeds."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@bash
def test_it_is_installed_for_bash(home: dict[str, str]) -> None:
    """``--install-completion`` finds the shell, and writes a file that bash reads when it starts."""
    told = printed("bash", "-c", "graphdispatch --install-completion; true", **home)
    assert "bash completion installed in" in told
    words = "COMP_WORDS=(graphdispatch pl) COMP_CWORD=1"
    tab = f'. ~/.bashrc; {words}; _graphdispatch_completion graphdispatch; echo "${{COMPREPLY[@]}}"'
    assert printed("bash", "-c", tab, **home) == "plan\n"
    assert "-F _graphdispatch_completion" in printed("bash", "-c", ". ~/.bashrc; complete -p graphdispatch", **home)


@asked
def test_bash_is_answered(line: str, offered: set[str], home: dict[str, str]) -> None:
    """Commands, options and values, a line for each."""
    at = str(len(line.split(" ")) - 1)
    asks = {"COMP_WORDS": line, "COMP_CWORD": at, "_GRAPHDISPATCH_COMPLETE": "complete_bash"}
    assert {*printed("graphdispatch", **home, **asks).split()} == offered


@asked
def test_zsh_is_answered(line: str, offered: set[str], home: dict[str, str]) -> None:
    """The same, as arguments of ``_arguments``, with a sentence for commands and options."""
    asks = {"_TYPER_COMPLETE_ARGS": line, "_GRAPHDISPATCH_COMPLETE": "complete_zsh"}
    told = printed("graphdispatch", **home, **asks)
    assert told.startswith("_arguments '*: :((")
    assert {entry.split('"')[1] for entry in told.removeprefix("_arguments '*: :((").splitlines()} == offered
    script = printed("graphdispatch", **home, _GRAPHDISPATCH_COMPLETE="source_zsh")
    assert "compdef _graphdispatch_completion graphdispatch" in script


def test_no_answer_loads_torch() -> None:
    """Neither completion nor help waits for it."""
    code = "import sys; from graphdispatch.cli.app import build_app; build_app(); print('torch' in sys.modules)"
    assert printed(sys.executable, "-c", code, **os.environ) == "False\n"
