"""Compiles what a state guard compares into a native guard."""

import gc
import types
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from itertools import chain, repeat, takewhile
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from ..native.bound import GUARD
from .objects import ABSENT, cell_value, is_compiled_member, slot_value

if TYPE_CHECKING:
    from .guards import StateGuard


END = object()
"""Stands after the entries of each container, so that none can move from one to the next unseen."""
_EMPTY: dict[Any, Any] = {}
_KEYS, _VALUES = type(_EMPTY.keys()), type(_EMPTY.values())


def compile_guard(guard: "StateGuard") -> Any:
    """A native guard that expects what ``guard`` does; None if there is no core, or the guard compares something that
    only Python can.

    It takes what is expected from ``guard``, and reads nothing anew but what it then compares with that: another thread
    may be changing it.
    """
    latest = guard._latest_hook
    if GUARD is None or any(number >= latest for table in guard._hooks for number in table):
        return None
    held = iter(guard._held)
    addresses = chain(guard._addresses, repeat(None))  # of a tensor that no run used, the extent alone counts
    contents, sequences = _contents(guard, held)
    try:
        tables = _tables(guard, held)
        readers = [_reader(reader, next(held)) for reader in guard._readers]
        native = GUARD(
            absent=ABSENT,
            handles=_raw(vars(RemovableHandle)),
            latest=latest,
            trains=-1 if guard._trains is None else int(guard._trains),
            tables=tables,
            contents=contents,
            sequences=sequences,
            readers=tuple(readers),
            types=tuple((value, next(held)) for value in guard._objects),
            codes=tuple((value, next(held)) for value in guard._functions),
            homes=tuple((value, _raw(next(held))) for value in guard._homes),
            tensors=tuple(zip(guard.tensors, addresses, *guard._forms[:2], strict=False)),
            arrays=tuple(guard._arrays),
            hooks=tuple(guard._hooks),
        )
        return native if guard.has_forms() else None  # the core reads dtypes, which have no names there
    except TypeError:
        return None


def _raw(table: Any) -> dict[str, Any]:
    """The dict behind the attributes of a class; a dict itself. Raises ``TypeError`` for a subclass of dict."""
    if type(table) is types.MappingProxyType:
        (table,) = gc.get_referents(table)
    if type(table) is not dict:
        raise TypeError("a subclass of dict may find its entries in another way")
    return table


def _until_end(held: Iterator[Any]) -> tuple[Any, ...]:
    return tuple(takewhile(lambda value: value is not END, held))


def _contents(guard: "StateGuard", held: Iterator[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Dicts with their keys and values, and other containers with their entries."""
    contents, sequences = [], []
    parts = iter(guard._contents[::2])  # a mark stands after each
    for part in parts:
        entries = _until_end(held)
        if type(part) is _KEYS:
            next(parts)  # their values
            contents.append((*gc.get_referents(part), entries, _until_end(held)))
        elif type(part) is _VALUES:
            contents.append((*gc.get_referents(part), None, entries))
        else:
            sequences.append((part, entries))
    return tuple(contents), tuple(sequences)


def _tables(guard: "StateGuard", held: Iterator[Any]) -> tuple[tuple[Any, ...], ...]:
    """Tables with all their keys in order, or None where these are not compared, with names and values, and with names
    that are not there."""
    found: dict[int, list[Any]] = {}
    for table, keys in zip(guard._tables, guard._keys, strict=True):
        raw = _raw(table)
        found[id(raw)] = [raw, tuple(keys), ()]
    for table, absent in guard._absent:
        raw = _raw(table)
        found.setdefault(id(raw), [raw, None, ()])[2] = tuple(absent)
    for table, names in guard._named:
        raw = _raw(table)
        known = found.setdefault(id(raw), [raw, None, ()])
        for name in names:
            known += (name, next(held))
    return tuple((table, keys, tuple(entries), none) for table, keys, none, *entries in found.values())


def _reader(reader: Any, expected: Any) -> tuple[str, Any, Any, Any]:
    """A reader in the core's terms; as a call where it has no better ones."""
    if type(reader) in (weakref.ref, weakref.KeyedRef):
        return "reference", reader, None, expected
    if type(reader) is partial:
        function, args = reader.func, reader.args
        if function is cell_value or (function is getattr and args[1:] == ("cell_contents",)):
            return "cell", args[0], None, expected
        if function is getattr and type(args[0]) is types.FunctionType:
            return args[1], args[0], None, expected
        if function is getattr and args[1:] == ("__mro__",):
            return args[1], args[0], None, expected
        if function is slot_value and is_compiled_member(args[0]):
            return "call", partial(args[0].__get__, args[1]), None, expected
        if function is slot_value:
            return "slot", args[1], args[0], expected
        owner = getattr(function, "__self__", None)
        if type(owner) is ContextVar and function == owner.get and args == (ABSENT,):
            return "context", owner, None, expected
    return "call", reader, None, expected
