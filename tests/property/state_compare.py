"""Compares the whole Python state of two twins: modules of source that was executed twice, and everything in them."""

import contextvars
import functools
import gc
import hashlib
import itertools
import mmap
import queue
import random
import re
import threading
import types
import weakref
from collections import ChainMap, UserDict, deque
from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

TOLERANCE = 1e-3
SCRATCH = 9
"""A tensor of so many rows is a cache; nobody reads its last row."""
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range, slice)
_SKIPPED = (types.ModuleType, types.BuiltinFunctionType, types.CodeType, RemovableHandle)
_HOOKS = re.compile(r"_(forward|backward|state_dict|load_state_dict)_(pre_|post_)?hooks\w*$")
_ITERATORS = (*(type(iter(kind())) for kind in (list, tuple, dict, set)), type(iter(range(1))), map, itertools.count)


_FOREIGN = (type(threading.Lock()), type(threading.RLock()), type(hashlib.sha256()), mmap.mmap, queue.SimpleQueue)


class Twins:
    """A comparison of two twins.

    ``exact`` says whether floating-point numbers must have the same bits, ``shared`` whether the same objects must be
    shared within each.
    """

    def __init__(self, *, exact: bool, shared: bool = True) -> None:
        self.exact = exact
        self.shared = shared
        self._pairs: dict[int, tuple[Any, Any]] = {}
        self._back: dict[int, Any] = {}

    def difference(self, want: Any, got: Any, path: str = "") -> str | None:
        """Where the two differ first, and how; None if they are alike."""
        for where, text in self._differences(want, got, path):
            return f"{where}: {text}"
        return None

    def _differences(self, want: Any, got: Any, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(want, _SKIPPED) and type(want) is type(got):
            return
        if isinstance(want, (*_CONSTANTS, Enum)):
            # Classes of twins are two classes of one name; so are the members of their enumerations.
            if _kind(want) != _kind(got) or _text(want) != _text(got):
                yield path, f"{want!r} became {got!r}"
            return
        if want is got:
            return
        known = self._pairs.get(id(want))
        if known is not None and known[1] is got:
            return
        if self.shared and not isinstance(want, tuple) and (known is not None or id(got) in self._back):
            yield path, "is shared with something else than in the twin"
            return
        self._pairs[id(want)] = want, got
        self._back[id(got)] = got
        if _kind(want) != _kind(got):
            yield path, f"{_kind(want)} became {_kind(got)}"
        elif isinstance(want, Tensor):
            yield from self._tensors(want, got, path)
        else:
            yield from self._contents(want, got, path)

    def _tensors(self, want: Tensor, got: Tensor, path: str) -> Iterator[tuple[str, str]]:
        if (want.shape, want.dtype) != (got.shape, got.dtype):
            yield path, f"{tuple(want.shape)} {want.dtype} became {tuple(got.shape)} {got.dtype}"
            return
        yield from self._differences(
            want.grad if want.is_leaf else None, got.grad if got.is_leaf else None, path + ".grad"
        )
        yield from self._differences(want.__dict__, got.__dict__, path)
        a, b = want.detach(), got.detach()
        if a.dim() and a.shape[0] == SCRATCH:
            a, b = a[:-1], b[:-1]
        if self.exact or not a.is_floating_point():
            same = bool(((a == b) | ((a != a) & (b != b))).all())
        else:
            same = bool(torch.isclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True).all())
        if not same:
            yield path, f"{_brief(a)} became {_brief(b)}"

    def _contents(self, want: Any, got: Any, path: str) -> Iterator[tuple[str, str]]:
        parts, others = (_parts(value) for value in (want, got))
        if [name for name, _ in parts] != [name for name, _ in others]:
            yield path, f"has {_names(parts)} and became {_names(others)}"
            return
        for (name, a), (_, b) in zip(parts, others, strict=True):
            yield from self._differences(a, b, path + name)


def _names(parts: list[tuple[str, Any]]) -> str:
    return "[" + ", ".join(name for name, _ in parts[:12]) + (", ...]" if len(parts) > 12 else "]")


