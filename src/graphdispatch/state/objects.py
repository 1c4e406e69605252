"""Questions about the objects that a callable reaches: what they hold, which code is behind them, whose code it is."""

import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from ..call.breaks import is_break

__all__ = [
    "CONSTANTS",
    "CONTAINERS",
    "OPAQUE",
    "Container",
    "Reader",
    "attributes_of",
    "cell_value",
    "content",
    "functions_behind",
    "holds_tensors",
    "is_library_class",
    "is_library_function",
    "is_plain",
    "is_settings",
    "live_table",
    "variables_of",
]

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
Reader = Callable[[], Any]

CONSTANTS = (bool, int, float, complex, str, type(None))
"""Types whose values are compared by what they are, and not by identity."""
CONTAINERS = (dict, list, set, deque)
OPAQUE = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    type(lru_cache(id)),
    OpOverload,
    OpOverloadPacket,
    torch.dtype,
    torch.device,
)
"""Types of objects that nothing is looked for in."""

_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
_SITE = (os.path.join(_STDLIB, "site-packages", ""), os.path.join(_STDLIB, "dist-packages", ""))
_LIBRARIES = tuple(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, os.path.dirname(__file__)))


def content(holder: Any) -> list[Any]:
    """The values that a container holds, or the values of an object's attributes."""
    table = holder if isinstance(holder, (tuple, *CONTAINERS)) else attributes_of(holder)
    return list(table.values() if isinstance(table, Mapping) else table)


def attributes_of(value: Any) -> Mapping[str, Any]:
    """The attributes of an object by name, live; empty if it has no ``__dict__``."""
    try:
        table = vars(value)
    except Exception:  # no __dict__, or one that its class computes
        return {}
    return table if isinstance(table, (dict, types.MappingProxyType)) else {}


def live_table(holder: Any) -> Any:
    """The container or attribute table of an object, live and writable; None if it has none."""
    if isinstance(holder, CONTAINERS):
        return holder
    table = attributes_of(holder)
    return table if isinstance(table, dict) and table else None


def cell_value(cell: types.CellType) -> Any:
    """What a closure's variable holds; None if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def variables_of(fn: types.FunctionType) -> Iterator[tuple[Any, str, Reader]]:
    """The closure variables and globals that a function uses: the holder, the name, and how to read each again."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        empty = cell_value(cell) is None
        yield cell, name, partial(cell_value, cell) if empty else partial(getattr, cell, "cell_contents")
    table = fn.__globals__
    for name in {name for code in _nested_codes(fn.__code__) for name in code.co_names if name in table}:
        yield table, name, partial(table.get, name)


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A piece of code and the code nested in it: lambdas, comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested_codes(constant)


def functions_behind(value: Any) -> list[types.FunctionType]:
    """The functions of the user behind a function, method or property, what its decorators wrap included.

    Empty if ``eager_break`` marks one of them.
    """
    if issubclass(type(value), (property, staticmethod, classmethod, types.MethodType)):
        value = value.fget if isinstance(value, property) else value.__func__
    found: dict[int, types.FunctionType] = {}
    while isinstance(value, types.FunctionType) and id(value) not in found and not is_break(value):
        found[id(value)] = value
        value = value.__dict__.get("__wrapped__")
    return [] if is_break(value) else [fn for fn in found.values() if not is_library_function(fn)]


def is_library_function(fn: types.FunctionType) -> bool:
    """Whether its code belongs to torch, to this package or to the standard library."""
    return _is_library_file(fn.__code__.co_filename)


def is_library_class(kind: type) -> bool:
    """Whether a class belongs to torch, to this package or to the standard library."""
    return _is_library_file(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def _is_library_file(path: str) -> bool:
    is_stdlib = path.startswith((_STDLIB, "<frozen")) and not path.startswith(_SITE)
    return is_stdlib or path.startswith(_LIBRARIES)


def holds_tensors(value: Any, depth: int = 3) -> bool:
    """Whether it is a container of tensors or modules, or of containers of them, ``depth`` levels deep."""
    if depth and isinstance(value, (tuple, *CONTAINERS)):
        return any(
            isinstance(inner, (torch.Tensor, nn.Module)) or holds_tensors(inner, depth - 1) for inner in content(value)
        )
    return False


def is_plain(value: Any) -> bool:
    """Whether it is a plain object: of no class that tells by itself what it holds."""
    known = (torch.Tensor, nn.Module, types.FunctionType, types.MethodType, partial, tuple, *CONTAINERS)
    return not issubclass(type(value), (*known, *CONSTANTS, *OPAQUE))


def is_settings(value: Any) -> bool:
    """Whether it is a Python module or class of the user, which may be a place for settings."""
    if isinstance(value, type):
        is_data = issubclass(value, (nn.Module, Enum, BaseException, tuple, *CONTAINERS))
        return not is_data and not is_library_class(value)
    return isinstance(value, types.ModuleType) and not _is_library_file(getattr(value, "__file__", None) or "")
