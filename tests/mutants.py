"""Small faults in the modules where a silent mistake is a wrong answer: which ones do the tests notice?

``python -m tests.mutants`` puts faults into each module of ``TABLE``, one at a time: a comparison turned round, a
condition negated, a number off by one, ``and`` for ``or``, a statement left out, a ``return`` without its value. Such a
mutant is killed if one of the module's tests fails, crashes or hangs. Which faults are tried depends on the text of a
module alone. A mutant that ``mutants.json`` has as killed, and that lives now, is LOST, and the exit code is 1:
run this before and after you merge or delete tests. ``--write`` commits the outcome to ``mutants.json``.

A process imports torch once and forks for each mutant, which takes the place of the module as it is imported: no
file changes. Python's path is run (``GRAPHDISPATCH_NATIVE=0``): the native core would hide what Python does.
"""

import argparse
import ast
import importlib.machinery
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["GRAPHDISPATCH_NATIVE"] = "0"
os.environ["PYTHONHASHSEED"] = "0"

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))  # the faults are put into this tree, wherever another is installed
KNOWN = Path(__file__).with_suffix(".json")
PER_MODULE = 25
LIMIT_S = 300.0
"""A run of the tests of one module takes less; a mutant that takes longer hangs."""

_FOOTGUNS = "tests/behaviour/test_footguns_{}.py"
TABLE: dict[str, list[str]] = {
    "runtime/decide": ["tests/runtime", "tests/vocabulary"],
    "engines/keys": ["tests/engines/test_key_dispatcher.py", "tests/property/test_tables.py"],
    "runtime/signature": [
        *("tests/runtime", "tests/api"),
        *(_FOOTGUNS.format("arguments"), _FOOTGUNS.format("ambient")),
    ],
    "runtime/rules": ["tests/runtime", _FOOTGUNS.format("rows"), "tests/api"],
    "runtime/static_inputs": ["tests/runtime", "tests/property/test_dims.py"],
    "runtime/outputs": [
        *("tests/runtime", _FOOTGUNS.format("outputs")),
        "tests/behaviour/test_surroundings.py::test_static_outputs_stay_where_they_are",
    ],
    "proof/check/licence": [
        *("tests/proof/check", "tests/runtime"),
        *(_FOOTGUNS.format("arguments"), _FOOTGUNS.format("dims")),
    ],
    "proof/check/compare": ["tests/proof/check", "tests/runtime"],
    "proof/watch/effects": [
        *("tests/proof/check", "tests/behaviour/test_guarantees.py", "tests/backends"),
        _FOOTGUNS.format("state"),
    ],
    "proof/state/guards": ["tests/behaviour/test_python_state.py", "tests/proof/state", _FOOTGUNS.format("state")],
    "proof/state/reads": ["tests/behaviour/test_python_state.py", "tests/proof/state"],
    **{
        f"proof/rows/{rules}": [
            f"tests/proof/rows/test_{part}.py" for part in ("programs", "places", "experts", "run", "op_samples")
        ]
        for rules in ("creation", "elementwise", "experts", "places", "products", "views")
    },
    "proof/rows/custom": ["tests/proof/rows/test_custom.py"],
    "proof/rows/verdict": ["tests/proof/rows/test_run.py", "tests/runtime/test_same_bits.py"],
    "proof/watch/operator_trace": ["tests/runtime/test_same_bits.py", "tests/proof/check/test_row_proof.py"],
    "runtime/parts": ["tests/runtime/test_parts.py"],
    "runtime/server": ["tests/runtime", "tests/behaviour/test_guarantees.py", "tests/api"],
}
"""The modules, and the tests that each one's mutants are shown to."""

Edit = Callable[[], None]

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


