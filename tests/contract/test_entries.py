"""An entry that others can see is changed by its own methods alone."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from graphdispatch.engines import CUDAGraphEntry

ROOT = Path(__file__).parents[2]
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
