"""The pictures of the documents: drawn from what is committed, and readable where nobody knows style sheets."""

import importlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(FOLDER.glob("*.svg"))
WIDEST = 0.6
"""The width of a letter in a wide font, in units of its size."""


@pytest.fixture(autouse=True)
def _drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts that draw can be imported."""
    monkeypatch.syspath_prepend(str(FOLDER))


def elements(path: Path, *names: str) -> list[ElementTree.Element]:
    """The elements of these names that are drawn: those in definitions are not."""
    root = ElementTree.parse(path).getroot()
    defined = {id(one) for place in root.iter() if place.tag.endswith("}defs") for one in place.iter()}
    return [one for one in root.iter() if one.tag.partition("}")[2] in names and id(one) not in defined]


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


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_needs_no_style_sheet(path: Path) -> None:
    """Whatever is drawn has plain colours of its own, and none of them is a variable."""
    drawn: list[Any] = elements(path, "rect", "path", "text", "circle")
    assert drawn
    assert [one.attrib for one in drawn if "fill" not in one.attrib] == []
    assert [one.attrib for one in drawn if any("var(" in value for value in one.attrib.values())] == []


@pytest.mark.parametrize("path", [path for path in PICTURES if path.stem not in ("demo", "gpu", "speed")], ids=str)
def test_words_fit_their_boxes(path: Path) -> None:
    """Also in a wide font."""
    boxes = [[float(box.attrib[name]) for name in ("x", "y", "width", "height")] for box in elements(path, "rect")]
    for words in elements(path, "text"):
        x, y = float(words.attrib["x"]), float(words.attrib["y"])
        around = [wide for left, top, wide, high in boxes if left < x < left + wide and top < y < top + high]
        needed = WIDEST * float(words.attrib.get("font-size", 13)) * len(words.text or "")
        assert not around or needed < min(around), words.text
