"""Each law of the architecture has tests, which the page of laws names; the laws of the code that no other test can
check; and the table of mutants is of the present text."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import graphdispatch
from graphdispatch.engines import CUDAGraphEntry

from .. import mutants

ROOT = Path(__file__).resolve().parents[2]
_UNPICKLE = re.compile(r"(pickle|torch|numpy|np|marshal|shelve|joblib|dill)\.(loads?|open|Unpickler)")


def laws() -> dict[str, str]:
    """The laws of the architecture, by number."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Laws\n")[2].partition("\n## ")[0]
    return {number: title.rstrip(".,") for number, title in re.findall(r"^(\d+)\. \*\*([^*]+)\*\*", text, re.M)}


def named_tests() -> dict[tuple[str, str], list[str]]:
    """The tests that the page of laws names, by number and title of the law."""
    parts = re.split(r"^## (\d+)\. (.+)$", (ROOT / "docs" / "laws.md").read_text(), flags=re.M)[1:]
    found = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return {(number, title): re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", rows) for number, title, rows in found}


def test_each_law_has_tests() -> None:
    """The page has the laws of the architecture, and at least one test of each, which is there."""
    named = named_tests()
    assert len(named) >= 12
    assert [*named] == [*laws().items()]
    assert [law for law, tests in named.items() if not tests] == []
    for test in {test for tests in named.values() for test in tests}:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), test
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), test


def test_nothing_is_unpickled() -> None:
    """No code of the library calls what runs code of a file: plans, traces and configurations are JSON and tables."""
    used: list[tuple[Path, str]] = []
    for path in Path(graphdispatch.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                used.append((path, ast.unparse(node.func)))
            elif isinstance(node, ast.ImportFrom):
                used += [(path, f"{node.module}.{alias.name}") for alias in node.names]
    assert len(used) > 1000
    assert [one for one in used if _UNPICKLE.fullmatch(one[1])] == []


_FIELDS = {one.name for one in fields(CUDAGraphEntry)}
_NAMES = {"entry", "made", "known", "other", "one", "peer", "graph_entry"}
"""Under which the code holds entries."""
_COUNTED_BY_PLANS = {"entry.replay_count", "entry.last_used"}
"""What ``runtime/replay.py`` counts: a plan is a part of its entry, as the core is, which counts the same."""


def assignments(text: str) -> Iterator[str]:
    """The assignments to fields of entries in a module, as ``line: target``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and node.attr in _FIELDS:
            base = node.value
            name = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
            if name in _NAMES:
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_nobody_else_assigns_to_fields_of_an_entry() -> None:
    """Nowhere in the package or in the plug-in, but for the count of replays, which is its plans'."""
    homes = [ROOT / "src", *ROOT.glob("plugins/*/src")]
    found = {
        f"{path.name}:{one}" for home in homes for path in home.rglob("*.py") for one in assignments(path.read_text())
    }
    others = {
        one for one in found if one.partition(": ")[2] not in _COUNTED_BY_PLANS or not one.startswith("replay.py")
    }
    assert others == set()


def test_an_assignment_would_be_found() -> None:
    """By each of the forms that Python has for one."""
    text = "entry.state = 1\nself.entry.guard, x = 2, 3\nother.replay_count += 1\ndel made.licence\nself.state = 4\n"
    found = sorted(one.partition(": ")[2] for one in assignments(text))
    assert found == ["entry.state", "made.licence", "other.replay_count", "self.entry.guard"]


def test_the_table_names_lines_that_exist() -> None:
    """Each mutant whose outcome is noted can still be made of its module. ``python -m tests.mutants --tidy`` removes
    those that cannot; ``make mutants ARGS="MODULE --write"`` tries what has taken their place."""
    noted = json.loads(mutants.KNOWN.read_text())
    assert sum(map(len, noted.values())) > 100
    assert mutants.tidied(noted) == noted


def test_few_mutants_live() -> None:
    """Of those that are noted of a module at most two live without a reason."""
    noted = json.loads(mutants.KNOWN.read_text())
    living = {module: list(found.values()).count(False) for module, found in noted.items()}
    assert {module: count for module, count in living.items() if count > 2} == {}


def test_a_mutant_is_another_text() -> None:
    """What is tried of a module is as many different programs, none of them the module."""
    path = mutants.ROOT / "src" / "graphdispatch" / "runtime" / "decide.py"
    names = mutants.chosen_names(path)
    codes = {mutants.mutant(path, name)[0] for name in names} | {compile(path.read_text(), str(path), "exec")}
    assert len(codes) == len(names) + 1 == mutants.PER_MODULE + 1
