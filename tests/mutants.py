"""Small faults in the modules where a silent mistake is a wrong answer: which ones do the tests notice?

``python -m tests.mutants`` puts faults into each module of the packages of ``TABLE``, one at a time: a comparison
turned round, a condition negated, a number off by one, ``and`` for ``or``, a statement left out, a ``return`` without
its value. Such a mutant is killed if one of the package's tests fails, crashes or hangs. Which faults are tried depends
on the text of a module alone, and another line somewhere in it changes few of them.

``mutants.json`` has what became of each: killed, or not, or a sentence that says why it is no fault. A mutant that was
killed, and lives now, is LOST, and the exit code is 1: run this before and after you merge or delete tests. ``--write``
keeps the outcome; ``--tidy`` removes what the modules no longer say, and runs nothing.

The tests are collected once, and run once as they are, which shows the statements that each of them executes. A mutant
is shown to the tests that execute its statement, the nearest and quickest first, in a fork of that process, whose
functions get its code; no file changes. Each test finds the caches of the library's functions empty, as if it ran
alone. Where a statement runs at import already, a fork imports the mutant in the module's place. Python's path is run
(``GRAPHDISPATCH_NATIVE=0``), since the native core would hide what Python does; but for ``tests/native``, which see
what is left.
"""

import argparse
import ast
import builtins
import functools
import gc
import hashlib
import importlib
import importlib.machinery
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "graphdispatch"
KNOWN = Path(__file__).with_suffix(".json")
PER_MODULE = 25
SHOWN_S = 20.0
"""A mutant is shown to tests that take so much processor time in all, so that a module takes minutes at most."""

_CAPTURE = ["tests/proof/check", "tests/proof/state", "tests/behaviour", "tests/runtime"]
TABLE: dict[str, list[str]] = {
    "proof/rows": ["tests/proof/rows", "tests/proof/check", "tests/runtime"],
    "proof/check": [*_CAPTURE, "tests/property/test_dims.py"],
    "proof/state": [
        "tests/proof/state",
        "tests/behaviour/test_python_state.py",
        *_CAPTURE,
        "tests/api/test_training.py",
        "tests/native/test_guard.py",
    ],
    "proof/watch/bytecode": [
        *("tests/proof/state/test_instructions.py", "tests/proof/state/test_made_names.py", "tests/proof/state"),
    ],
    "proof/watch/trace": [
        *("tests/behaviour/test_python_state.py", "tests/proof/state", "tests/audit/test_audit.py"),
        "tests/backends/test_compiled.py",
    ],
    "proof/watch": [
        *("tests/proof/check/test_operator_trace.py", "tests/proof/check/test_effects.py"),
        *("tests/runtime/test_memory.py", "tests/backends/test_host_reads.py", *_CAPTURE, "tests/backends"),
    ],
    "runtime": [
        "tests/runtime",
        "tests/proof/state/test_shared_state.py",
        "tests/behaviour",
        "tests/api",
        "tests/vocabulary",
        "tests/native/test_hit.py",
    ],
    "record": ["tests/runtime"],
    "engines/keys": ["tests/engines/test_key_dispatcher.py", "tests/property/test_tables.py", "tests/vocabulary"],
}
"""The packages and modules, and the tests that their mutants are shown to, the nearest first."""
_WITH_CORE = "tests/native"


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
        children = (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt))
        ahead += [child for child in children if not _says_nothing(node, child)]


def _says_nothing(parent: ast.AST, node: ast.AST) -> bool:
    """Whether a node is an annotation, or has ``zip`` compare lengths that are equal."""
    return node is getattr(parent, "annotation", None) or (isinstance(node, ast.keyword) and node.arg == "strict")


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


def _compiled(text: str | ast.Module, path: Path) -> CodeType:
    code: CodeType = compile(text, str(path), "exec", dont_inherit=True)
    return code


