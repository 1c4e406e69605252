"""The table of mutants is of the present text."""

import json

from .. import mutants


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
