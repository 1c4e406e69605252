"""What a callable reaches without its arguments: modules, tensors, and variables that may be rebound later.

Followed are the closure, globals and defaults of functions, what a decorator wraps, methods, partials, lists, tuples,
deques and dicts; of plain objects the attributes under names that this code reads, and the methods that it may call.
Other attributes are left alone: an object may keep its last result, which changes with each call. From the ``forward``
of modules, their methods and the functions that it calls are followed; of what they read, the tensors, modules and
constants are noted, also those in plain objects on a module (``self.config.scale``), and in imported settings. The code
of torch and of the standard library is not followed, nor what ``eager_break`` marks.
"""

import inspect
import os
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import getattr_static
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from .breaks import is_break

__all__ = ["CONSTANTS", "Reach", "cell_value", "content"]

CONSTANTS = (bool, int, float, complex, str, type(None))
"""Types of values that may be told apart by what they are."""

Reader = Callable[[], Any]

_PACKAGE = str(__package__).partition(".")[0]
_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
_SITE = (os.path.join(_STDLIB, "site-packages", ""), os.path.join(_STDLIB, "dist-packages", ""))
_LIBRARIES = tuple(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, os.path.dirname(__file__)))
_OF_TORCH = frozenset(vars(nn.Module()))
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, OpOverload, OpOverloadPacket, torch.dtype, torch.device)
_ABSENT = object()


class Reach:
    """Everything that ``fn`` reaches, as it is now."""

    def __init__(self, fn: Any) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[torch.Tensor] = []
        """Tensors in variables, attributes and containers; those of ``modules`` come on top."""
        self.variables: list[tuple[Reader, Any]] = []
        """How to read each variable again, and what it holds."""
        self.containers: list[dict[Any, Any] | list[Any] | deque[Any]] = []
        self.objects: list[Any] = []
        self.members: list[tuple[dict[str, Any], list[str]]] = []
        """The attributes of each module by its dict: constants, objects and functions, by name."""
        self._seen: dict[int, Any] = {}
        self._noted: set[tuple[int, str]] = set()
        self._names: set[str] = set()
        self._visit(fn)
        before = -1
        while before != (before := len(self._names) + len(self._seen)):
            for holder in list(self.objects):
                self._visit_attributes(holder)

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, (*CONSTANTS, *_OPAQUE)):
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, nn.Module):
            self._visit_module(value)
        elif isinstance(value, partial):
            self._visit_all((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, types.MethodType):
            self._visit_all((value.__self__, value.__func__))
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, (list, tuple, dict, deque)):
            if not isinstance(value, tuple):
                self.containers.append(value)
            self._visit_all(content(value))
        else:
            self.objects.append(value)
            if type(value).__module__.partition(".")[0] == _PACKAGE and hasattr(type(value), "unwrap"):
                self._visit(value.unwrap())

    def _visit_all(self, values: Iterable[Any]) -> None:
        for value in list(values):
            self._visit(value)

    def _note(self, holder: Any, name: str, reader: Reader) -> None:
        held = reader()
        if (id(holder), name) not in self._noted and not isinstance(held, (type, types.ModuleType)):
            self._noted.add((id(holder), name))
            self.variables.append((reader, held))
            self._visit(held)

    def _visit_function(self, fn: types.FunctionType) -> None:
        if is_break(fn):  # may do what it likes: it runs eagerly
            return
        if _is_foreign(fn):  # a decorator: only what it wraps
            held = (cell_value(cell) for cell in fn.__closure__ or ())
            self._visit_all(
                v for v in held if isinstance(v, (types.FunctionType, types.MethodType, partial, nn.Module))
            )
            return
        self.objects.append(fn)
        names = _names(fn)
        self._names |= names
        for holder, name, reader in _variables(fn):
            self._note(holder, name, reader)
            self._visit_settings(reader(), names)
        self._visit_all((*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()))

    def _visit_attributes(self, holder: Any) -> None:
        table = getattr(holder, "__dict__", {})
        for name in list(self._names):
            if name in table:
                self._note(holder, name, partial(table.get, name))
                continue
            member = getattr_static(type(holder), name, _ABSENT)
            if isinstance(member, (staticmethod, classmethod)):
                self._visit(member.__func__)
            elif isinstance(member, property):
                self._visit(member.fget)
            elif isinstance(member, types.FunctionType):
                self._visit(member)
            elif isinstance(member, (types.MemberDescriptorType, torch.Tensor, nn.Module, list, dict, *CONSTANTS)):
                self._note(holder, name, partial(getattr, holder, name, None))
        self._visit(getattr_static(type(holder), "__call__", None))

    def _visit_module(self, root: nn.Module) -> None:
        for module in root.modules():
            if module is not root and id(module) in self._seen:
                continue
            self._seen[id(module)] = module
            self.modules.append(module)
            table = vars(module)
            names = [name for name in table if name not in _OF_TORCH]
            for name in names:
                value = table[name]
                if isinstance(value, torch.Tensor) or (isinstance(value, (list, dict)) and _holds_tensors(value)):
                    self._note(module, name, partial(table.get, name))
                elif isinstance(value, (types.FunctionType, types.MethodType, partial)):
                    self._visit(value)
            watched = [name for name in names if not isinstance(table[name], (torch.Tensor, list, dict))]
            self.members.append((table, [name for name in ("training", *watched) if name in table]))
        self._visit_code({type(module) for module in root.modules()}, root)

    def _visit_code(self, kinds: set[type[nn.Module]], root: nn.Module) -> None:
        """What the ``forward`` of each class of modules reads, and the methods and functions that it calls."""
        found: dict[types.CodeType, types.FunctionType] = {}
        names: set[str] = set()
        members = [vars(base) for base in {base for kind in kinds for base in kind.__mro__} if base is not nn.Module]
        pending = [getattr_static(kind, "forward", None) for kind in kinds]
        while pending:
            fn = _plain_function(pending.pop())
            if fn is None or fn.__code__ in found:
                continue
            found[fn.__code__] = fn
            pending += [reader() for _, _, reader in _variables(fn)]
            fresh = _names(fn) - names
            pending += [table[name] for table in members for name in fresh & table.keys()]
            names |= fresh
        for fn in found.values():
            for holder, name, reader in _variables(fn):
                if isinstance(reader(), (torch.Tensor, nn.Module, *CONSTANTS)):
                    self._note(holder, name, reader)
                self._visit_settings(reader(), names)
        objects = [value for module in root.modules() for name, value in vars(module).items() if name in names]
        seen: dict[int, Any] = {}
        while objects:
            holder = objects.pop()
            if id(holder) not in seen and _is_plain(holder):
                seen[id(holder)] = holder
                objects += self._note_constants(holder, names)

    def _visit_settings(self, value: Any, names: set[str]) -> None:
        if isinstance(value, types.ModuleType) and not _is_of_library(getattr(value, "__file__", None) or ""):
            self._note_constants(value, names)

    def _note_constants(self, holder: Any, names: set[str]) -> list[Any]:
        """Note the tensors, modules and constants that hang on ``holder`` under ``names``; returns the rest."""
        table = vars(holder)
        rest = []
        for name in names & table.keys():
            if isinstance(table[name], (torch.Tensor, nn.Module, *CONSTANTS)):
                self._note(holder, name, partial(table.get, name))
            else:
                rest.append(table[name])
        return rest