def mutant(path: Path, name: str) -> tuple[CodeType, int]:
    """The code of a mutant, and the number of its statement."""
    text = path.read_text()
    tree = ast.parse(text)
    edit = named_edits(text, tree)[name]
    edit.apply()
    return _compiled(ast.fix_missing_locations(tree), path), edit.statement


_SEEN = "__executed_statements__"
_Cached = type(functools.cache(lambda: None))


def _noting(path: Path, first: int) -> tuple[CodeType, int]:
    """The code of a module that notes which statement of its functions is executed, by number from ``first`` on; and
    how many statements there are."""
    tree = ast.parse(path.read_text())
    places = [(block, block[index]) for block in _blocks(tree) for index in range(len(block))]
    for number, (block, statement) in enumerate(places, first):
        if not _is_text(statement):
            block.insert(block.index(statement), ast.parse(f"{_SEEN}[{number}] = 1").body[0])
    return _compiled(ast.fix_missing_locations(tree), path), len(places)


def _versions(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The code within some code, each with what it is in another version of that."""
    yield old, new
    olds, news = ([one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new))
    for pair in zip(olds, news, strict=True) if len(olds) == len(news) else ():
        yield from _versions(*pair)


class _Trying:
    """A plug-in of pytest that tries mutants, ``wanted`` by module, with the tests that were collected.

    ``outcomes`` has whether each was killed; or the tests that it is to be shown to, where its statement runs at import
    and so has run already.
    """

    def __init__(self, wanted: Mapping[str, list[str]], out: Any) -> None:
        self.wanted, self.out = wanted, out
        self.outcomes: dict[str, dict[str, bool | list[str]]] = {name: {} for name in wanted}
        self.codes: dict[str, tuple[CodeType, int]] = {}
        count = 0
        for name in wanted:
            code, number = _noting(_path(name), count)
            self.codes[name] = code, count
            count += number
        self.seen = bytearray(count)
        setattr(builtins, _SEEN, self.seen)
        self.spent: dict[str, float] = {}
        self.executed: dict[str, list[int]] = {}
        self.failed: list[str] = []
        """The tests that fail without a fault, and so show nothing."""
        self.at_import: list[int] = []
        self.functions: dict[int, list[FunctionType]] = {}
        """The functions that there are, by the ``id`` of their code."""
        self.caches: list[Any] = []
        self.kept: list[Any] = []
        """What the caches held: torch ends the process where it comes upon an operator that is gone."""
        self.before_s = 0.0

    def _take(self) -> list[int]:
        numbers = [number for number, is_seen in enumerate(self.seen) if is_seen]
        self.seen[:] = bytes(len(self.seen))
        return numbers

    def pytest_collection_finish(self) -> None:
        self.at_import = self._take()
        for one in gc.get_objects():
            if type(one) is FunctionType:
                self.functions.setdefault(id(one.__code__), []).append(one)
            if type(one) in (FunctionType, _Cached) and "graphdispatch" in str(one.__module__):
                self.caches += [one] if "cache_clear" in dir(one) else []

    def pytest_runtest_setup(self) -> None:
        for one in self.caches:
            self.kept += getattr(one.cache_clear.__self__, "values", list)()
            one.cache_clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = report.nodeid
        spent_s, self.before_s = time.process_time() - self.before_s, time.process_time()
        self.spent[test] = self.spent.get(test, 0.0) + spent_s
        self.executed[test] = self.executed.get(test, []) + self._take()
        if report.failed:
            self.failed.append(test)

    def pytest_runtestloop(self, session: Any) -> bool:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "profile.json"

            def profile() -> bool:
                self.before_s = time.process_time()
                _passes(session, session.items, stops=False)
                file.write_text(json.dumps([self.spent, self.executed, self.failed]))
                return True

            if not _in_child(profile, float("inf")):
                raise SystemExit("the tests end the process without a fault")
            self.spent, self.executed, self.failed = json.loads(file.read_text())
        took = f"{len(self.spent)} tests in {time.monotonic() - began:.0f} s"
        print(took, *self.failed, sep="\n    fails without a fault: ", file=self.out, flush=True)
        for name, mutants in self.wanted.items():
            for one in mutants:
                self.outcomes[name][one] = self._try(session, name, one)
        return True

    def _try(self, session: Any, name: str, one: str) -> bool | list[str]:
        noting, first = self.codes[name]
        code, number = mutant(_path(name), one)
        homes = tests_of(name)
        usable = (test for test in self.spent if test not in self.failed and test.startswith(tuple(homes)))
        first_at = lambda test: next(at for at, home in enumerate(homes) if test.startswith(home))  # noqa: E731
        quickest = sorted(usable, key=lambda test: (first_at(test), self.spent[test]))
        tests = [test for test in quickest if first + number in self.executed[test]]
        plain = {id(old): as_is for old, as_is in _versions(noting, _compiled(_path(name).read_text(), _path(name)))}
        changed = ((old, new) for old, new in _versions(noting, code) if new != plain[id(old)])
        versions = [(fn, new) for old, new in changed for fn in self.functions.get(id(old), ())]
        is_late = first + number in self.at_import
        if is_late or any(fn.__code__.co_freevars != new.co_freevars for fn, new in versions):
            return _shown([*tests, *(test for test in quickest if is_late and test not in tests)], self.spent)
        tests = _shown(tests, self.spent)
        items = {item.nodeid: item for item in session.items}

        def passes() -> bool:
            for function, new in versions:
                function.__code__ = new
            return _passes(session, [items[test] for test in tests])

        return _is_killed(name, one, passes, tests, self.spent, self.out)


def _passes(session: Any, items: list[Any], *, stops: bool = True) -> bool:
    """Run tests, until one fails if that ``stops`` them; whether none has."""
    for item, after in zip(items, [*items[1:], None], strict=True):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if stops and session.testsfailed:
            return False
    return True


def _shown(tests: list[str], spent: Mapping[str, float]) -> list[str]:
    """The tests that a mutant is shown to, of these."""
    return tests[: sum(one <= SHOWN_S for one in accumulate(map(spent.__getitem__, tests))) + 1]


def _is_killed(
    name: str, one: str, passes: Callable[[], bool], tests: list[str], spent: Mapping[str, float], out: Any
) -> bool:
    """Whether a mutant is killed by tests that took so long without a fault."""
    is_killed = bool(tests) and not _in_child(passes, 60 + 10 * sum(map(spent.__getitem__, tests)))
    if not is_killed:
        print(f"    {name} lives after {len(tests)} tests: {one}", file=out, flush=True)
    return is_killed


class _Chosen:
    """A plug-in of pytest: runs these tests alone, in this order."""

    def __init__(self, tests: list[str]) -> None:
        self.places = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((one for one in items if one.nodeid in self.places), key=lambda one: self.places[one.nodeid])


def _in_child(job: Callable[[], bool], limit_s: float) -> bool:
    """What a job gives in a forked child; False if the child ends in another way, or not within the limit."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if job() else 1)
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


def _run(codes: Mapping[str, CodeType], tests: list[str], plugin: Any) -> bool:
    """Run tests with this code in the places of modules, by path; whether none fails."""
    found = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> Any:
        return codes[self.path] if self.path in codes else found(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    import pytest

    os.chdir(ROOT)
    quietly = "-x -q --no-header -p no:cacheprovider -p no:xdist -W ignore::pytest.PytestAssertRewriteWarning"
    return pytest.main([*quietly.split(), "--front-ends", "graphed", *tests], plugins=[plugin]) == 0


def try_modules(names: list[str], count: int) -> dict[str, dict[str, bool]]:
    """For each mutant of each module whether it is killed."""
    killed = {name: dict.fromkeys(chosen_names(_path(name), count), False) for name in names}
    out = os.fdopen(os.dup(1), "w")
    for has_core in (False, True):
        tests = {name: [one for one in tests_of(name) if one.startswith(_WITH_CORE) is has_core] for name in names}
        wanted = {name: [one for one in killed[name] if not killed[name][one]] for name in names if tests[name]}
        if not any(wanted.values()):
            continue
        os.environ["GRAPHDISPATCH_NATIVE"] = str(int(has_core))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "outcomes.json"

            def session(wanted: dict[str, list[str]] = wanted, tests: Any = tests, file: Path = file) -> bool:
                trying = _Trying(wanted, out)
                codes = {str(_path(name)): trying.codes[name][0] for name in wanted}
                _run(codes, list(dict.fromkeys(one for name in wanted for one in tests[name])), trying)
                file.write_text(json.dumps([trying.outcomes, trying.spent]))
                return True

            if not _in_child(session, float("inf")):
                raise SystemExit("the tests could not be run")
            outcomes, spent = json.loads(file.read_text())
        for name, found in outcomes.items():
            for one, outcome in found.items():
                if isinstance(outcome, list):
                    codes = {str(_path(name)): mutant(_path(name), one)[0]}
                    files = list(dict.fromkeys(test.partition("::")[0] for test in outcome))
                    passes = lambda c=codes, f=files, t=outcome: _run(c, f, _Chosen(t))  # noqa: E731
                    found[one] = _is_killed(name, one, passes, outcome, spent, out)
            killed[name] |= found
    return killed


def _path(name: str) -> Path:
    return SOURCE / f"{name}.py"


def tests_of(name: str) -> list[str]:
    """The tests that the mutants of a module are shown to."""
    return next(tests for home, tests in TABLE.items() if name == home or name.startswith(f"{home}/"))


def modules() -> list[str]:
    """The modules of ``TABLE``, whose functions can be changed."""
    names = (path.relative_to(SOURCE).with_suffix("").as_posix() for path in sorted(SOURCE.rglob("*.py")))
    within = (name for name in names if any(name == home or name.startswith(f"{home}/") for home in TABLE))
    return [name for name in within if chosen_names(_path(name))]


def tidied(known: dict[str, dict[str, bool | str]]) -> dict[str, dict[str, bool | str]]:
    """Without what is no longer in the modules."""
    paths = {name: _path(name) for name in known if _path(name).exists()}
    named = {name: named_edits(path.read_text(), ast.parse(path.read_text())) for name, path in paths.items()}
    return {name: {one: known[name][one] for one in known[name] if one in named[name]} for name in named}


def main() -> None:
    """Try the mutants of the modules that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="such as proof/state/guards; default: all")
    parser.add_argument("--write", action="store_true", help="keep the outcome in mutants.json")
    parser.add_argument("--tidy", action="store_true", help="remove from mutants.json what the modules no longer say")
    parser.add_argument("--count", type=int, default=PER_MODULE, help="mutants of a module; default: %(default)s")
    chosen = parser.parse_args()
    known: dict[str, dict[str, bool | str]] = json.loads(KNOWN.read_text())
    if chosen.tidy:
        KNOWN.write_text(json.dumps(tidied(known), indent=1) + "\n")
        return
    os.environ["PYTHONHASHSEED"] = "0"
    sys.path.insert(0, str(ROOT / "src"))  # the faults are put into this tree, wherever another is installed
    for heavy in ("hypothesis", "pytest", "torch._dynamo", "torch._inductor.utils"):  # once, before the forks
        importlib.import_module(heavy)
    import torch

    torch.set_num_threads(1)
    lost = []
    for name, found in try_modules(chosen.modules or modules(), chosen.count).items():
        before = known.get(name, {})
        lost += [f"{name}: LOST {one}" for one, is_killed in found.items() if before.get(one) is True and not is_killed]
        reasons = {one: text for one, text in before.items() if isinstance(text, str) and found.get(one) is False}
        print(f"{name}: {sum(found.values())} of {len(found)} killed, {len(reasons)} are no faults")
        known[name] = found | reasons
    if chosen.write:
        KNOWN.write_text(json.dumps(known, indent=1) + "\n")
    print(*lost, sep="\n")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
