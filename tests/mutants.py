"""Small faults in the modules where a silent mistake is a wrong answer: which ones do the tests notice?

``python -m tests.mutants`` puts faults into each module of ``TABLE``, one at a time: a comparison turned round, a
condition negated, a number off by one, ``and`` for ``or``, a statement left out, a ``return`` without its value. Such a
mutant is killed if one of the module's tests fails, crashes or hangs. Which faults are tried depends on the text of a
module alone, and another line somewhere in it changes few of them. A mutant that ``mutants.json`` has as killed, and
that lives now, is LOST, and the exit code is 1: run this before and after you merge or delete tests. ``--write`` keeps
the outcome in ``mutants.json``; ``--tidy`` removes what the modules no longer say, and runs nothing.

The module's tests run once as they are, which shows the statements that each of them executes. A mutant is shown to
the tests that execute its statement, the quickest first. A process imports torch once and forks for each mutant, which
takes the place of the module as it is imported: no file changes. Python's path is run (``GRAPHDISPATCH_NATIVE=0``): the
native core would hide what Python does.
"""

import argparse
import ast
import builtins
import hashlib
import importlib
import importlib.machinery
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KNOWN = Path(__file__).with_suffix(".json")
PER_MODULE = 25
LIMIT_S = 240.0
"""The tests of one module take less."""
SHOWN_S = 20.0
"""A mutant is shown to tests that take so long in all, so that a module takes ten minutes at most."""

_ROWS = [f"tests/proof/rows/test_{part}.py" for part in ("run", "programs", "slots", "op_samples")]
_CHECK = ["tests/proof/check", "tests/behaviour/test_guarantees.py"]
_STATE = ["tests/behaviour/test_python_state.py", "tests/proof/state"]
_FOOTGUNS = "tests/behaviour/test_footguns_{}.py"
TABLE: dict[str, list[str]] = {
    **dict.fromkeys(
        [f"proof/rows/{name}" for name in ("batches", "calls", "creation", "elementwise", "experts", "functions")],
        _ROWS,
    ),
    **dict.fromkeys(
        [f"proof/rows/{name}" for name in ("labels", "places", "products", "rules", "run", "views")], _ROWS
    ),
    "proof/rows/custom": ["tests/proof/rows/test_custom.py"],
    "proof/rows/scripts": _ROWS,
    "proof/rows/verdict": [*_ROWS, "tests/runtime/test_branches_by_size.py", "tests/runtime/test_dims.py"],
    **dict.fromkeys([f"proof/check/{name}" for name in ("compare", "failures", "gain")], _CHECK),
    "proof/check/attempt": [*_CHECK, _FOOTGUNS.format("state"), "tests/runtime/test_dims.py"],
    "proof/check/eager_run": [*_CHECK, _FOOTGUNS.format("state"), _FOOTGUNS.format("ambient")],
    "proof/check/lengths": ["tests/runtime/test_dims.py", _FOOTGUNS.format("dims"), "tests/property/test_dims.py"],
    "proof/check/licence": [
        *(*_CHECK, "tests/runtime/test_argument_metadata.py", "tests/runtime/test_branches_by_size.py"),
        *(_FOOTGUNS.format("arguments"), _FOOTGUNS.format("dims"), "tests/runtime/test_dims.py"),
        *("tests/runtime/test_batches_in_parts.py", "tests/engines/test_dispatcher.py"),
    ],
    "proof/check/make_entry": [*_CHECK, "tests/runtime/test_outputs.py", "tests/runtime/test_dims.py"],
    "proof/check/piecewise": ["tests/proof/check/test_piecewise.py", "tests/proof/check/test_breaks.py"],
    "proof/check/pipeline": [*_CHECK, "tests/runtime/test_dims.py"],
    "proof/check/recording": [*_CHECK, _FOOTGUNS.format("breaks"), _FOOTGUNS.format("outputs")],
    "proof/check/row_proof": [*_CHECK, "tests/runtime/test_branches_by_size.py", "tests/runtime/test_dims.py"],
    **{
        f"proof/state/{name}": [*_STATE, _FOOTGUNS.format("state")]
        for name in ("guards", "objects", "reads", "snapshot", "walk")
    },
    "proof/watch/bytecode": ["tests/proof/check", *_STATE],
    "proof/watch/effects": [*_CHECK, "tests/backends", _FOOTGUNS.format("state")],
    "proof/watch/operator_trace": [*_CHECK, "tests/runtime/test_branches_by_size.py"],
    "proof/watch/trace": [*_STATE, "tests/proof/check/test_tracing.py", _FOOTGUNS.format("state")],
    "record": ["tests/runtime/test_plain_capturer.py"],
    "runtime/cache": [f"tests/runtime/test_{part}.py" for part in ("graph_cache", "memory", "capture_share")],
    "runtime/decide": ["tests/runtime", "tests/vocabulary"],
    "runtime/entry": ["tests/runtime", _FOOTGUNS.format("outputs")],
    "runtime/outputs": [
        *("tests/runtime", _FOOTGUNS.format("outputs")),
        "tests/behaviour/test_surroundings.py::test_static_outputs_stay_where_they_are",
    ],
    "runtime/parts": ["tests/runtime/test_batches_in_parts.py"],
    "runtime/replay": ["tests/runtime", "tests/behaviour/test_faults_backend.py", "tests/behaviour/test_guarantees.py"],
    "runtime/rules": ["tests/runtime", _FOOTGUNS.format("rows"), "tests/api"],
    "runtime/server": ["tests/runtime", "tests/behaviour/test_guarantees.py", "tests/api"],
    "runtime/signature": ["tests/runtime", "tests/api", _FOOTGUNS.format("arguments"), _FOOTGUNS.format("ambient")],
    "runtime/static_inputs": ["tests/runtime", "tests/property/test_dims.py"],
    "engines/keys": ["tests/engines/test_key_dispatcher.py", "tests/property/test_tables.py"],
}
"""The modules, and the tests that each one's mutants are shown to."""