def _brief(tensor: Tensor) -> str:
    return str([round(x, 4) if isinstance(x, float) else x for x in tensor.flatten().tolist()[:12]])


def _kind(value: Any) -> str:
    return type(value).__qualname__


def _text(value: Any) -> str:
    return str(value) if isinstance(value, Enum) else repr(value)


def _key(key: Any) -> str:
    return f"[{key!r}]" if isinstance(key, (*_CONSTANTS, tuple)) else f"[{_kind(key)}]"


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What an object holds, each under a name that is the same in both twins."""
    held = list(_entries(value))
    table = _table(value)
    if table is not None:
        for name, inner in table.items():
            if _HOOKS.match(name) and isinstance(inner, dict):  # numbered across the process
                held += [(f".{name}[{i}]", hook) for i, hook in enumerate(inner.values())]
            elif not (name.startswith("__") or name == "_abc_impl"):
                held.append((f".{name}", inner))
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if kind.__module__.startswith("gdfuzz") and not name.startswith("__") and hasattr(value, name):
                held.append((f".{name}", getattr(value, name)))
    return held


def _table(value: Any) -> dict[str, Any] | None:
    if isinstance(value, type):
        return dict(vars(value)) if value.__module__.startswith("gdfuzz") and not issubclass(value, Enum) else None
    if isinstance(value, (types.MethodType, weakref.ref, functools._lru_cache_wrapper, *_ITERATORS)):
        return None
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return table if isinstance(table, dict) else None


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of containers, and what objects of other kinds hold beside attributes."""
    if isinstance(value, (dict, UserDict, types.MappingProxyType, ChainMap, weakref.WeakValueDictionary)):
        yield from ((_key(key), inner) for key, inner in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{i}]", inner) for i, inner in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield "{}", str(sorted(map(repr, value)))
    elif isinstance(value, np.ndarray):
        yield "array", repr(value)
    elif isinstance(value, contextvars.ContextVar):
        yield "value", value.get(None)
    elif isinstance(value, random.Random):
        yield "state", hash(value.getstate())
    elif isinstance(value, _FOREIGN):
        yield "state", _foreign(value)
    elif isinstance(value, np.random.Generator):
        yield "state", repr(value.bit_generator.state)
    elif isinstance(value, types.FunctionType):
        yield "name", value.__code__.co_name
        yield "cells", [_cell(cell) for cell in value.__closure__ or ()]
        yield "defaults", (value.__defaults__, value.__kwdefaults__)
    elif isinstance(value, (property, functools.cached_property, staticmethod, classmethod)):
        yield "function", getattr(value, "fget", None) or getattr(value, "func", None) or value.__func__
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__.__name__))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, weakref.ref):
        yield "referent", value()
    elif isinstance(value, functools._lru_cache_wrapper):
        yield "results", [list(d.values()) for d in gc.get_referents(value) if type(d) is dict and d is not vars(value)]
    elif isinstance(value, types.GeneratorType):
        yield "frame", None if value.gi_frame is None else (value.gi_frame.f_lasti, dict(value.gi_frame.f_locals))
    elif isinstance(value, map):
        yield "inner", [str(part) for part in value.__reduce__()[1][1:]] and value.__reduce__()[1][1:]
    elif isinstance(value, _ITERATORS):
        yield "left", value.__reduce__()[1:]
    elif not isinstance(value, (nn.Module, type)) and _table(value) is None and _is_value(value):
        yield "value", repr(value)


def _foreign(value: Any) -> Any:
    """What is left in an object of compiled code."""
    if isinstance(value, mmap.mmap):
        return value[:], value.tell()
    if isinstance(value, queue.SimpleQueue):
        return value.qsize()
    is_hash = hasattr(value, "hexdigest")
    return value.hexdigest() if is_hash else "unlocked" in repr(value)


def _is_value(value: Any) -> bool:
    return type(value).__module__ in ("fractions", "decimal", "datetime")


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
