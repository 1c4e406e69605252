"""The notebooks of the documentation run, and show what they show."""

import json
from pathlib import Path

import pytest

from .notebooks import NOTEBOOKS, executed


def test_there_are_notebooks() -> None:
    """The search for them did not silently find nothing."""
    assert len(NOTEBOOKS) == 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_does(path: Path) -> None:
    """Its outputs are those of a run now; ``python -m tests.contract.notebooks`` writes them anew."""
    shown = json.loads(path.read_text())
    assert executed(path) == shown
