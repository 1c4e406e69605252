"""Running a command in this process."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from graphdispatch.cli import main

MODELS = """
import torch

def fine():
    return torch.nn.Linear(4, 2).eval(), {"input": torch.randn(4, 4)}

def unsafe():
    return lambda x: x * float(x.sum()), {"x": torch.ones(4)}, {"dynamic": {"x": 0}}

def pieces():
    return lambda x: x * 2, {"x": torch.ones(4)}, {"dynamic": {"x": 0}, "mode": "PIECEWISE"}

def failing():
    raise ValueError("no\\nweights")

def wrong():
    return torch.nn.Linear(4, 2)

needs = lambda size: None
"""


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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of models and a trace: steps of 3 and 7 tokens in turn, then of 5 and 7."""
    (tmp_path / "audited.py").write_text(MODELS)
    (tmp_path / "steps.csv").write_text("num_tokens\n" + "3\n7\n" * 50 + "5\n7\n" * 50)
    monkeypatch.chdir(tmp_path)
    return tmp_path
