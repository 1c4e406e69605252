"""What an object that can change holds: read as plain data, compared without the user's code, written back.

Each ``read_`` function gives a dict by label, a list of entries, or bytes; its ``write_`` function, which is in
``writers.py``, takes the same.
"""

import random
import re
import threading
import types
from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import cache, partial
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import torch

from . import objects
from .objects import ABSENT

__all__ = [
    "LABELS_OF_FUNCTIONS",
    "MEMBER",
    "OF_FUNCTIONS",
    "Holder",
    "frozen",
    "labelled",
    "parts_of_function",
    "random_holder",
    "read_attributes",
    "read_cell",
    "read_class",
    "read_context",
    "read_form",
    "read_function",
    "read_names",
    "read_slots",
    "read_tensor",
    "setting_holders",
    "told",
    "writer",
]


class Holder(NamedTuple):
    """An object that can change: where it was met, how to read all that it holds, how to write that back."""

    path: Any
    value: Any
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any]
    before: Any

    def change(self) -> str | None:
        """How it differs from before, in words, or None."""
        now, before = self.read(self.value), self.before
        kind = type(before)
        if kind is list:
            if len(now) == len(before) and all(map(is_, now, before)):
                return None
            now, before = labelled(self.value, now), labelled(self.value, before)
        elif kind is not dict:
            return None if now == before else " was written"
        elif len(now) == len(before) and all(map(is_, now, before)) and all(map(is_, now.values(), before.values())):
            return None
        if list(now) == list(before) and all(map(objects.equal_content, now.values(), before.values())):
            return None
        for label in (*before, *now):
            a, b = before.get(label, ABSENT), now.get(label, ABSENT)
            if not objects.equal_content(b, a):
                name = f".{label}" if issubclass(type(label), str) and label.isidentifier() else label
                return f"{name} was {'added' if a is ABSENT else 'removed' if b is ABSENT else 'rebound'}"
        return " was put in another order"

    @property
    def is_by_name(self) -> bool:
        """Whether what it holds are attributes."""
        read = getattr(self.read, "func", self.read)
        return read in (read_attributes, read_slots, read_class)

    def restore(self, names: Collection[str] | None = None) -> None:
        """Put back what it held; with ``names``, of attributes those of these names alone."""
        held = self.before
        if names is not None and self.is_by_name:
            now = self.read(self.value)
            labels = [label for label in {**held, **now} if label in (held if label.lstrip(".") in names else now)]
            held = {label: held[label] if label.lstrip(".") in names else now[label] for label in labels}
        self.write(self.value, held)


@cache
def writer(name: str) -> Callable[..., None]:
    """A function of ``writers.py`` by its name. That is loaded when it is first called, since few runs change anything
    that must be put back."""

    def write(*args: Any) -> None:
        from . import writers

        getattr(writers, name)(*args)

    return write


def frozen(state: Any) -> Any:
    """The state of a random generator as nested tuples, which compare by value."""
    if issubclass(type(state), dict):
        return tuple((key, frozen(value)) for key, value in state.items())
    if issubclass(type(state), (tuple, list)):
        return tuple(map(frozen, state))
    return state.tobytes() if issubclass(type(state), np.ndarray) else state


def random_holder(path: Any, generator: Any) -> Holder:
    """The holder of a random generator of Python or NumPy, or of one of these modules."""
    read: Callable[[], Any]
    write: Any
    freeze: Callable[[Any], Any] = frozen
    if issubclass(type(generator), (np.random.Generator, np.random.BitGenerator)):
        bits = getattr(generator, "bit_generator", generator)
        read, write = lambda: bits.state, partial(setattr, bits, "state")
    elif type(generator) is random.Random or generator is random:
        read, write, freeze = generator.getstate, generator.setstate, tuple  # nested tuples of numbers
    elif issubclass(type(generator), random.Random):
        read, write = generator.getstate, generator.setstate
    else:
        read, write = generator.get_state, generator.set_state
    saved = read()
    return Holder(path, generator, lambda _: freeze(read()), lambda *_: write(saved), freeze(saved))


_OF_THREADS = vars(threading.Thread(name="")).keys()
"""What a thread keeps of itself; other threads write it."""


def setting_holders() -> list[Holder]:
    """Of the settings of the process that operators read: the default dtype, and determinism."""
    dtype, is_determined = torch.get_default_dtype(), _read_determinism()
    return [
        Holder(((), "the default dtype"), None, lambda _: torch.get_default_dtype(), _write_dtype, dtype),
        Holder(((), "determinism"), None, _read_determinism, _write_determinism, is_determined),
    ]


