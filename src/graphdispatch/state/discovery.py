"""Discovers the state of a callable: the modules, tensors and variables that it reaches besides its arguments.

Discovery follows the closure, globals and defaults of functions, what a decorator wraps, methods, partials, and
containers (lists, tuples, sets, deques, dicts). Of a plain object it follows the attributes under names that this code
reads, and the methods that the code may call. It leaves other attributes alone: an object may keep its last result,
which changes with each call.

From a module it follows ``forward``, the methods and the functions that ``forward`` calls, and notes what they read:
globals, attributes of the class, containers and plain objects on a module (``self.config.scale``), settings in Python
modules and classes. It does not follow the code of torch and of the standard library, nor what ``eager_break`` marks.
"""

import types
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from inspect import getattr_static
from typing import Any

import torch
from torch import nn

from ..call.breaks import is_break
from . import objects
from .bytecode import AttributeReads, attribute_reads
from .objects import CONSTANTS, CONTAINERS, Container, Reader

__all__ = ["StateDiscovery"]

_PACKAGE = str(__package__).partition(".")[0]
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_VALUES = (types.MemberDescriptorType, torch.Tensor, nn.Module, tuple, *CONTAINERS, *CONSTANTS)
"""Types of class attributes that code reads as they are, rather than calls."""
_MAX_ENTRIES = _MAX_VARIABLES = 4096
_IMPLICIT_METHODS = ("__call__", "__getattr__", "__getattribute__", "__getitem__", "__iter__", "__len__", "__bool__")
_ABSENT = object()


