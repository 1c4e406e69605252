"""Every snippet of README and docs runs, every command in them exists, and every link leads somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def blocks(language: str) -> list[Any]:
    """The fenced blocks of a language in all documents, each with an id."""
    found = []
    for path in DOCUMENTS:
        for index, code in enumerate(re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.S | re.M)):
            found.append(pytest.param(code, id=f"{path.name}-{index}"))
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
            found.append(pytest.param(path, target, id=f"{path.name}-{target}"))
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
    exec(compile(code, "<snippet>", "exec"), {"__name__": "snippet"})
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
