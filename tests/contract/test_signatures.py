"""The signatures that engines call by position and by name: parameters may be added behind, never moved or renamed."""

import inspect
from abc import ABC
from collections.abc import Callable, Hashable
from enum import Enum, IntEnum
from typing import Any

import pytest

import graphdispatch as gd

from .described import ATTRIBUTES, PROPERTIES, SIGNATURES
from .test_names import SEEDS

REQUIRED = inspect.Parameter.empty


def described(parameters: str) -> list[inspect.Parameter]:
    """The parameters of a described signature."""
    made: Callable[..., Any] = eval(f"lambda {parameters}: None", vars(gd) | {"CUDAGraphMode": gd.CUDAGraphMode})
    return list(inspect.signature(made).parameters.values())


def found(name: str) -> list[inspect.Parameter]:
    """The parameters of the library's own, without ``self``."""
    owner, _, member = name.partition(".")
    made = getattr(gd, owner)
    if not member:
        return list(inspect.signature(made).parameters.values())
    attribute = getattr(made, member)
    parameters = list(inspect.signature(attribute).parameters.values())
    return parameters if inspect.ismethod(attribute) else parameters[1:]  # a class method is bound


def test_all_of_the_description_is_checked() -> None:
    """66 signatures and 9 properties, of 26 names."""
    assert (len(SIGNATURES), len(PROPERTIES), len(SEEDS)) == (66, 9, 26)


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_keep_name_place_and_default(name: str) -> None:
    """What comes after them has a default, is keyword-only, or takes what is left over."""
    wanted, parameters = described(SIGNATURES[name]), found(name)
    named = [one for one in wanted if one.kind is not one.VAR_KEYWORD]
    for expected, one in zip(named, parameters, strict=False):
        assert (one.name, one.kind) == (expected.name, expected.kind)
        assert expected.default is REQUIRED or one.default == expected.default
    assert len(parameters) >= len(wanted)
    assert all(one.default is not REQUIRED or one.kind >= one.VAR_POSITIONAL for one in parameters[len(named) :])
    if len(named) < len(wanted):
        assert parameters[-1].kind is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_is_read_without_parentheses(name: str) -> None:
    """On the class, or set when an object is made."""
    owner, _, member = name.partition(".")
    kind = getattr(gd, owner)
    if not isinstance(inspect.getattr_static(kind, member, None), property):
        made = kind(print) if owner == "CudagraphDispatcher" else kind()
        assert not callable(getattr(made, member))


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_members_are_there(owner: str) -> None:
    """On the class, as a field, or on a fresh instance."""
    kind = getattr(gd, owner)
    fields = {*getattr(kind, "__dataclass_fields__", ()), *getattr(kind, "model_fields", ())}
    missing = {name for name in ATTRIBUTES[owner].split() if not hasattr(kind, name) and name not in fields}
    assert not missing or all(hasattr(kind(), name) for name in missing)


def test_streams_take_the_options_of_their_base() -> None:
    """By name, as ``**kwargs`` of the description."""
    base = inspect.signature(gd.CudagraphDispatcher).parameters
    assert base.keys() <= inspect.signature(gd.StreamDispatcher).parameters.keys()
    assert issubclass(gd.StreamDispatcher, gd.CudagraphDispatcher)


def test_kinds_of_the_vocabulary() -> None:
    """Modes are enumerations, of integers where they are compared; a policy is abstract; keys are hashable."""
    assert issubclass(gd.CUDAGraphMode, IntEnum)
    assert issubclass(gd.DispatchMode, Enum)
    assert issubclass(gd.DispatchPolicy, ABC)
    assert issubclass(gd.DispatchKey, Hashable)
    assert issubclass(gd.AdaptiveCUDAGraphWrapper, gd.CUDAGraphWrapper)
    assert {gd.DispatchKey(4, 4): 1}[gd.create_dispatch_key(4, 4)] == 1
    assert {mode.name for mode in gd.DispatchMode} == set(ATTRIBUTES["DispatchMode"].split())
    assert {mode.name for mode in gd.CUDAGraphMode} == set(ATTRIBUTES["CUDAGraphMode"].split())
    assert gd.GraphEntry is gd.CUDAGraphEntry
