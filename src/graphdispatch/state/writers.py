"""Writes back what objects held before a run: the other half of ``holders.py``, loaded if there is something to do."""

import os
import types
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from . import objects
from .holders import OF_FUNCTIONS, read_attributes
from .objects import ABSENT

__all__ = [
    "write_array",
    "write_attributes",
    "write_cell",
    "write_class",
    "write_container",
    "write_context",
    "write_environment",
    "write_form",
    "write_function",
    "write_names",
    "write_objects",
    "write_slots",
    "write_tensor",
]


def write_attributes(value: Any, before: dict[str, Any]) -> None:
    """Make these the attributes of an object."""
    table = objects.attribute_table(value)
    assert table is not None
    for name in read_attributes(value):
        del table[name]
    table.update(before)


def write_slots(slots: dict[str, Any], value: Any, before: dict[str, Any]) -> None:
    """Fill and empty the slots of an object."""
    for label, member in slots.items():
        held = before[label]
        if held is not ABSENT:
            member.__set__(value, held)
        elif objects.slot_value(member, value) is not ABSENT:
            member.__delete__(value)


def write_container(value: Any, before: list[Any]) -> None:
    """Make these the entries of a container, as ``objects.content`` gave them."""
    if issubclass(type(value), dict):
        half = len(before) // 2
        home = objects.dict_of(value)
        home.clear(value)
        for key, inner in zip(before[:half], before[half:], strict=True):
            home.__setitem__(value, key, inner)
    elif issubclass(type(value), set):
        set.clear(value)
        set.update(value, before)
    elif issubclass(type(value), list):
        list.__setitem__(value, slice(None), before)
    else:
        value.clear()
        value.extend(before)


def write_cell(cell: types.CellType, before: dict[str, Any]) -> None:
    """Assign or delete a closure's variable."""
    if before[""] is ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = before[""]


def write_names(table: dict[str, Any], before: dict[str, Any]) -> None:
    """Assign or delete variables of a module."""
    for name, value in before.items():
        if value is ABSENT:
            table.pop(name, None)
        else:
            table[name] = value


def write_context(variable: ContextVar[Any], before: dict[str, Any]) -> None:
    """Set a context variable of the running context; one that had no value keeps the one that it got."""
    if before[""] is not ABSENT:
        variable.set(before[""])


def write_environment(_: Any, before: dict[str, str]) -> None:
    """Set and unset environment variables."""
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def write_form(array: Any, before: tuple[Any, ...]) -> None:
    """Give a NumPy array its type, shape and strides back, and whether code may write to it."""
    array.shape = -1  # so that a type of any size fits
    array.dtype, array.shape, strides, is_writeable = before
    if array.strides != strides:
        array.strides = strides
    array.flags.writeable = is_writeable


def write_array(array: Any, before: bytes) -> None:
    """Copy bytes into a NumPy array."""
    np.ndarray.view(array, np.ndarray)[...] = np.frombuffer(before, dtype=array.dtype).reshape(array.shape)


def write_objects(array: np.ndarray[Any, Any], before: list[Any]) -> None:
    """Put objects back into an array of them."""
    for index, value in enumerate(before):
        array.flat[index] = value


def write_function(fn: types.FunctionType, before: dict[str, Any]) -> None:
    """Give a function its code, defaults, name and text back."""
    for name, value in zip(OF_FUNCTIONS, before.values(), strict=True):
        setattr(fn, name, value)


def write_class(kind: type, before: dict[str, Any]) -> None:
    """Make these the attributes of a class."""
    now = dict(vars(kind))
    for name in now.keys() - before.keys():
        type.__delattr__(kind, name)
    for name, value in before.items():
        if now.get(name, ABSENT) is not value:
            type.__setattr__(kind, name, value)


def write_tensor(tensor: torch.Tensor, before: dict[str, Any]) -> None:
    """Give a tensor its gradient, memory and extent back."""
    if tensor.is_leaf:
        tensor.grad = before[".grad"]
    if tensor.data.data_ptr() != before[".data"].data_ptr() or tensor.shape != before[".data"].shape:
        tensor.data = before[".data"]
    tensor.requires_grad_(before[".requires_grad"])
