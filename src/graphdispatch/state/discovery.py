"""What a callable reaches without its arguments: modules, tensors, and variables that may be rebound later.

Followed are the closure, globals and defaults of functions, what a decorator wraps, methods, partials, and containers
(lists, tuples, sets, deques, dicts); of plain objects the attributes under names that this code reads, and the methods
that it may call. Other attributes are left alone: an object may keep its last result, which changes with each call.

From the ``forward`` of modules, their methods and the functions that it calls are followed. What they read is noted:
globals, attributes of the class, containers and plain objects on a module (``self.config.scale``), modules of settings.
The code of torch and of the standard library is not followed, nor what ``eager_break`` marks.
"""

import os
import sys
import sysconfig
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from inspect import getattr_static
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from ..call.breaks import is_break
from .bytecode import Reads, reads

__all__ = ["CONSTANTS", "Reach", "cell_value", "content"]

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]

CONSTANTS = (bool, int, float, complex, str, type(None))
"""Types of values that may be told apart by what they are."""

Reader = Callable[[], Any]

_PACKAGE = str(__package__).partition(".")[0]
_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
_SITE = (os.path.join(_STDLIB, "site-packages", ""), os.path.join(_STDLIB, "dist-packages", ""))
_LIBRARIES = tuple(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, os.path.dirname(__file__)))
_OF_TORCH = frozenset(vars(nn.Module()))
_CONTAINERS = (dict, list, set, deque)
_VALUES = (types.MemberDescriptorType, torch.Tensor, nn.Module, tuple, *_CONTAINERS, *CONSTANTS)
"""What a class has that is read as it is, and not called."""
_MOST_ENTRIES = _MOST_VARIABLES = 4096
_IMPLICIT = ("__call__", "__getattr__", "__getattribute__", "__getitem__", "__iter__", "__len__", "__bool__")
_OPAQUE = (
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
_ABSENT = object()


class Reach:
    """Everything that ``fn`` reaches, as it is now."""

    def __init__(self, fn: Any) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[torch.Tensor] = []
        """Tensors in variables, attributes and containers; those of ``modules`` come on top."""
        self.variables: list[tuple[Reader, Any]] = []
        """How to read each variable again, and what it holds."""
        self.containers: list[Container] = []
        self.sized: list[Container | tuple[Any, ...]] = []
        """Containers of so many constants that only their length is compared."""
        self.objects: list[Any] = []
        self.members: list[tuple[dict[str, Any], list[str]]] = []
        """The attributes of each module by its dict: constants, objects and functions, by name."""
        self.numbers: list[tuple[dict[str, Any], list[str]]] = []
        """Those of them that are numbers and are read, so that 2 is to be told from 2.0 and from True."""
        self._seen: dict[int, Any] = {}
        self._noted: set[tuple[int, str]] = set()
        self._names: set[str] = set()
        """What the code of functions reads, but for what it reads of libraries."""
        self._read = Reads()
        self._members: dict[type, dict[str, Any]] = {}
        self._code: dict[types.CodeType, types.FunctionType] = {}
        """The functions that modules reach."""
        self._visit(fn)
        before = -1
        while before != (before := len(self._names) + len(self._seen) + len(self._code)):
            for holder in list(self.objects):
                self._visit_attributes(holder)
            self._visit_code()

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
        elif isinstance(value, (tuple, *_CONTAINERS)):
            self._visit_all(self._entries(value))
        else:
            self.objects.append(value)
            if type(value).__module__.partition(".")[0] == _PACKAGE and hasattr(type(value), "unwrap"):
                self._visit(value.unwrap())

    def _entries(self, container: Container | tuple[Any, ...]) -> list[Any]:
        """Note a container, and return what it holds, as far as it is compared."""
        if len(container) > _MOST_ENTRIES and not _holds_tensors(container):
            self.sized.append(container)
            return []
        if not isinstance(container, tuple):
            self.containers.append(container)
        return content(container)

    def _visit_all(self, values: Iterable[Any]) -> None:
        for value in list(values):
            self._visit(value)

    def _note(self, holder: Any, name: str, reader: Reader) -> None:
        self._watch(holder, name, reader)
        if not isinstance(held := reader(), (type, types.ModuleType)):
            self._visit(held)

    def _watch(self, holder: Any, name: str, reader: Reader) -> None:
        """Note which object a variable holds, and nothing of what the object holds."""
        held = reader()
        is_new = (id(holder), name) not in self._noted and len(self.variables) < _MOST_VARIABLES
        if is_new and not isinstance(held, (type, types.ModuleType)):
            self._noted.add((id(holder), name))
            self.variables.append((reader, held))

    def _note_state(self, holder: Any, name: str, reader: Reader) -> None:
        """For what the code of modules reads: a variable with the tensors, modules and containers behind it. That a
        function under its own name is another one now is not looked at, since there are too many of them."""
        held = reader()
        is_code = isinstance(held, (property, staticmethod, classmethod)) or (
            isinstance(held, types.FunctionType) and held.__name__ == name
        )
        if not is_code:
            self._watch(holder, name, reader)
            self._visit_state(held)

    def _visit_state(self, value: Any) -> None:
        if isinstance(value, (torch.Tensor, nn.Module)):
            self._visit(value)
        elif isinstance(value, (tuple, *_CONTAINERS)) and id(value) not in self._seen:
            self._seen[id(value)] = value
            for inner in self._entries(value):
                self._visit_state(inner)

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
        read = reads(fn.__code__)
        self._read |= read
        libraries = set()
        for holder, name, reader in _variables(fn):
            self._note(holder, name, reader)
            held = reader()
            if _is_settings(held):
                self._note_attributes([(name, held)], read)
            elif isinstance(held, types.ModuleType):
                libraries.add(name)
        self._names |= read.own | read.loose | {name for owner, name in read.pairs if owner not in libraries}
        self._visit_all((*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()))

    def _visit_attributes(self, holder: Any) -> None:
        table = _table(holder)
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
            elif isinstance(member, _VALUES):
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
                if isinstance(value, torch.Tensor) or _holds_tensors(value):
                    self._note(module, name, partial(table.get, name))
                elif isinstance(value, (types.FunctionType, types.MethodType, partial)):
                    self._visit(value)
            watched = [name for name in names if not isinstance(table[name], (torch.Tensor, *_CONTAINERS))]
            self.members.append((table, [name for name in ("training", *watched) if name in table]))

    def _visit_code(self) -> None:
        """What the ``forward`` of modules reads, and the methods and functions that it calls."""
        bases = {base for module in self.modules for base in type(module).__mro__ if not _is_of_torch(base)}
        for module in self.modules:
            self._follow(getattr_static(type(module), "forward", None))
        read = self._read
        for fn in list(self._code.values()):
            read |= reads(fn.__code__)
        holders: list[tuple[str, Any]] = []
        for fn in list(self._code.values()):
            for holder, name, reader in _variables(fn):
                self._note_state(holder, name, reader)
                self._follow(reader())
                holders.append((name, reader()))
        for base in bases:
            for name in vars(base).keys() & read.names:
                self._follow(vars(base)[name])
                self._note_state(base, name, partial(vars(base).get, name))
        self.numbers = []
        for module in list(self.modules):
            table = vars(module)
            names = (table.keys() & read.names) - _OF_TORCH
            for name in names:
                if isinstance(table[name], _CONTAINERS):
                    self._note_state(module, name, partial(table.get, name))
            holders += [(name, table[name]) for name in names]
            self.numbers.append((table, [name for name in names if isinstance(table[name], (int, float, complex))]))
        self._note_attributes(holders, read)

    def _follow(self, value: Any) -> None:
        """Look at the code of a function of somebody's own, and at that of its decorators, with that of modules."""
        for fn in _functions(value):
            self._code.setdefault(fn.__code__, fn)

    def _note_attributes(self, holders: list[tuple[str, Any]], read: Reads) -> None:
        """Note what is read of plain objects and settings, each with the name that it is reached by, and of those that
        hang on them; follow their methods."""
        seen: dict[tuple[str, int], Any] = {}
        of: defaultdict[str, set[str]] = defaultdict(set)
        for owner, name in read.pairs:
            of[owner].add(name)
        while holders and len(self.variables) < _MOST_VARIABLES:
            owner, holder = holders.pop()
            if (owner, id(holder)) in seen or not (_is_plain(holder) or _is_settings(holder)):
                continue
            seen[owner, id(holder)] = holder
            kind = holder if isinstance(holder, (type, types.ModuleType)) else type(holder)
            names = read.loose | of[owner]
            names |= self._own_reads(kind, names)
            table, members = _table(holder), self._members_of(kind)
            for name in names:
                if name in table:
                    self._note_state(holder, name, partial(table.get, name))
                    holders.append((name, table[name]))
                    self._follow(table[name])
                elif name in members and isinstance(members[name], _VALUES):
                    self._note_state(holder, name, partial(getattr, holder, name, None))

    def _members_of(self, kind: Any) -> dict[str, Any]:
        if not isinstance(kind, type):
            return {}
        if kind not in self._members:
            self._members[kind] = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
        return self._members[kind]

    def _own_reads(self, kind: Any, names: frozenset[str]) -> frozenset[str]:
        """What the methods of a class that are called by ``names``, or by nobody, read of its objects."""
        found: frozenset[str] = frozenset()
        members = self._members_of(kind) if isinstance(kind, type) and not _is_of_library(_file(kind)) else {}
        pending = {*names, *_IMPLICIT} & members.keys()
        while pending:
            for fn in _functions(members[pending.pop()]):
                self._code.setdefault(fn.__code__, fn)
                pending |= (reads(fn.__code__).own - found - names) & members.keys()
                found |= reads(fn.__code__).own
        return found


def content(holder: Any) -> list[Any]:
    """What a dict, list, tuple or object holds."""
    table = holder if isinstance(holder, (tuple, *_CONTAINERS)) else _table(holder)
    return list(table.values() if isinstance(table, Mapping) else table)


def cell_value(cell: types.CellType) -> Any:
    """What a closure's variable holds; None if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _functions(value: Any) -> list[types.FunctionType]:
    """The functions behind a function, method or property, decorators included, whose code is to be followed."""
    if issubclass(type(value), (property, staticmethod, classmethod, types.MethodType)):
        value = value.fget if isinstance(value, property) else value.__func__
    found: dict[int, types.FunctionType] = {}
    while isinstance(value, types.FunctionType) and id(value) not in found and not is_break(value):
        found[id(value)] = value
        value = value.__dict__.get("__wrapped__")
    return [] if is_break(value) else [fn for fn in found.values() if not _is_foreign(fn)]


def _is_foreign(fn: types.FunctionType) -> bool:
    return _is_of_library(fn.__code__.co_filename)


def _is_of_library(path: str) -> bool:
    is_stdlib = path.startswith((_STDLIB, "<frozen")) and not path.startswith(_SITE)
    return is_stdlib or path.startswith(_LIBRARIES)


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """Whether it is a container of tensors or modules, or of containers of them."""
    if depth and isinstance(value, (tuple, *_CONTAINERS)):
        return any(
            isinstance(inner, (torch.Tensor, nn.Module)) or _holds_tensors(inner, depth - 1) for inner in content(value)
        )
    return False


def _is_plain(value: Any) -> bool:
    """Whether it is an object whose class says nothing of what it holds."""
    known = (torch.Tensor, nn.Module, types.FunctionType, types.MethodType, partial, tuple, *_CONTAINERS)
    return not issubclass(type(value), (*known, *CONSTANTS, *_OPAQUE))


def _is_settings(value: Any) -> bool:
    """Whether it is a module or class of somebody's own, which may be a place for settings."""
    if isinstance(value, type):
        return not issubclass(value, (nn.Module, Enum, BaseException, tuple, *_CONTAINERS)) and not _is_of_library(
            _file(value)
        )
    return isinstance(value, types.ModuleType) and not _is_of_library(getattr(value, "__file__", None) or "")


def _file(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _table(value: Any) -> Mapping[str, Any]:
    """The attributes of an object by name; none where it does not say."""
    try:
        table = vars(value)
    except Exception:  # no __dict__, or one of its own
        return {}
    return table if isinstance(table, (dict, types.MappingProxyType)) else {}


def _is_of_torch(base: type) -> bool:
    return base is object or base.__module__.partition(".")[0] == "torch"


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A piece of code and those nested in it: lambdas, comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _variables(fn: types.FunctionType) -> Iterator[tuple[Any, str, Reader]]:
    """The variables that a function uses and does not own, each with its holder, name and reader."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        empty = cell_value(cell) is None
        yield cell, name, partial(cell_value, cell) if empty else partial(getattr, cell, "cell_contents")
    table = fn.__globals__
    for name in {name for code in _codes(fn.__code__) for name in code.co_names if name in table}:
        yield table, name, partial(table.get, name)