class Edit(NamedTuple):
    """What can be changed in a module: its kind, its line, the number of its statement, and the change itself."""

    kind: str
    line: int
    statement: int
    apply: Callable[[], None]


_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OTHER: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks of statements inside functions."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        if getattr(function, "is_walked", False):
            continue
        for node in ast.walk(function):
            node.is_walked = True  # type: ignore[attr-defined]
            for name in ("body", "orelse", "finalbody"):
                if isinstance(block := getattr(node, name, None), list):
                    yield block


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _of_statement(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement that are of no statement within it."""
    ahead: list[ast.AST] = [statement]
    while ahead:
        node = ahead.pop()
        yield node
        ahead += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def edits(tree: ast.Module) -> list[Edit]:
    """What can be changed in the functions of a module, in the order of its lines."""
    found: list[Edit] = []
    places = [(block, index) for block in _blocks(tree) for index in range(len(block))]
    for number, (block, index) in enumerate(places):
        statement = block[index]
        if isinstance(statement, ast.Expr | ast.AugAssign) and not _is_text(statement):
            leave_out = lambda b=block, i=index: b.__setitem__(i, ast.Pass())  # noqa: E731
            found.append(Edit("left out", statement.lineno, number, leave_out))
        for node in _of_statement(statement):
            change = _change(node)
            if change is not None:
                found.append(Edit(change[0], node.lineno, number, change[1]))  # type: ignore[attr-defined]
    return sorted(found, key=lambda edit: (edit.line, edit.kind))


def _change(node: ast.AST) -> tuple[str, Callable[[], None]] | None:
    """The kind of change that a node allows, and the change."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPPOSITE:
        return "compare", lambda: node.ops.__setitem__(0, _OPPOSITE[type(node.ops[0])]())
    if isinstance(node, ast.BoolOp):
        swap = ast.Or if isinstance(node.op, ast.And) else ast.And
        return "boolean", lambda: setattr(node, "op", swap())
    if isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
        return "operator", lambda: setattr(node, "op", _OTHER[type(node.op)]())
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return "condition", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return "number", lambda: setattr(node, "value", node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return "flag", lambda: setattr(node, "value", not node.value)
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        return "return", lambda: setattr(node, "value", ast.Constant(None))
    return None


def named_edits(text: str, tree: ast.Module) -> dict[str, Edit]:
    """The edits of a module, by a name that has the text of the line."""
    lines, named = text.splitlines(), {}
    for edit in edits(tree):
        name, same = f"{edit.kind}: {lines[edit.line - 1].strip()}", 1
        while (full := f"{name} #{same}" if same > 1 else name) in named:
            same += 1
        named[full] = edit
    return named


def chosen_names(path: Path, count: int = PER_MODULE) -> list[str]:
    """The names of the mutants that are tried of a module."""
    text = path.read_text()
    named = named_edits(text, ast.parse(text))
    drawn = sorted(named, key=lambda name: hashlib.sha256(f"{path.name} {name}".encode()).digest())[:count]
    return [name for name in named if name in drawn]


def mutant(path: Path, name: str) -> tuple[Any, int]:
    """The code of a mutant, and the number of its statement."""
    text = path.read_text()
    tree = ast.parse(text)
    edit = named_edits(text, tree)[name]
    edit.apply()
    return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True), edit.statement


_SEEN = "__executed_statements__"


def _noting(path: Path) -> Any:
    """The code of a module that notes which statement of its functions is executed, by number, in a builtin."""
    tree = ast.parse(path.read_text())
    places = [(block, block[index]) for block in _blocks(tree) for index in range(len(block))]
    setattr(builtins, _SEEN, bytearray(len(places)))
    for number, (block, statement) in enumerate(places):
        if not _is_text(statement):
            block.insert(block.index(statement), ast.parse(f"{_SEEN}[{number}] = 1").body[0])
    return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)


class _Profile:
    """A plug-in of pytest: how long each test takes, and which statements it executes."""

    def __init__(self) -> None:
        self.seen: bytearray = getattr(builtins, _SEEN)
        self.found: dict[str, tuple[float, list[int]]] = {}
        self.at_import: list[int] = []

    def _take(self) -> list[int]:
        numbers = [number for number, is_seen in enumerate(self.seen) if is_seen]
        self.seen[:] = bytes(len(self.seen))
        return numbers

    def pytest_collection_finish(self) -> None:
        self.at_import = self._take()

    def pytest_runtest_logreport(self, report: Any) -> None:
        before, numbers = self.found.get(report.nodeid, (0.0, []))
        self.found[report.nodeid] = before + report.duration, numbers + self._take()