def _write_dtype(_: Any, before: torch.dtype) -> None:
    torch.set_default_dtype(before)


def _read_determinism(_: Any = None) -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _write_determinism(_: Any, before: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def read_attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object by name; of a thread those that its class gave it."""
    table = dict(objects.attribute_table(value) or {})
    is_thread = issubclass(type(value), threading.Thread)
    return {name: held for name, held in table.items() if name not in _OF_THREADS} if is_thread else table


def read_slots(slots: dict[str, Any], value: Any) -> dict[str, Any]:
    """The slots of an object by label; ``ABSENT`` for an empty one. ``slots`` are their descriptors."""
    try:
        return dict(zip(slots, [member.__get__(value) for member in slots.values()], strict=True))
    except AttributeError:
        return {label: objects.slot_value(member, value) for label, member in slots.items()}


def labelled(container: Any, entries: list[Any]) -> dict[Any, Any]:
    """What ``objects.content`` gave of a container, by key, index or identity."""
    if issubclass(type(container), dict):
        half = len(entries) // 2
        return dict(zip(map(_Key, entries[:half]), entries[half:], strict=True))
    if issubclass(type(container), set):
        return {_Key(inner): inner for inner in entries}
    return {f"[{index}]": inner for index, inner in enumerate(entries)}


class _Key:
    """A key of a container, by identity or as a constant, so that no ``__eq__`` of the user is called."""

    __slots__ = ("_by", "key")

    def __init__(self, key: Any) -> None:
        self.key = key
        kind = type(key)
        is_constant = kind is str or issubclass(kind, objects.CONSTANTS)
        self._by = (kind, key if kind is str else repr(key)) if is_constant else id(key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._by == other._by

    def __hash__(self) -> int:
        return hash(self._by)

    def __format__(self, spec: str) -> str:
        if not isinstance(self._by, tuple):
            return "[key]"
        return f"[{self.key!r}]" if type(self.key) is str else f"[{self._by[1]}]"


_FORM = tuple(vars(np.ndarray)[name] for name in ("dtype", "shape", "strides"))


def read_form(array: Any) -> tuple[Any, ...]:
    """How a NumPy array takes its memory, which code may set in place."""
    return (*(member.__get__(array) for member in _FORM), array.flags.writeable)


def read_cell(cell: types.CellType) -> dict[str, Any]:
    """What a closure's variable holds."""
    return {"": objects.cell_value(cell)}


def read_names(names: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """The variables of a module under some names; ``ABSENT`` for one that is not there."""
    return {name: table.get(name, ABSENT) for name in names}


def read_context(variable: ContextVar[Any]) -> dict[str, Any]:
    """The value of a context variable in the running context."""
    return {"": variable.get(ABSENT)}


def read_function(fn: types.FunctionType) -> dict[str, Any]:
    """The code, the defaults, the name and the text of a function."""
    return dict(zip(LABELS_OF_FUNCTIONS, parts_of_function(fn), strict=True))


OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__", "__name__", "__doc__")
LABELS_OF_FUNCTIONS = [f".{name}" for name in OF_FUNCTIONS]
parts_of_function = attrgetter(*OF_FUNCTIONS)


def read_class(kind: type) -> dict[str, Any]:
    """The attributes of a class."""
    return dict(vars(kind))


def read_tensor(alias: torch.Tensor, tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor's gradient, memory and extent; ``alias`` stands for the memory that it had."""
    with torch._C.DisableTorchFunction():
        now = tensor.data
        is_same = now.data_ptr() == alias.data_ptr() and now.shape == alias.shape and now.stride() == alias.stride()
        is_same = (
            is_same and now.dtype == alias.dtype and now.untyped_storage()._cdata == alias.untyped_storage()._cdata
        )
        grad = tensor.grad if tensor.is_leaf else None
        return {".grad": grad, ".data": alias if is_same else now, ".requires_grad": tensor.requires_grad}


MEMBER = "\0"
"""The label of what has the members of a module: in a text they are attributes, or entries of a list."""
_AS_SPELLED = ((re.compile(r"\0\['(\d+)'\]"), r"[\1]"), (re.compile(r"\0\['(\w+)'\]"), r".\1"), (re.compile("\0"), ""))


def told(path: Any) -> str:
    """A path as the user would spell it: a chain (path of its owner, label)."""
    labels = []
    while path:
        path, label = path
        labels.append(label)
    text = "".join(f"{label}" for label in reversed(labels))
    for pattern, spelled in _AS_SPELLED:
        text = pattern.sub(spelled, text)
    return text
