"""Snapshots of what can change: read as plain data, compared without the user's code, written back.

An ``Accessor`` reads all that an object of one kind holds: as a dict by label, a list of entries, or plain data. It
writes that back, too.
"""

import operator
import pickle
import random
import re
import types
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch

from ...backends.host_reads import StandIns
from ...runtime.attributes import attribute_table, content, dict_class_of
from . import objects
from .objects import ABSENT


class Accessor(NamedTuple):
    """How to read all that an object holds, and how to write it back."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any]
    is_by_name: bool = False
    """Whether it holds attributes or variables."""


class Changes(NamedTuple):
    """What code can have changed; another thread may have changed the rest meanwhile."""

    names: Collection[str] | None = None
    """The names of the attributes and variables that it assigns; None: any."""
    containers: Collection[str] | None = None
    """If it changes containers or arrays, the names by which it comes to such; None: any."""


class Saved(NamedTuple):
    """An object that can change: where it was met, how to read and write all that it holds, what it held then."""

    path: Any
    value: Any
    accessor: Accessor
    before: Any

    def differs(self) -> bool:
        """Whether it holds other objects than before, but for equal constants, or other plain data."""
        now, before = self.accessor.read(self.value), self.before
        if type(before) is dict:
            return not (_same(before, now) and _same(before.values(), now.values()))
        return not _same(before, now) if type(before) is list else bool(now != before)

    def change(self) -> str | None:
        """How it differs from before, in words, or None. Another container that holds the same is no change."""
        if not self.differs():
            return None
        now, before = self.accessor.read(self.value), self.before
        if type(before) is list:
            now, before = labelled(self.value, now), labelled(self.value, before)
        elif type(before) is not dict:
            return " was written"
        if list(now) == list(before) and all(map(objects.equal_content, now.values(), before.values())):
            return None
        for label in (*before, *now):
            a, b = before.get(label, ABSENT), now.get(label, ABSENT)
            if not objects.equal_content(b, a):
                name = f".{label}" if issubclass(type(label), str) and label.isidentifier() else label
                return f"{name} was {'added' if a is ABSENT else 'removed' if b is ABSENT else 'rebound'}"
        return " was put in another order"

    def restore(self, names: Collection[str] | None) -> None:
        """Put back what it held; of attributes and variables those with such names."""
        held = self.before
        if self.accessor.is_by_name and names is not None:
            now = self.accessor.read(self.value)
            sources = [(name, held if name in names else now) for name in {**held, **now}]
            held = {name: source[name] for name, source in sources if name in source}
        self.accessor.write(self.value, held)


def _same(before: Collection[Any], now: Collection[Any]) -> bool:
    if len(before) == len(now) and all(map(is_, before, now)):
        return True
    return objects.same_objects([*before], [*now])


def _write_attributes(value: Any, before: dict[str, Any]) -> None:
    """Make these the class and the attributes of an object."""
    kind = before["__class__"]
    if type(value) is not kind:
        object.__setattr__(value, "__class__", kind)
    table = attribute_table(value)
    assert table is not None
    now = _read_attributes(value)
    notes = [(name, held) for name, held in table.items() if name not in now]
    table.clear()
    table.update([(name, held) for name, held in before.items() if name != "__class__"] + notes)


def _read_attributes(value: Any) -> dict[str, Any]:
    """The class of an object, and its attributes; of tensors and functions all but the notes of torch's compiler."""
    has_notes = issubclass(type(value), (torch.Tensor, types.FunctionType))
    own = objects.own_attributes(value) if has_notes else attribute_table(value)
    return {"__class__": type(value), **(own or {})}


ATTRIBUTES = Accessor(_read_attributes, _write_attributes, is_by_name=True)


Read = Callable[[Any], dict[str, Any]]


