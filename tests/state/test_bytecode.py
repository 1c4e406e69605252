"""What the code of a function reads: names of attributes, variables, modules, or whole objects."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphdispatch.state.bytecode import code_reads

SETTINGS = torch


def _chain(self: Any, x: Any) -> Any:
    return x * self.config.inner.scale


def _branch(a: Any, b: Any, flag: bool) -> Any:
    config = a if flag else b
    return config.scale


def _called(get: Any) -> Any:
    return get().mean


def _of_global(x: Any) -> Any:
    return x * SETTINGS.scale


def _written(self: Any, x: Any) -> None:
    self.last = x
    self.stats.latest = x


def _counted(self: Any) -> None:
    self.calls += 1


def _by_name(self: Any) -> Any:
    return getattr(self.parts[0], "scale") + getattr(self, "gain", 1.0)  # noqa: B009


def _matched(value: Any) -> Any:
    match value:
        case complex(real=found):
            return found
    return None


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (_chain, {"config", "inner", "scale"}),
        (_branch, {"scale"}),
        (_called, {"mean"}),
        (_of_global, {"scale"}),
        (_written, {"last", "stats", "latest"}),
        (_counted, {"calls"}),
        (_by_name, {"parts", "scale", "gain"}),
        (_matched, {"real"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_names_of_attributes(fn: Callable[..., Any], names: set[str]) -> None:
    """Whatever they are read of; one that is only written is not read. Text in a docstring is no name."""
    found = code_reads(fn.__code__)
    assert found.attributes == names
    assert not found.whole
    assert not found.whole_self


def _nested(self: Any, x: Any) -> Any:
    return [(lambda y: y * self.gain)(x) for _ in range(2)]


def test_code_within_code_is_read_when_it_runs() -> None:
    """A lambda has its own code object, and a trace meets that, too."""
    assert "gain" not in code_reads(_nested.__code__).attributes


def _imports_here(x: Any) -> Any:
    from settings import factor  # type: ignore[import-not-found]

    return x * factor + importlib.import_module("other.settings").scale


def test_names_of_variables_and_modules() -> None:
    """Globals, imports inside the function, and text that may be the name of a module."""
    assert code_reads(_of_global.__code__).variables == {"SETTINGS"}
    found = code_reads(_imports_here.__code__)
    assert found.imports == {"settings"}
    assert "other.settings" in found.texts
    assert {"factor", "scale"} <= found.attributes


def _all_of_self(self: Any) -> Any:
    return vars(self)


def _dict_of_self(self: Any, name: str) -> Any:
    return self.__dict__[name]


def _any_name(self: Any, name: str) -> Any:
    return getattr(self, name)


def _of_a_part(self: Any, name: str) -> Any:
    return getattr(self.config, name)


def _of_another(self: Any, other: Any) -> Any:
    return dir(other)


@pytest.mark.parametrize(
    ("fn", "whole", "whole_self"),
    [
        (_all_of_self, False, True),
        (_dict_of_self, False, True),
        (_any_name, False, True),
        (_of_a_part, True, False),
        (_of_another, True, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_attributes_that_are_not_spelled(fn: Callable[..., Any], whole: bool, whole_self: bool) -> None:
    """Code that computes names reads all of the object, or of any object if it is not its first parameter."""
    found = code_reads(fn.__code__)
    assert (found.whole, found.whole_self) == (whole, whole_self)