def _statements(tree: ast.AST) -> Iterator[tuple[list[ast.stmt], int]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield from ((block, index) for index in range(len(block)))


def edits(tree: ast.Module) -> list[tuple[str, int, Edit]]:
    """What can be changed in a module: the kind of change, its line, and the change itself."""
    found: list[tuple[str, int, Edit]] = []
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(n) for f in functions for s in f.body for n in ast.walk(s)}
    for node in ast.walk(tree):
        if id(node) not in inside:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPPOSITE:
            found.append(("compare", node.lineno, lambda n=node: n.ops.__setitem__(0, _OPPOSITE[type(n.ops[0])]())))
        elif isinstance(node, ast.BoolOp):
            swap = ast.Or if isinstance(node.op, ast.And) else ast.And
            found.append(("boolean", node.lineno, lambda n=node, s=swap: setattr(n, "op", s())))
        elif isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
            found.append(("operator", node.lineno, lambda n=node: setattr(n, "op", _OTHER[type(n.op)]())))
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            found.append(("condition", node.lineno, lambda n=node: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            found.append(("number", node.lineno, lambda n=node: setattr(n, "value", n.value + 1)))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            found.append(("flag", node.lineno, lambda n=node: setattr(n, "value", not n.value)))
        elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            found.append(("return", node.lineno, lambda n=node: setattr(n, "value", ast.Constant(None))))
    for block, index in _statements(tree):
        statement = block[index]
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if id(statement) in inside and isinstance(statement, ast.Expr | ast.AugAssign) and not is_text:
            found.append(("left out", statement.lineno, lambda b=block, i=index: b.__setitem__(i, ast.Pass())))
    return sorted(found, key=lambda edit: (edit[1], edit[0]))


def mutants(path: Path, count: int = PER_MODULE) -> list[tuple[str, Any]]:
    """A name and the code of each mutant that is tried of a module."""
    text = path.read_text()
    lines, every = text.splitlines(), edits(ast.parse(text))
    names = [f"{kind}: {lines[line - 1].strip()}" for kind, line, _ in every]
    made = []
    for index in sorted(random.Random(path.name).sample(range(len(every)), min(count, len(every)))):
        tree = ast.parse(text)
        edits(tree)[index][2]()
        code = compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
        same = names[:index].count(names[index])
        made.append((f"{names[index]} #{same + 1}" if same else names[index], code))
    return made


def _run(path: Path, code: Any, tests: list[str]) -> None:
    """In a forked child: import the mutant in place of the module, and run the tests until one fails."""
    found = importlib.machinery.SourceFileLoader.get_code
    target = str(path)

    def get_code(self: Any, fullname: str) -> Any:
        return code if self.path == target else found(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    import pytest

    os.chdir(ROOT)
    quietly = "-x -q --no-header -p no:cacheprovider -p no:xdist -W ignore::pytest.PytestAssertRewriteWarning"
    status = pytest.main([*quietly.split(), "--front-ends", "graphed", *tests])
    os._exit(0 if status == 0 else 1)


def is_killed(path: Path, code: Any, tests: list[str]) -> bool:
    """Whether one of ``tests`` fails with the mutant ``code`` of the module at ``path``, or crashes, or hangs."""
    child = os.fork()
    if not child:
        try:
            _run(path, code, tests)
        finally:
            os._exit(1)
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return bool(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def main() -> None:
    """Try the mutants of the modules that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="such as state/guards; default: all")
    parser.add_argument("--write", action="store_true", help="keep the outcome in mutants.json")
    parser.add_argument("--count", type=int, default=PER_MODULE, help="mutants of a module; default: %(default)s")
    chosen = parser.parse_args()
    known: dict[str, dict[str, bool]] = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    import hypothesis  # noqa: F401  (loaded once, before the forks)
    import torch

    torch.set_num_threads(1)
    lost = 0
    for name in chosen.modules or TABLE:
        path, tests = ROOT / "src" / "graphdispatch" / f"{name}.py", TABLE[name]
        if is_killed(path, compile(path.read_text(), str(path), "exec"), tests):
            raise SystemExit(f"{name}: its tests fail without a fault, or take more than {LIMIT_S:g} s")
        found = {mutant: is_killed(path, code, tests) for mutant, code in mutants(path, chosen.count)}
        print(f"{name}: {sum(found.values())} of {len(found)} killed", flush=True)
        for mutant in (mutant for mutant, was_killed in found.items() if not was_killed):
            is_lost = known.get(name, {}).get(mutant, False)
            lost += is_lost
            print(f"    {'LOST ' if is_lost else 'lives'} {mutant}")
        known[name] = found
        if chosen.write:
            KNOWN.write_text(json.dumps(known, indent=1) + "\n")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