def _accessor_of_members(
    read: Read, put: Callable[[Any, str, Any], Any], drop: Callable[[Any, str], Any], *, is_by_name: bool = False
) -> Accessor:
    """Reads and writes values by label (``ABSENT`` for none), each of which is put or dropped by itself."""

    def write(value: Any, before: dict[str, Any]) -> None:
        now = read(value)
        for label in {**now, **before}:
            held = before.get(label, ABSENT)
            if held is ABSENT and now.get(label, ABSENT) is not ABSENT:
                drop(value, label)
            elif held is not now.get(label, ABSENT):
                put(value, label, held)

    return Accessor(read, write, is_by_name)


CLASS = _accessor_of_members(lambda kind: dict(vars(kind)), type.__setattr__, type.__delattr__, is_by_name=True)
CELL = _accessor_of_members(
    lambda cell: {"": objects.cell_value(cell)},
    lambda cell, _, held: setattr(cell, "cell_contents", held),
    lambda cell, _: delattr(cell, "cell_contents"),
)
CONTEXT = _accessor_of_members(
    lambda variable: {".get()": variable.get(ABSENT)},
    lambda variable, _, held: variable.set(held),
    lambda *_: None,  # one that had no value keeps the one that it got
)
PARTS = ("__code__", "__defaults__", "__kwdefaults__", "__name__", "__qualname__", "__module__", "__doc__")
"""What functions are made of that code can set anew."""
parts_of: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*PARTS)
FUNCTION = _accessor_of_members(
    lambda fn: dict(zip(PARTS, parts_of(fn), strict=True)),
    setattr,
    lambda *_: None,  # they are always there
)


def variable(table: dict[str, Any], name: str) -> Any:
    """A variable of a module; what this package puts in its place for a while is not it."""
    held = table.get(name, ABSENT)
    return StandIns.originals.get(id(held), held)


def accessor_of_variables(names: dict[str, Any]) -> Accessor:
    """Reads and writes the variables of a module under some names, of which there may be more later."""

    def read(table: dict[str, Any]) -> dict[str, Any]:
        return {name: variable(table, name) for name in names}

    return _accessor_of_members(read, dict.__setitem__, dict.__delitem__, is_by_name=True)


def accessor_of_slots(slots: dict[str, Any]) -> Accessor:
    """Reads and writes objects with slots, by the slots' descriptors."""

    def read(value: Any) -> dict[str, Any]:
        return {name: objects.slot_value(member, value) for name, member in slots.items()}

    return _accessor_of_members(
        read,
        lambda value, name, held: slots[name].__set__(value, held),
        lambda value, name: slots[name].__delete__(value),
        is_by_name=True,
    )


def _write_container(value: Any, before: list[Any]) -> None:
    """Make these the entries of a container, as ``content`` gave them."""
    if issubclass(type(value), dict):
        half = len(before) // 2
        home = dict_class_of(value)
        home.clear(value)
        for key, inner in zip(before[:half], before[half:], strict=True):
            home.__setitem__(value, key, inner)
    elif issubclass(type(value), set):
        set.clear(value)
        set.update(value, before)
    elif issubclass(type(value), list):
        list.__setitem__(value, slice(None), before)
    else:
        deque.clear(value)
        deque.extend(value, before)


ENTRIES = Accessor(content, _write_container)


def labelled(container: Any, entries: list[Any]) -> dict[str, Any]:
    """What ``content`` gave of a container, by key, index or identity."""
    if issubclass(type(container), dict):
        half = len(entries) // 2
        return dict(zip(map(_label, entries[:half]), entries[half:], strict=True))
    if issubclass(type(container), set):
        return {_label(inner): inner for inner in entries}
    return {f"[{index}]": inner for index, inner in enumerate(entries)}


def _label(key: Any) -> str:
    """A key of a container as it is written, or by identity, so that no code of the user is called."""
    return f"[{key!r}]" if type(key) in objects.CONSTANTS else f"[key {id(key)}]"


_FORM = tuple(vars(np.ndarray)[name] for name in ("dtype", "shape", "strides"))


