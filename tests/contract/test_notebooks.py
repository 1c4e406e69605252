"""The notebooks of the documentation run, and show what they show."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .notebooks import NOTEBOOKS, executed


def test_there_are_notebooks() -> None:
    """The search for them did not silently find nothing."""
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_does(path: Path) -> None:
    """Its outputs are those of a run now, but for times; ``python -m tests.contract.notebooks`` writes them anew."""
    shown, now = json.loads(path.read_text()), executed(path)
    assert without_times(now) == without_times(shown)
    assert "text/html" in json.dumps(now)


def without_times(notebook: dict[str, Any]) -> str:
    """The notebook as JSON, without the times in its tables."""
    return re.sub(r">[\d.]+ m?s<", "><", json.dumps(notebook))
