"""``graphdispatch audit``; what it finds is tested where the audit is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODELS = """
import torch

def fine():
    return torch.nn.Linear(4, 2).eval(), {"input": torch.randn(4, 4)}

def unsafe():
    return lambda x: x * float(x.sum()), {"x": torch.ones(4)}, {"dynamic": {"x": 0}}

def failing():
    raise ValueError("no\\nweights")

def wrong():
    return torch.nn.Linear(4, 2)

needs = lambda size: None
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current folder."""
    (tmp_path / "audited.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)


def test_the_exit_code_says_whether_graphs_can_hold_the_model(run: Callable[..., Any]) -> None:
    """0 and the sizes that were captured, or 1 and why not."""
    code, out, _ = run("audit", "audited:fine", "--sizes", "2,4")
    assert code == 0
    assert "capturable: FULL graphs of 2, 4 rows" in out
    code, out, _ = run("audit", "audited:unsafe", "--mode", "piecewise")
    assert code == 1
    assert "NOT capturable" in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ["nowhere.model:build"],
            "'nowhere.model:build' cannot be loaded: ModuleNotFoundError: No module named 'nowhere'",
        ),
        (["audited:nothing"], "has no attribute 'nothing'; expected a function without parameters"),
        (["audited:failing"], "ValueError: no weights"),
        (["audited:needs"], "missing 1 required positional argument: 'size'"),
        (["audited:wrong"], "must return a callable, the keyword arguments of one call as a dict"),
        (["audited:fine", "--mode", "half"], "mode must be"),
        (["audited:fine", "--sizes", "0"], "must be an integer >= 1, got 0"),
    ],
)
def test_an_error_is_one_line_that_names_the_argument(words: list[str], named: str, run: Callable[..., Any]) -> None:
    """Exit code 2, and nothing on stdout."""
    code, out, err = run("audit", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert named in err


def test_sizes_that_are_no_numbers_are_named(run: Callable[..., Any]) -> None:
    """With what is expected instead."""
    code, _, err = run("audit", "audited:fine", "--sizes", "1,x")
    assert code == 2
    assert "--sizes" in err
    assert "expected sizes such as 1,8,64, got '1,x'" in err
