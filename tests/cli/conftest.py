"""Running a command in this process."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from graphdispatch.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run ``graphdispatch`` with these words; returns its exit code and what it printed."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", [*sys.path])  # models are looked for in the current folder

    def command(*words: object) -> Outcome:
        with pytest.raises(SystemExit) as exit_:
            main([str(word) for word in words])
        return Outcome(exit_.value.code or 0, *capsys.readouterr())

    return command