class _Chosen:
    """A plug-in of pytest: runs these tests alone, in this order."""

    def __init__(self, tests: list[str]) -> None:
        self.places = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((one for one in items if one.nodeid in self.places), key=lambda one: self.places[one.nodeid])


def _in_child(path: Path, code: Any, tests: list[str], plugin: Any, done: Callable[[], None], limit_s: float) -> bool:
    """In a forked child: import this code in place of the module, and run the tests until one fails. Whether all of
    them succeed, within the limit; then the child has called ``done``."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if _run(path, code, tests, plugin) == 0 and done() is None else 1)
        finally:
            os._exit(1)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return not status
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _run(path: Path, code: Any, tests: list[str], plugin: Any) -> int:
    found, target = importlib.machinery.SourceFileLoader.get_code, str(path)

    def get_code(self: Any, fullname: str) -> Any:
        return code if self.path == target else found(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    import pytest

    os.chdir(ROOT)
    quietly = "-x -q --no-header -p no:cacheprovider -p no:xdist -W ignore::pytest.PytestAssertRewriteWarning"
    return int(pytest.main([*quietly.split(), "--front-ends", "graphed", *tests], plugins=[plugin]))


def try_module(name: str, count: int) -> dict[str, bool]:
    """For each mutant of a module whether it is killed."""
    path, tests = ROOT / "src" / "graphdispatch" / f"{name}.py", TABLE[name]
    code, began = _noting(path), time.monotonic()
    profile = _Profile()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        done = lambda: file.write_text(json.dumps([profile.found, profile.at_import])) and None  # noqa: E731
        if not _in_child(path, code, tests, profile, done, LIMIT_S):
            raise SystemExit(f"{name}: its tests fail without a fault, or take more than {LIMIT_S:g} s")
        found, at_import = json.loads(file.read_text())
    print(f"{name}: {len(found)} tests in {time.monotonic() - began:.0f} s", flush=True)
    killed = {}
    for one in chosen_names(path, count):
        code, number = mutant(path, one)
        quickest = sorted(found, key=lambda test: found[test][0])
        executing = [test for test in quickest if number in found[test][1]]
        if number in at_import:
            executing += [test for test in quickest if test not in executing]
        spent = list(accumulate(found[test][0] for test in executing))
        executing = executing[: sum(one <= SHOWN_S for one in spent) + 1]
        files = list(dict.fromkeys(test.partition("::")[0] for test in executing))
        limit_s = 30 + 5 * sum(found[test][0] for test in executing)
        lives = not executing or _in_child(path, code, files, _Chosen(executing), lambda: None, limit_s)
        killed[one] = not lives
        if lives:
            print(f"    lives after {len(executing)} tests: {one}", flush=True)
    print(f"{name}: {sum(killed.values())} of {len(killed)} killed in {time.monotonic() - began:.0f} s", flush=True)
    return killed


def tidied(known: dict[str, dict[str, bool]]) -> dict[str, dict[str, bool]]:
    """Without what is no longer in the modules."""
    texts = {name: (ROOT / "src" / "graphdispatch" / f"{name}.py") for name in known if name in TABLE}
    named = {name: named_edits(path.read_text(), ast.parse(path.read_text())) for name, path in texts.items()}
    return {name: {one: known[name][one] for one in known[name] if one in named[name]} for name in named}


def main() -> None:
    """Try the mutants of the modules that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="such as proof/state/guards; default: all")
    parser.add_argument("--write", action="store_true", help="keep the outcome in mutants.json")
    parser.add_argument("--tidy", action="store_true", help="remove from mutants.json what the modules no longer say")
    parser.add_argument("--count", type=int, default=PER_MODULE, help="mutants of a module; default: %(default)s")
    chosen = parser.parse_args()
    known: dict[str, dict[str, bool]] = json.loads(KNOWN.read_text())
    if chosen.tidy:
        KNOWN.write_text(json.dumps(tidied(known), indent=1) + "\n")
        return
    os.environ["GRAPHDISPATCH_NATIVE"] = "0"
    os.environ["PYTHONHASHSEED"] = "0"
    sys.path.insert(0, str(ROOT / "src"))  # the faults are put into this tree, wherever another is installed
    for heavy in ("hypothesis", "pytest", "torch._dynamo", "torch._inductor.utils"):  # once, before the forks
        importlib.import_module(heavy)
    import torch

    torch.set_num_threads(1)
    lost = []
    for name in chosen.modules or TABLE:
        found = try_module(name, chosen.count)
        lost += [f"{name}: LOST {one}" for one, killed in found.items() if known.get(name, {}).get(one) and not killed]
        known[name] = found
        if chosen.write:
            KNOWN.write_text(json.dumps(known, indent=1) + "\n")
    print(*lost, sep="\n")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
