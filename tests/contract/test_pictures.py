"""The pictures of the documents: drawn from what is committed."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(FOLDER.glob("*.svg"))


@pytest.fixture(autouse=True)
def _drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts that draw can be imported."""
    monkeypatch.syspath_prepend(str(FOLDER))


def test_pictures_are_those_that_are_drawn() -> None:
    """Each file but the terminal's, whose times are a run's, is what its script makes of the committed results."""
    draw, chart = importlib.import_module("draw"), importlib.import_module("chart")
    made = {one.__name__: draw.svg(one) for one in draw.PICTURES} | {
        name: one() for name, one in chart.PICTURES.items()
    }
    assert {path.stem for path in PICTURES} == {*made, "demo"}
    assert {name: (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == text for name, text in made.items()} == (
        dict.fromkeys(made, True)
    )


@pytest.mark.parametrize(("document", "table"), [("README.md", "gpu_table"), ("docs/performance.md", "cpu_table")])
def test_tables_are_those_of_the_results(document: str, table: str) -> None:
    """Each row of the tables that the script prints stands in its document as the committed results have it."""
    rows = getattr(importlib.import_module("chart"), table)().splitlines()
    text = (ROOT / document).read_text(encoding="utf-8")
    assert [row for row in rows if row not in text] == []
    assert len(rows) >= 5


def test_the_range_that_readme_names_is_that_of_the_results() -> None:
    """The slowest and the fastest of the models of published sizes on a CPU."""
    rows = importlib.import_module("chart").cases("models", "models").items()
    first, *_, last = sorted((row["base_us"] / row["us"], name.partition(",")[0]) for name, row in rows)
    said = f"five models of published sizes run {first[0]:.2f} ({first[1]}) to {last[0]:.2f} times ({last[1]})"
    assert said in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert len(rows) == 5
