"""Every snippet of README and docs runs, every command in them exists, and every link leads somewhere."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import graphdispatch as gd

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix(""))


def blocks(language: str) -> list[Any]:
    """The fenced blocks of a language in all documents, each with an id."""
    found = []
    for path in DOCUMENTS:
        for index, code in enumerate(re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.S | re.M)):
            found.append(pytest.param(code, id=f"{_name(path)}-{index}"))
    return found


def commands() -> list[Any]:
    """The lines of all console blocks, and the commands of CONTRIBUTING's table."""
    lines = {line.strip() for block in blocks("console") for line in block.values[0].splitlines()}
    lines |= set(re.findall(r"^\| `(make [^`]+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.M))
    return [pytest.param(line, id=line) for line in sorted(lines) if line and not line.startswith("#")]


def links() -> list[Any]:
    """The links between documents, with the document that has them."""
    found = []
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?://)([^)]+)\)", path.read_text()):
            found.append(pytest.param(path, target, id=f"{_name(path)}-{target}"))
    return found


def headings(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_documents_have_snippets_and_commands() -> None:
    """The search for snippets did not silently find nothing."""
    assert len(blocks("python")) >= 2
    assert len(commands()) >= 8
    assert len(links()) >= 8


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_no_conflict_was_left(path: Path) -> None:
    """A document has no marks of a merge."""
    assert not re.search(r"^(<<<<<<<|>>>>>>>|=======$)", path.read_text(), re.M)


@pytest.mark.parametrize(("path", "target"), links())
def test_link_leads_somewhere(path: Path, target: str) -> None:
    """A link between documents names a file, and a heading of it where it says one."""
    name, _, anchor = target.partition("#")
    linked = path.parent / name if name else path
    assert linked.is_file()
    assert not anchor or anchor in headings(linked)


def test_the_reference_has_every_public_name() -> None:
    """Each stands on one of its pages, once, as the object that it is."""
    homes = gd._HOME_OF | {"PrometheusCollector": "metrics", "OpenTelemetryMetrics": "metrics"}
    pages = [path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")]
    shown = [name for page in pages for name in re.findall(r"^::: (graphdispatch\.\S+)$", page, re.M)]
    assert sorted(shown) == sorted(f"graphdispatch.{home}.{name}" for name, home in homes.items())


def test_every_page_is_in_the_navigation() -> None:
    """The site shows all documents, each once."""
    shown = re.findall(r"^ .*: ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    docs = ROOT / "docs"
    assert sorted(shown) == sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))


def test_pictures_are_drawn_from_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each SVG file is what ``docs/pictures/draw.py`` draws."""
    folder = ROOT / "docs" / "pictures"
    monkeypatch.syspath_prepend(str(folder))
    draw = importlib.import_module("draw")
    drawn = {f"{one.__name__}.svg": draw.svg(one) for one in draw.PICTURES}
    assert drawn == {path.name: path.read_text() for path in folder.glob("*.svg")}


def test_figures_are_those_of_the_committed_results() -> None:
    """``python -m benchmarks.document`` changes nothing; it finds its tables, and would put a wrong figure right."""
    from benchmarks.document import DOCUMENT, written

    text = DOCUMENT.read_text()
    assert written(text) == text
    assert text.count("<!-- table: ") == text.count("<!-- end -->") == 3
    assert written(text.replace("| MLP, inference, 8 | 1.38", "| MLP, inference, 8 | 9.99")) == text


@pytest.mark.parametrize("code", blocks("python"))
def test_python_snippet_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A snippet runs as it stands, and prints what its comments promise after ``print``."""
    try:
        exec(compile(code, "<snippet>", "exec"), {"__name__": "snippet"})
    except ImportError as error:
        if "; install graphdispatch[" not in str(error):
            raise
        pytest.skip(str(error))
    printed = capsys.readouterr().out
    for promise in re.findall(r"print\(.*\)\s+# (.+)", code):
        assert promise.removesuffix("...").strip(" ;") in printed


@pytest.mark.parametrize("line", commands())
def test_command_exists(line: str) -> None:
    """A ``make`` target is in the Makefile; a ``graphdispatch`` command runs; nothing else is told to the reader."""
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets
        return
    assert words[0].endswith("graphdispatch")
    run = [sys.executable, "-c", "from graphdispatch.cli.app import main; raise SystemExit(main())", *words[1:]]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
