"""Objects whose state Python cannot read: what compiled code made, locks, machinery. Loaded only where one is used."""

import logging
import opcode
import sys
import threading
import types
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextvars import Context
from functools import lru_cache, partial
from typing import Any

from . import objects
from .holders import IN_MEMORY
from .iterators import read_memory
from .notes import CodeNotes
from .objects import Reader
from .particulars import unchanged

__all__ = [
    "MethodCalls",
    "changed_machines",
    "given_names",
    "own_names",
    "read_given",
    "read_machine",
    "snapshot",
    "values_here",
    "write_given",
]

_SEEN_THROUGH = frozenset(
    (
        *("builtins", "collections", "_collections", "array", "functools", "operator", "_operator", "itertools", "re"),
        *("struct", "_struct", "datetime", "_contextvars", "contextvars", "_weakref", "weakref", "_abc", "_ctypes"),
        *("_random", "random", "numpy", "torch", "decimal", "typing", "time"),
    )
)
"""Where compiled classes are at home whose objects never change, or whose state a walk compares."""
_NOT_READ = (threading.Semaphore, threading.Condition, threading.Barrier)
_OF_LOGS = ("level", "disabled", "isEnabledFor", "getEffectiveLevel", "hasHandlers", "handlers")
_SILENT = ("multiprocessing", "decimal")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_COMPILED = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_TAKEN = ("acquire", "release")
_ASSIGNS = (opcode.opmap["STORE_ATTR"], opcode.opmap["DELETE_ATTR"])
_IN_BLOCKS = ("__enter__", "__exit__")  # of a block, which gives back what it takes; the first of them is not seen


class MethodCalls:
    """Calls of compiled methods on objects that were there before a run. For the thread of one run."""

    def __init__(self) -> None:
        self.first: str | None = None
        """The first call that may change or read what nobody sees, in words."""
        self._locks: dict[int, tuple[Any, str]] = {}

    def note(self, owner: Any, method: str) -> bool:
        """A method of ``owner`` is about to run. Whether a walk sees what it may change or read."""
        kind = type(owner)
        home = next((base for base in type.mro(kind) if isinstance(vars(base).get(method), _COMPILED)), None)
        if home is None:  # a function that keeps data of its own there, as those of pybind11 do
            return True
        if issubclass(kind, _LOCKS) and method in (*_TAKEN, *_IN_BLOCKS):
            if method in _TAKEN:
                self._locks.setdefault(id(owner), (owner, repr(owner)))
            return True
        is_seen = home.__module__.partition(".")[0] in _SEEN_THROUGH and home is not Context
        if is_seen or issubclass(home, IN_MEMORY):
            return True
        self.first = self.first or f"{method}() of a {kind.__module__}.{kind.__qualname__}"
        return False

    def unseen(self) -> str | None:
        """What nobody saw, or the first lock that is not as it was before its first call, in words; or None."""
        left = (was for lock, was in self._locks.values() if repr(lock) != was)
        return self.first or next((f"{was}, which it leaves otherwise" for was in left), None)


def snapshot(value: Any) -> dict[str, Any]:
    """The plain values of an object of machinery by name: constants, and how much its queues hold."""
    table = objects.attribute_table(value)
    return {"": repr(value)} if table is None else {name: _plain(held) for name, held in list(table.items())}


@lru_cache(maxsize=256)
def _assigned(kind: type) -> frozenset[str]:
    """The attributes that the methods of one class assign."""
    found = set[str]()
    for code in (fn.__code__ for member in vars(kind).values() for fn in objects.functions_in(member)):
        steps, extended = code.co_code, 0
        for step, number in zip(steps[::2], steps[1::2], strict=True):
            if step in _ASSIGNS:
                found.add(code.co_names[extended | number])
            extended = (extended | number) << 8 if step == opcode.EXTENDED_ARG else 0
    return frozenset(found)


def given_names(value: Any) -> list[str]:
    """The attributes of an object of machinery that no class of the library assigns: the user gave them to it."""
    kind = type(value)
    users = objects.user_classes(kind)
    own = set[str]().union(*(_assigned(base) for base in objects.written_classes(kind) if base not in users))
    return [name for name in list(objects.attribute_table(value) or ()) if name not in own]


def own_names(value: Any) -> frozenset[str]:
    """The attributes that the methods of an object's classes assign."""
    return frozenset().union(*map(_assigned, objects.written_classes(type(value))))


def read_given(value: Any) -> dict[str, Any]:
    """Those attributes by name."""
    table = objects.attribute_table(value) or {}
    return {name: table[name] for name in given_names(value)}


def write_given(value: Any, before: dict[str, Any]) -> None:
    """Put them back, and leave the others as they are."""
    table = objects.attribute_table(value)
    assert table is not None
    for name in given_names(value):
        del table[name]
    table.update(before)


def values_here(names: Collection[str], local: threading.local) -> dict[str, Any]:
    """What a ``threading.local`` holds in this thread under ``names``: constants by value, objects by identity."""
    held = list((objects.attribute_table(local) or {}).items())
    found = ((name, value) for name, value in held if name in names)
    return {name: repr(value) if issubclass(type(value), objects.CONSTANTS) else id(value) for name, value in found}


def changed_machines(
    met: Sequence[tuple[Any, Any, dict[str, Any]]], codes: Collection[types.CodeType]
) -> Iterator[Any]:
    """Where the objects were met that ``codes`` use and that are not as their snapshots say."""
    return (path for path, value, was in met if _is_used(type(value), codes) and snapshot(value) != was)


def read_machine(
    value: Any, notes: CodeNotes, names: frozenset[str]
) -> tuple[list[tuple[Any, list[str]]], list[tuple[Any, frozenset[str]]], list[Reader]]:
    """What to compare of an object of machinery: the attributes that code reads under ``names``, those for which it
    asks in vain, each with their table, and its plain values."""
    kind, table = type(value), objects.attribute_table(value)
    readers: list[Reader] = []
    if not issubclass(kind, threading.Thread) and _is_read(kind, notes.codes, names):
        readers.append(partial(unchanged, value, snapshot(value), snapshot))
    if table is None:
        return [], [], readers
    known = [name for name in names if name in table]
    return [(table, known)] if known else [], [(table, frozenset(notes.asked - table.keys()))], readers


def _is_read(kind: type, codes: Collection[types.CodeType], names: frozenset[str]) -> bool:
    """Whether ``codes``, which spell ``names``, may read objects of a class of machinery. They take locks, and write to
    logs; a log's level they read by name."""
    if issubclass(kind, logging.Filterer):
        return not names.isdisjoint(_OF_LOGS)
    return _is_used(kind, codes) and not issubclass(kind, _NOT_READ)


def _is_used(kind: type, codes: Collection[types.CodeType]) -> bool:
    """Whether code that ran may have used objects of a class of machinery. Other threads use such objects, too, so
    those whose code did not run are left out; compiled classes and those that processes share do not tell."""
    if kind.__module__.partition(".")[0] in _SILENT:
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return any(code.co_filename == file for code in codes)


def _plain(held: Any) -> Any:
    if issubclass(type(held), objects.CONSTANTS):
        return repr(held)
    if issubclass(type(held), (list, deque)):
        return len(held)
    return read_memory(held) if issubclass(type(held), IN_MEMORY) else None
