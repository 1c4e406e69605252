"""The signatures that engines call by position and by name: parameters may be added behind, never moved or renamed;
and what front ends and entries do beside them."""

import gc
import inspect
import time
import weakref
from abc import ABC
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any

import pytest
import torch

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
    assert issubclass(gd.AdaptiveCUDAGraphWrapper, gd.CUDAGraphWrapper)
    assert {gd.DispatchKey(4, 4): 1}[gd.create_dispatch_key(4, 4)] == 1
    assert {mode.name for mode in gd.DispatchMode} == set(ATTRIBUTES["DispatchMode"].split())
    assert gd.GraphEntry is gd.CUDAGraphEntry


FULL = gd.CUDAGraphMode.FULL


def wrapped(**options: Any) -> gd.CUDAGraphWrapper:
    """A wrapper that has a verified graph for four tokens."""
    wrapper = gd.CUDAGraphWrapper(torch.nn.Linear(3, 3).eval(), options=gd.CUDAGraphOptions(**options))
    for _ in range(2):
        step(wrapper)
    return wrapper


def step(wrapper: gd.CUDAGraphWrapper) -> torch.Tensor:
    """One step of four tokens."""
    how: Any = {"batch_descriptor": gd.BatchDescriptor(4), "cudagraph_runtime_mode": FULL}
    return wrapper(torch.randn(4, 3), **how)  # type: ignore[no-any-return]


def test_an_entry_has_its_fields_under_both_names() -> None:
    """``descriptor`` and ``graph``, and what vLLM calls them; when it was captured, and how long that took."""
    before = time.time()
    entry = wrapped().get_entry(gd.BatchDescriptor(4))
    assert entry.batch_descriptor is entry.descriptor
    assert entry.cudagraph is entry.graph
    assert before <= entry.capture_time <= time.time()
    assert entry.capture_time_ms > 0


@pytest.mark.parametrize("weak", [True, None])
def test_an_entry_does_not_keep_its_output_alive(weak: bool | None) -> None:
    """There while the graph is there; gone after ``clear_cache`` and a collection, though the entry is still held."""
    wrapper = wrapped(weak_ref_output=weak)
    entry = wrapper.get_entry(gd.BatchDescriptor(4))
    assert entry.output.shape == (4, 3)
    output = weakref.ref(entry.output)
    wrapper.clear_cache()
    gc.collect()
    assert output() is None
    assert entry.output is None


def test_a_wrapper_has_every_attribute_of_its_runnable() -> None:
    """Private ones of a module too, through all wrappers; what neither has is an ``AttributeError``."""
    wrapper = gd.CUDAGraphWrapper(wrapped(), gd.CUDAGraphMode.PIECEWISE)
    assert isinstance(wrapper.unwrap(), torch.nn.Linear)
    assert list(wrapper._parameters) == ["weight", "bias"]
    assert wrapper.in_features == 3
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapper.nothing
    assert list(gd.graphed(torch.nn.Linear(3, 3), dynamic={"input": 0})._parameters) == ["weight", "bias"]
    with pytest.raises(AttributeError):
        _ = gd.CUDAGraphWrapper.__new__(gd.CUDAGraphWrapper)._parameters


def test_a_manager_s_entry_is_named_by_batch_size_and_sequence_length() -> None:
    """That is its key, and its descriptor tells both: requests, and tokens."""
    manager = gd.CUDAGraphManager()
    for seq_len in (7, 1):
        entry = manager.capture_graph(3, seq_len, lambda x: x * 2, {"x": (3, 5)})
        assert entry.key == (4, seq_len)
        descriptor = entry.batch_descriptor
        assert descriptor == gd.BatchDescriptor(4 * seq_len, 4, seq_len == 1)
        assert (descriptor.num_reqs, descriptor.num_tokens // 4) == entry.key
    other = manager.capture_graph(3, 7, lambda x: x * 3, {"x": (3, 5)})
    assert other.key == (4, 7)
    assert manager.num_graphs == 2