def content(holder: Any) -> list[Any]:
    """What a dict, list, tuple or object holds."""
    table = holder if isinstance(holder, (dict, list, tuple, deque)) else getattr(holder, "__dict__", {})
    return list(table.values() if isinstance(table, dict) else table)


def cell_value(cell: types.CellType) -> Any:
    """What a closure's variable holds; None if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _plain_function(value: Any) -> types.FunctionType | None:
    """The function behind a method, property or decorator, if its code is to be followed."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    if not isinstance(value, types.FunctionType) or is_break(value):
        return None
    inner = inspect.unwrap(value)
    is_followed = isinstance(inner, types.FunctionType) and not is_break(inner) and not _is_foreign(inner)
    return inner if is_followed else None


def _is_foreign(fn: types.FunctionType) -> bool:
    return _is_of_library(fn.__code__.co_filename)


def _is_of_library(path: str) -> bool:
    is_stdlib = path.startswith((_STDLIB, "<frozen")) and not path.startswith(_SITE)
    return is_stdlib or path.startswith(_LIBRARIES)


def _holds_tensors(container: Any) -> bool:
    return any(
        isinstance(inner, (torch.Tensor, nn.Module))
        for value in content(container)
        for inner in (value, *(content(value) if isinstance(value, (list, tuple, dict)) else ()))
    )


def _is_plain(value: Any) -> bool:
    """Whether it is an object whose class says nothing of what it holds."""
    known = (torch.Tensor, nn.Module, types.FunctionType, types.MethodType, partial, list, tuple, dict, deque)
    return hasattr(value, "__dict__") and not isinstance(value, (*known, *CONSTANTS, *_OPAQUE))


def _names(fn: types.FunctionType) -> set[str]:
    """The names and strings in the code of a function."""
    codes = _codes(fn.__code__)
    return {name for code in codes for name in (*code.co_names, *code.co_consts) if isinstance(name, str)}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A piece of code and those nested in it: lambdas, comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _variables(fn: types.FunctionType) -> Iterator[tuple[Any, str, Reader]]:
    """The variables that a function uses and does not own, each with its holder, name and reader."""
    for cell in fn.__closure__ or ():
        empty = cell_value(cell) is None
        yield cell, "", partial(cell_value, cell) if empty else partial(getattr, cell, "cell_contents")
    table = fn.__globals__
    for name in {name for code in _codes(fn.__code__) for name in code.co_names if name in table}:
        yield table, name, partial(table.get, name)
