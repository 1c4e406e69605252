"""What few callables read: arrays in another form, the state of random generators, modules that are found by computed
names. Loaded only where one does."""

import random
import sys
import types
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from importlib.util import resolve_name
from typing import Any

import numpy as np

from . import holders, objects
from .bytecode import CodeReads, code_reads
from .notes import CodeNotes, keep
from .objects import Reader
from .particulars import unchanged
from .walk import StateWalk

__all__ = ["array_readers", "generator_readers", "note_any_module", "note_import", "read_cache", "read_form"]


def array_readers(array: Any) -> list[Reader]:
    """What to compare of a NumPy array besides its bytes; of one of a subclass, which may hide some, these too."""
    found: list[Reader] = [partial(unchanged, array, read_form(array), read_form)]
    if type(array) is not np.ndarray and not array.dtype.hasobject:
        found.append(partial(unchanged, array, np.ndarray.tobytes(array), np.ndarray.tobytes))
    return found


def generator_readers(value: Any, names: Collection[str]) -> list[Reader]:
    """What to compare of a random generator whose state code reads under ``names``, and does not change."""
    homes = {"getstate": random.Random, "get_state": np.random.RandomState, "state": np.random.BitGenerator}
    reads = (name for name, home in homes.items() if name in names and issubclass(type(value), home))
    return [partial(unchanged, value, read(value), read) for name in reads for read in [partial(_state, name)]]


def _state(name: str, generator: Any) -> Any:
    held = getattr(generator, name)
    return holders.frozen(held() if callable(held) else held)


def read_form(array: Any) -> tuple[Any, ...]:
    """How a NumPy array takes its memory, which code may set in place."""
    return (*(member.__get__(array) for member in _FORM), array.flags.writeable)


_FORM = tuple(vars(np.ndarray)[name] for name in ("dtype", "shape", "strides"))


def read_cache(cache: Any) -> set[Any]:
    """What a ``functools.lru_cache`` holds: constants by value, objects by identity."""
    outer = [inner for held in objects.referents(cache) for inner in (objects.content(held) or [held])]
    every = [*outer, *(inner for held in outer for inner in objects.referents(held))]
    return {(type(v), repr(v)) if issubclass(type(v), objects.CONSTANTS) else id(v) for v in every}


def note_import(notes: CodeNotes, walk: StateWalk, frame: types.FrameType) -> None:
    """``importlib.import_module`` is about to run in ``frame``, maybe with a name that its caller computed."""
    given = frame.f_locals
    with suppress(ImportError, AttributeError):
        name = resolve_name(given["name"], given["package"])
        caller = frame.f_back
        _note_modules(notes, walk, [name], code_reads(caller.f_code).attributes if caller is not None else ())


def note_any_module(notes: CodeNotes, walk: StateWalk, reads: CodeReads) -> None:
    """Code may find any module by a name that it computes: those that have an attribute that it spells count."""
    spelled = {name for name in reads.attributes if not name.startswith("__")}
    tables = ((name, getattr(module, "__dict__", {})) for name, module in list(sys.modules.items()))
    _note_modules(notes, walk, [name for name, held in tables if not spelled.isdisjoint(held)], spelled)


def _note_modules(notes: CodeNotes, walk: StateWalk, names: Iterable[str], attributes: Iterable[str]) -> None:
    for name in names:
        module = sys.modules.get(name)
        if objects.is_settings(module):
            keep(notes.variables, sys.modules, [name])
            walk.visit_variables(vars(module), (each for each in attributes if each in vars(module)), name)