def _read_form(array: Any) -> tuple[Any, ...]:
    """How a NumPy array takes its memory, which code may set in place."""
    return (*(member.__get__(array) for member in _FORM), array.flags.writeable)


def _write_array(array: Any, before: tuple[tuple[Any, ...], bytes]) -> None:
    """Give a NumPy array its form and numbers back, and whether code may write to it."""
    form, numbers = before
    for name, held, now in zip(("dtype", "shape", "strides"), form, _read_form(array), strict=False):
        if held != now:
            setattr(array, name, held)
    if np.ndarray.tobytes(array) != numbers:
        array.flags.writeable = True
        array[...] = np.frombuffer(numbers, dtype=array.dtype).reshape(array.shape)
    array.flags.writeable = form[-1]


def form_of(array: np.ndarray[Any, Any]) -> str:
    """How an array takes its memory, as a constant."""
    return repr(_read_form(array))


ARRAY = Accessor(lambda array: (_read_form(array), np.ndarray.tobytes(array)), _write_array)


def accessor_of_tensor(tensor: torch.Tensor) -> Accessor:
    """Reads and writes a tensor, by an alias that stands for the memory that it has now."""
    return Accessor(partial(_read_tensor, tensor.data), _write_tensor)


def _read_tensor(alias: torch.Tensor, tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor's gradient, memory and extent; ``alias`` stands for the memory that it had."""
    with torch._C.DisableTorchFunction():
        is_same = _place(tensor) == _place(alias)
        grad = tensor.grad if tensor.is_leaf else None
        return {".grad": grad, ".data": alias if is_same else tensor.data, ".requires_grad": tensor.requires_grad}


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, storage


def _write_tensor(tensor: torch.Tensor, before: dict[str, Any]) -> None:
    """Give a tensor its gradient, memory and extent back."""
    if tensor.is_leaf:
        tensor.grad = before[".grad"]
    if _place(tensor) != _place(before[".data"]):
        tensor.data = before[".data"]
    tensor.requires_grad_(before[".requires_grad"])


def _read_settings(_: Any) -> tuple[torch.dtype, bool, bool]:
    """The default dtype, and determinism, with whether it only warns."""
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), warns_only


def _write_settings(_: Any, before: tuple[torch.dtype, bool, bool]) -> None:
    """Set the default dtype and determinism."""
    dtype, *determinism = before
    torch.set_default_dtype(dtype)
    if _read_settings(None)[1:] != tuple(determinism):  # torch sets its compiler's determinism to the same
        torch.use_deterministic_algorithms(determinism[0], warn_only=determinism[1])


SETTINGS = Accessor(_read_settings, _write_settings)
"""Of the settings of the process that operators read: the default dtype, and determinism."""


def save_random(path: Any, generator: Any) -> Saved:
    """Save the state of a random generator of Python or NumPy, or of one of these modules."""
    read: Callable[[], Any]
    write: Any
    if issubclass(type(generator), (np.random.Generator, np.random.BitGenerator)):
        bits = getattr(generator, "bit_generator", generator)
        read, write = lambda: bits.state, partial(setattr, bits, "state")
    elif generator is random or issubclass(type(generator), random.Random):
        read, write = generator.getstate, generator.setstate
    else:
        read, write = generator.get_state, generator.set_state
    state = read()
    accessor = Accessor(lambda _: pickle.dumps(read()), lambda *_: write(state))
    return Saved(path, generator, accessor, pickle.dumps(state))


MEMBERS = ("_parameters", "_buffers", "_modules")
"""What a module keeps its members in."""
_MEMBER = re.compile(r"\._(?:parameters|buffers|modules)\['(\w+)'\]")
_KEY = re.compile(r"\[key \d+\]")


def path_text(path: Any) -> str:
    """The text of a path as the user would write it, with members of modules as torch names them. A path is a chain
    (path of its owner, label)."""
    labels = []
    while path:
        path, label = path
        labels.append(label)
    return _KEY.sub("[key]", _MEMBER.sub(r".\1", "".join(f"{label}" for label in reversed(labels))))
