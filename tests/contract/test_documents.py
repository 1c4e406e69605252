"""Every snippet of README and docs runs, as do the notebooks; make targets in them exist, links lead somewhere;
pictures are drawn from what is committed."""

import importlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix(""))


def blocks(language: str) -> list[Any]:
    """The fenced blocks of a language in all documents, each with an id."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.S | re.M)
    found = ((path, *block) for path in DOCUMENTS for block in enumerate(fence.findall(path.read_text())))
    return [pytest.param(code, id=f"{_name(path)}-{index}") for path, index, code in found]


def lines_of_code() -> list[Any]:
    """The lines of fenced blocks, with an id for each document."""
    fence = re.compile(r"^```\w[^\n]*\n(.*?)^```", re.S | re.M)
    found = [(path, "".join(fence.findall(path.read_text())).splitlines()) for path in DOCUMENTS]
    return [pytest.param(lines, id=_name(path)) for path, lines in found if lines]


def targets() -> list[str]:
    """The make targets that documents name."""
    return sorted({name for path in DOCUMENTS for name in re.findall(r"`make ([a-z-]+)`", path.read_text())})


def links() -> list[Any]:
    """The links between documents, with the document that has them."""
    link = re.compile(r"\]\((?!https?://)([^)]+)\)")
    found = ((path, target) for path in DOCUMENTS for target in link.findall(path.read_text()))
    return [pytest.param(path, target, id=f"{_name(path)}-{target}") for path, target in found]


def paths() -> set[str]:
    """The files and folders that documents name; those of dated notes may be gone."""
    texts = "".join(path.read_text() for path in DOCUMENTS if path.parent.name != "design")
    return set(re.findall(r"`([\w./-]+(?:/|\.(?:py|cpp|h|md|json|mk|sh|toml)))`", texts))


def headings(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_documents_have_snippets_and_links() -> None:
    """The search did not silently find nothing."""
    assert len(blocks("python")) >= 2
    assert "demo" in targets()
    assert NOTEBOOKS
    assert len(links()) >= 8


@pytest.mark.parametrize(("path", "target"), links())
def test_link_leads_somewhere(path: Path, target: str) -> None:
    """A link between documents names a file, and a heading of it where it says one."""
    name, _, anchor = target.partition("#")
    linked = path.parent / name if name else path
    assert linked.is_file()
    assert not anchor or anchor in headings(linked)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_snippet_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A snippet runs as it stands, and prints what its comments promise after ``print``."""
    try:
        exec(compile(code, "<snippet>", "exec"), {"__name__": "snippet"})
    except ImportError as error:
        if "; pip install '.[" not in str(error):
            raise
        pytest.skip(str(error))
    printed = capsys.readouterr().out
    for promise in re.findall(r"print\(.*\)\s+# (.+)", code):
        assert promise.removesuffix("...").strip(" ;") in printed


@pytest.mark.parametrize("lines", lines_of_code())
def test_code_is_seen_whole(lines: list[str]) -> None:
    """The site shows 88 columns of a block of code; what is behind them has to be scrolled to."""
    assert [line for line in lines if len(line) > 88] == []


def test_named_files_are_there() -> None:
    """Where documents name a file or a folder, by its path from wherever the text speaks of, the repository has it."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    there = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not there:
        pytest.skip("not in a git checkout")
    assert len(paths()) > 60
    assert [name for name in sorted(paths()) if not any(f"/{name}" in f"/{path}" for path in there)] == []


def footguns() -> list[str]:
    """The tests that the tables of limits and footguns name in their last column."""
    tables = (ROOT / "docs" / name for name in ("limits.md", "footguns.md"))
    return sorted({name for path in tables for name in re.findall(r"^\|.*\| `(\w+)` \|$", path.read_text(), re.M)})


def test_each_footgun_has_its_test() -> None:
    """It is a test of that name in ``tests/behaviour``, or a case."""
    written = "".join(path.read_text() for path in (ROOT / "tests" / "behaviour").glob("*.py"))
    names = {*re.findall(r"^def (?:test_)?(\w+)", written, re.M), *re.findall(r"\"(\w+)[\":]", written)}
    assert len(footguns()) > 100
    assert [name for name in footguns() if name not in names] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=_name)
def test_notebook_runs(path: Path) -> None:
    """Its cells, in order, in one namespace."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    exec(compile("\n".join("".join(cell["source"]) for cell in cells), path.name, "exec"), {"__name__": "notebook"})


@pytest.mark.parametrize("target", targets())
def test_make_target_exists(target: str) -> None:
    """It is in the Makefile, or among the rarer jobs."""
    rules = "".join((ROOT / name).read_text() for name in ("Makefile", "make/jobs.mk"))
    assert re.search(rf"^{target}:", rules, re.M)


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