class StateDiscovery:
    """Everything that ``fn`` reaches besides its arguments, as it is now. Holds the objects that it found."""

    def __init__(self, fn: Any) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[torch.Tensor] = []
        """Tensors in variables, attributes and containers, without the parameters and buffers of ``modules``."""
        self.variables: list[tuple[Reader, Any]] = []
        """How to read each variable again, and what it holds."""
        self.containers: list[Container] = []
        self.large_containers: list[Container | tuple[Any, ...]] = []
        """Containers with so many entries that only their length is compared."""
        self.objects: list[Any] = []
        self.module_attributes: list[tuple[dict[str, Any], list[str]]] = []
        """For each module its dict, and the names in it of constants, objects and functions."""
        self.read_numbers: list[tuple[dict[str, Any], list[str]]] = []
        """The names of those that are numbers and that code reads: 2, 2.0 and True must be told apart there."""
        self._seen: dict[int, Any] = {}
        self._noted: set[tuple[int, str]] = set()
        self._names: set[str] = set()
        """Attribute names that the code of functions reads, apart from those it reads of libraries."""
        self._read = AttributeReads()
        self._members: dict[type, dict[str, Any]] = {}
        self._code: dict[types.CodeType, types.FunctionType] = {}
        """The functions that modules reach."""
        self._visit(fn)
        before = -1
        while before != (before := len(self._names) + len(self._seen) + len(self._code)):
            for holder in list(self.objects):
                self._visit_attributes(holder)
            self._visit_module_code()

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, (*CONSTANTS, *objects.OPAQUE)):
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
        elif isinstance(value, (tuple, *CONTAINERS)):
            self._visit_all(self._note_container(value))
        else:
            self.objects.append(value)
            if type(value).__module__.partition(".")[0] == _PACKAGE and hasattr(type(value), "unwrap"):
                self._visit(value.unwrap())

    def _note_container(self, container: Container | tuple[Any, ...]) -> list[Any]:
        """Note a container. Returns its entries, or none if only its length is compared."""
        if len(container) > _MAX_ENTRIES and not objects.holds_tensors(container):
            self.large_containers.append(container)
            return []
        if not isinstance(container, tuple):
            self.containers.append(container)
        return objects.content(container)

    def _visit_all(self, values: Iterable[Any]) -> None:
        for value in list(values):
            self._visit(value)

    def _follow_variable(self, holder: Any, name: str, reader: Reader) -> None:
        """Note a variable, and visit the object that it holds."""
        self._note_variable(holder, name, reader)
        self._visit(reader())

    def _note_variable(self, holder: Any, name: str, reader: Reader) -> None:
        """Note which object a variable holds, without visiting that object."""
        held = reader()
        is_new = (id(holder), name) not in self._noted and len(self.variables) < _MAX_VARIABLES
        if is_new and not isinstance(held, (type, types.ModuleType)):
            self._noted.add((id(holder), name))
            self.variables.append((reader, held))

    def _follow_state(self, holder: Any, name: str, reader: Reader) -> None:
        """Note a variable that the code of modules reads, and visit the tensors, modules and containers behind it.

        A function under its own name is left out: there are too many of them to compare each.
        """
        held = reader()
        is_code = isinstance(held, (property, staticmethod, classmethod)) or (
            isinstance(held, types.FunctionType) and held.__name__ == name
        )
        if not is_code:
            self._note_variable(holder, name, reader)
            self._visit_state(held)

    def _visit_state(self, value: Any) -> None:
        if isinstance(value, (torch.Tensor, nn.Module)):
            self._visit(value)
        elif isinstance(value, (tuple, *CONTAINERS)) and id(value) not in self._seen:
            self._seen[id(value)] = value
            for inner in self._note_container(value):
                self._visit_state(inner)

    def _visit_function(self, fn: types.FunctionType) -> None:
        if is_break(fn):  # it runs eagerly at each replay, so nothing that it reads is frozen
            return
        if objects.is_library_function(fn):  # a decorator: visit only what it wraps
            held = (objects.cell_value(cell) for cell in fn.__closure__ or ())
            self._visit_all(
                v for v in held if isinstance(v, (types.FunctionType, types.MethodType, partial, nn.Module))
            )
            return
        self.objects.append(fn)
        read = attribute_reads(fn.__code__)
        self._read |= read
        libraries = set()
        for holder, name, reader in objects.variables_of(fn):
            self._follow_variable(holder, name, reader)
            held = reader()
            if objects.is_settings(held):
                self._visit_plain_objects([(name, held)], read)
            elif isinstance(held, types.ModuleType):
                libraries.add(name)
        self._names |= read.of_self | read.of_other | {name for owner, name in read.of_named if owner not in libraries}
        self._visit_all((*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()))

    def _visit_attributes(self, holder: Any) -> None:
        table = objects.attributes_of(holder)
        for name in list(self._names):
            if name in table:
                self._follow_variable(holder, name, partial(table.get, name))
                continue
            member = getattr_static(type(holder), name, _ABSENT)
            if isinstance(member, (staticmethod, classmethod, property, types.FunctionType)):
                self._visit(member.fget if isinstance(member, property) else getattr(member, "__func__", member))
            elif isinstance(member, _VALUES):
                self._follow_variable(holder, name, partial(getattr, holder, name, None))
        self._visit(getattr_static(type(holder), "__call__", None))

    def _visit_module(self, root: nn.Module) -> None:
        for module in root.modules():
            if module is not root and id(module) in self._seen:
                continue
            self._seen[id(module)] = module
            self.modules.append(module)
            table = vars(module)
            names = [name for name in table if name not in _MODULE_ATTRIBUTES]
            for name in names:
                value = table[name]
                if isinstance(value, torch.Tensor) or objects.holds_tensors(value):
                    self._follow_variable(module, name, partial(table.get, name))
                elif isinstance(value, (types.FunctionType, types.MethodType, partial)):
                    self._visit(value)
            watched = [name for name in names if not isinstance(table[name], (torch.Tensor, *CONTAINERS))]
            self.module_attributes.append((table, [name for name in ("training", *watched) if name in table]))

    def _visit_module_code(self) -> None:
        """Visit what the ``forward`` of modules reads, and what the methods and functions that it calls read."""
        bases = {base for kind in set(map(type, self.modules)) for base in kind.__mro__ if base is not object}
        bases = {base for base in bases if base.__module__.partition(".")[0] != "torch"}
        for module in self.modules:
            self._follow_code(getattr_static(type(module), "forward", None))
        read = self._read
        for fn in list(self._code.values()):
            read |= attribute_reads(fn.__code__)
        holders: list[tuple[str, Any]] = []
        for fn in list(self._code.values()):
            for holder, name, reader in objects.variables_of(fn):
                self._follow_state(holder, name, reader)
                self._follow_code(reader())
                holders.append((name, reader()))
        for base in bases:
            for name in vars(base).keys() & read.names:
                self._follow_code(vars(base)[name])
                self._follow_state(base, name, partial(vars(base).get, name))
        self.read_numbers = []
        for module in list(self.modules):
            table = vars(module)
            names = (table.keys() & read.names) - _MODULE_ATTRIBUTES
            for name in names:
                if isinstance(table[name], CONTAINERS):
                    self._follow_state(module, name, partial(table.get, name))
            holders += [(name, table[name]) for name in names]
            self.read_numbers.append(
                (table, [name for name in names if isinstance(table[name], (int, float, complex))])
            )
        self._visit_plain_objects(holders, read)

    def _follow_code(self, value: Any) -> list[types.FunctionType]:
        """Add the user's functions behind ``value`` to the code that modules reach; returns them."""
        functions = objects.functions_behind(value)
        for fn in functions:
            self._code.setdefault(fn.__code__, fn)
        return functions

    def _visit_plain_objects(self, holders: list[tuple[str, Any]], read: AttributeReads) -> None:
        """Note the attributes that code reads of plain objects and settings, and of objects in those attributes.

        ``holders`` are the objects, each with the name that it is reached by. Their methods are followed.
        """
        seen: dict[tuple[str, int], Any] = {}
        read_of: defaultdict[str, set[str]] = defaultdict(set)
        for owner, name in read.of_named:
            read_of[owner].add(name)
        while holders and len(self.variables) < _MAX_VARIABLES:
            owner, holder = holders.pop()
            if (owner, id(holder)) in seen or not (objects.is_plain(holder) or objects.is_settings(holder)):
                continue
            seen[owner, id(holder)] = holder
            kind = holder if isinstance(holder, (type, types.ModuleType)) else type(holder)
            names = read.of_other | read_of[owner]
            names |= self._method_reads(kind, names)
            table, members = objects.attributes_of(holder), self._members_of(kind)
            for name in names:
                if name in table:
                    self._follow_state(holder, name, partial(table.get, name))
                    holders.append((name, table[name]))
                    self._follow_code(table[name])
                elif name in members and isinstance(members[name], _VALUES):
                    self._follow_state(holder, name, partial(getattr, holder, name, None))

    def _members_of(self, kind: Any) -> dict[str, Any]:
        if not isinstance(kind, type):
            return {}
        if kind not in self._members:
            self._members[kind] = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
        return self._members[kind]

    def _method_reads(self, kind: Any, names: frozenset[str]) -> frozenset[str]:
        """What the methods of a class read of its objects: those called by ``names``, and those that Python calls."""
        found: frozenset[str] = frozenset()
        members = self._members_of(kind) if isinstance(kind, type) and not objects.is_library_class(kind) else {}
        pending = {*names, *_IMPLICIT_METHODS} & members.keys()
        while pending:
            for fn in self._follow_code(members[pending.pop()]):
                read = attribute_reads(fn.__code__).of_self
                pending |= (read - found - names) & members.keys()
                found |= read
        return found
