"""What all commands share."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ..helpers import run_python


@pytest.mark.parametrize("words", [["nosuch"], ["demo", "--bogus"]])
def test_what_does_not_exist_is_named(words: list[str], run: Callable[..., Any]) -> None:
    """An unknown command or option ends with code 2, its name on stderr, and nothing on stdout."""
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert words[-1] in err


def test_without_a_command_help_is_shown(run: Callable[..., Any]) -> None:
    """Whoever types the bare name learns the commands, and a script sees that nothing was done."""
    code, out, err = run()
    assert code == 2
    assert all(command in out + err for command in ("demo", "doctor", "audit", "plan"))


def test_the_package_runs_as_a_module() -> None:
    """``python -m graphdispatch`` is the command line, too."""
    done = subprocess.run([sys.executable, "-m", "graphdispatch", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("graphdispatch ")


def test_a_missing_extra_is_one_line(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install."""
    for command in ("audit", "demo", "plan"):
        monkeypatch.delitem(sys.modules, f"graphdispatch.cli.{command}", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    code, _, err = run("demo")
    assert (code, err.count("\n")) == (2, 1)
    assert "pip install 'graphdispatch[cli]'" in err


def test_help_needs_no_torch() -> None:
    """Help and the completion of a shell come without the seconds that torch takes to load."""
    code = """
import contextlib, sys; from graphdispatch.cli.app import main
with contextlib.suppress(SystemExit): main(['plan', '--help'])
raise SystemExit('torch' in sys.modules)
"""
    run_python("-c", code)
