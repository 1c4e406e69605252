"""What code reads under names that it computes, beyond the cases of ``tests/behaviour/cases_names.py``."""

import builtins
import functools
import sys
import types
from typing import Any

import pytest
import torch
from tests.helpers import batch, check_rows, make

from ...behaviour.cases import Box

KEY = "".join(["sca", "le"])


def test_names_that_stand_in_the_code_are_compared_alone() -> None:
    """Builtins under their own names, with constants, and accessors of classes: other attributes end no graph."""

    class Plain(Box):
        __reduce__ = object.__reduce__
        __setattr__ = object.__setattr__

    held = Plain(scale=2.0, other=1.0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(held, "scale") * hasattr(held, "scale")  # noqa: B009

    step = make(fn)
    assert check_rows(step, *[4] * 5)[-1].is_graph
    for other in range(3):
        held.other = other
        assert check_rows(step, 4)[-1].is_graph


def test_variables_that_a_computed_name_makes_are_taken_back() -> None:
    """A capture ahead leaves the module as it was, also where it had no such variable."""
    module = types.ModuleType("user_settings")
    module.__file__ = __file__
    fn = types.FunctionType(sets_new.__code__, {"settings": module, "KEY": KEY, "__name__": __name__, **ENTRIES})
    make(fn).prewarm(batch(4))
    assert not hasattr(module, KEY)
    check_rows(make(fn), *[4] * 3)
    assert getattr(module, KEY) == 4


def sets_new(x: torch.Tensor) -> torch.Tensor:
    """Runs in a namespace of its own."""
    setattr(settings, KEY, len(x))  # type: ignore[name-defined]  # noqa: F821
    return x * 2


ENTRIES = {"__builtins__": builtins, "__file__": __file__}


def test_an_import_within_the_call_reads_no_whole_objects() -> None:
    """The names that it takes stand in the code."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        from json import decoder  # as models import what is optional

        return x * (2 if decoder else 3)

    step = make(fn, dynamic={"x": 0}, sizes=(4,))
    for _ in range(3):
        step(torch.ones(4, 3))
    assert not step.entries[0].guard.notes.reads_whole


def test_a_function_wrapped_within_the_call_reads_no_whole_objects() -> None:
    """What it takes over from the other function is named by whoever uses it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        @functools.wraps(FACTOR.scale)
        def scale(given: torch.Tensor) -> torch.Tensor:
            return FACTOR.scale(given) * scale.by

        return scale(x)

    step = make(fn, dynamic={"x": 0}, sizes=(4,))
    for _ in range(3):
        step(torch.ones(4, 3))
    assert not step.entries[0].guard.notes.reads_whole
    FACTOR.scale.by = 3.0
    assert step(torch.ones(4, 3)).tolist() == fn(torch.ones(4, 3)).tolist()
    FACTOR.scale.by = 2.0


class Factor:
    """Something with a function that carries a number."""

    @staticmethod
    def scale(given: torch.Tensor) -> torch.Tensor:
        return given + 1


FACTOR = Factor()
Factor.scale.by = 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "is_served"), [("KINDS[0].name", True), ("'.'.join(['torch'])", False)])
def test_code_may_look_whether_a_module_is_loaded(name: str, is_served: bool) -> None:
    """Of a name that an attribute holds, as einops does, whatever else somebody imports."""
    variables: dict[str, Any] = {"sys": sys, "KINDS": [types.SimpleNamespace(name="torch")]}
    text = f"def fn(x):\n    return x * (2 if {name} in sys.modules else 3)"
    exec(text, variables)
    step = make(variables["fn"], dynamic={"x": 0}, sizes=(4,))
    check_rows(step, 4, 4, 4)
    assert bool(step.stats.hits) is is_served
