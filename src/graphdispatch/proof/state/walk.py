"""Walks over everything that a callable reaches, notes what it holds, and puts back what a run changed.

The walk follows attributes, slots, containers, partials, weak references, hooks and the user's classes, without a limit
of depth. A ``CodeTrace`` tells it of variables of modules, before code that names them runs, and of functions before
they run: what their closures and defaults hold nobody else can come by. Nothing of the user's is called.
"""

import random
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from ...backends.operators import is_strided
from ...runtime.attributes import attribute_table, content
from ...runtime.signature import advice_for
from ..breaks import is_break
from . import objects, snapshot
from .objects import ABSENT, CONTAINERS, holds_modules
from .snapshot import Accessor, Saved, path_text

_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_PLAIN_CONTAINERS = frozenset(CONTAINERS)
_SHARED = (*CONTAINERS, np.ndarray)
"""What code changes without the name of an attribute, once it has got hold of it."""
_MOST_FOLLOWED = 250_000
Edges = Iterator[tuple[str, Any]]


class StateWalk:
    """What the ``roots`` and the code that runs reach, as it was when the walk met it. Holds all of it.

    ``overflow`` names the object at which the walk stopped, if there are too many. Meant for one thread, and for as
    long as a capture lasts.
    """

    def __init__(self, *roots: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        """Tensors wherever they are held, parameters and buffers included."""
        self.user_namespaces: list[types.ModuleType | dict[str, Any]] = []
        """Modules of the user that something holds, other than a variable of a module; and namespaces without one."""
        self._waiting: dict[int, list[tuple[types.FunctionType, Any]]] = {}
        """The functions that it met by the ``id`` of their code."""
        self._functions: list[tuple[types.FunctionType, Any]] = []
        self._parts: list[Any] = []
        """What each of them was made of, one after the other: they are many, and next to none changes."""
        self._run = set[int]()
        """The code that runs, by ``id``."""
        self._follows_all = False
        self.has_opaque = False
        """Whether it met something that nobody can compare, or a cache, which may come to hold such."""
        self.has_accessor = False
        """Whether it met a compiled function by which code may read or write attributes under any name."""
        self.has_identity = False
        """Whether it met one by which code may compare objects by identity."""
        self.unrestorable: list[Any] = []
        """All paths of the opaque objects that are no threads, locks or other machines: ``restore`` cannot put them
        back."""
        self.overflow: str | None = None
        self._seen: dict[int, Any] = {}
        self._kinds = objects.Kinds()
        self._saved: list[Saved] = []
        self._variables: dict[int, dict[str, Any]] = {}
        self._whole = set[int]()
        """The modules of which it noted which variables they have, by the ``id`` of their tables."""
        self._held_at: dict[int, Saved] = {}
        """By the ``id`` of its path, what was first saved there; of the first ``_num_held`` of those saved."""
        self._num_held = 0
        self._generators = [
            snapshot.save_random(((), name), home) for name, home in (("random", random), ("numpy.random", np.random))
        ]
        self._empty: list[tuple[Any, Any]] = []
        """Empty containers of classes of Python's own, most of them for hooks, each with its path."""
        self._again: list[tuple[Any, Any]] = []
        """Containers that it met once more, with the other path."""
        named = [(root, objects.name_of(root)) for root in roots]
        for root, name in (*named, *((hooks, "hooks of all modules") for hooks in objects.GLOBAL_HOOKS)):
            self.visit(root, ((), name))
        self._save(((), "the default dtype or determinism"), None, snapshot.SETTINGS)

    def visit(self, value: Any, path: Any) -> None:
        """Follow ``value``, which was met at ``path``: a chain (path of its owner, label)."""
        pending, seen, kinds = [(value, path)], self._seen, self._kinds
        while pending:
            value, path = pending.pop()
            if id(value) in seen:
                if kinds[type(value)].role == "opaque":
                    self._opaque_edges(value, path)
                elif issubclass(type(value), _SHARED):
                    self._again.append((value, path))
                continue
            if kinds[type(value)].role == "leaf":
                continue
            if len(seen) >= _MOST_FOLLOWED:
                self.overflow = self.overflow or path_text(path)
                return
            seen[id(value)] = value
            kind = type(value)
            if not value if kind in _PLAIN_CONTAINERS else kind is OrderedDict and not (value or value.__dict__):
                self._empty.append((value, path))
                continue
            pending += [(i, (path, label)) for label, i in self._edges(value, path) if kinds[type(i)].role != "leaf"]

    def visit_functions(self, code: types.CodeType) -> bool:
        """Follow the closures and defaults of the functions with this code, which is about to run; whether it has met
        one."""
        is_new = id(code) not in self._run
        self._run.add(id(code))
        for fn, path in self._waiting.get(id(code), ()) if is_new else ():
            self._visit_parts(fn, path)
        return id(code) in self._waiting

    def visit_all_functions(self) -> None:
        """Follow the closures and defaults of all functions that it has met and will meet: nobody tells which run, or
        code takes functions apart."""
        if not self._follows_all:
            self._follows_all = True
            for fn, path in self._functions.copy():
                self._visit_parts(fn, path)

    def _visit_parts(self, fn: types.FunctionType, path: Any) -> None:
        code, held = fn.__code__, list[tuple[str, Any]]([("", fn.__defaults__), ("", fn.__kwdefaults__)])
        if not objects.is_library_code(code.co_filename):
            held += ((f" {name}", cell) for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True))
        for label, one in held:
            self.visit(one, (path, label))

    def visit_variables(self, table: dict[str, Any], names: Iterable[str], where: str) -> None:
        """Note and follow the variables of a module under ``names``, which code is about to use."""
        noted = self._variables.get(id(table))  # which is `before` of what is saved, and grows with what code names
        if noted is None:
            noted = self._variables[id(table)] = {}
            self._saved.append(Saved(((), where), table, snapshot.accessor_of_variables(noted), noted))
        self._seen[id(table)] = table
        for name in names:
            if name not in noted:
                noted[name] = value = table.get(name, ABSENT)
                if not (holds_modules(table, name) or objects.is_recognized(value, name)):
                    self.visit(value, ((), f"{where}.{name}"))

    def visit_all_variables(self, table: dict[str, Any], where: str) -> list[str]:
        """Note which variables a module has, and give their names: code is about to use any of them."""
        if id(table) not in self._whole:
            self._whole.add(id(table))
            self._save(((), where), table, snapshot.NAMES)
        return [name for name in table if not name.startswith("__")]

    def beyond(self, roots: Iterable[tuple[str, Any]]) -> "StateWalk | None":
        """A walk over what these objects reach, by name, and this walk has not met; None if none of it can change.
        Tensors among the roots themselves do not count."""
        walk = StateWalk()
        # Settings of the process and hooks are this walk's.
        walk._saved, walk._empty, walk._generators, walk._seen = [], [], [], dict(self._seen)
        walk.visit_all_functions()
        for name, root in roots:
            if not issubclass(type(root), torch.Tensor):
                walk.visit(root, ((), name))
        return (
            walk
            if walk._saved or walk._functions or walk._empty or walk._generators or walk.has_opaque or walk.overflow
            else None
        )

    def has_met(self, value: Any) -> bool:
        """Whether it met this very object."""
        return id(value) in self._seen

    def change(self) -> str | None:
        """The first of ``changes``, or None; with what to use instead where a cache is among what it met."""
        change = next(self.changes(), None)
        if change is None:
            return None
        advice = advice_for(self._seen.values())
        return f"{change} ({advice})" if advice else change

    def changes(self) -> Iterator[str]:
        """What is not as it was met, each in words (``Model.cache.layers[1].k was rebound``). Random generators are not
        compared (see ``drew``)."""
        for saved in (*self._saved, *self._filled(), *self._changed_functions()):
            how = saved.change()
            if how is not None:
                yield path_text((saved.path, how))

    def _filled(self) -> Iterator[Saved]:
        """The containers that are no longer empty."""
        ordered = [container for container, _ in self._empty if type(container) is OrderedDict]
        if not (any(map(itemgetter(0), self._empty)) or any(map(vars, ordered))):
            return
        for container, path in self._empty:
            if container:
                yield Saved(path, container, snapshot.ENTRIES, [])
            if type(container) is OrderedDict and container.__dict__:
                yield Saved(path, container, snapshot.ATTRIBUTES, {"__class__": OrderedDict})

    def _changed_functions(self) -> Iterator[Saved]:
        """The functions, if some are made of other objects than when they were met."""
        fns = [fn for fn, _ in self._functions]
        if not all(map(is_, chain.from_iterable(map(snapshot.parts_of, fns)), self._parts)):
            held = iter(self._parts)
            for fn, path in self._functions:
                yield Saved(path, fn, snapshot.FUNCTION, {label: next(held) for label in snapshot.PARTS})

    def drew(self) -> str | None:
        """Which random generator of Python or NumPy is not as it was met, or None. Other threads may have drawn."""
        return next((path_text(saved.path) for saved in self._generators if saved.change() is not None), None)

    def restore(self, *, generators: bool = False, names: Collection[str] | None = None) -> None:
        """Put back everything that is not as it was met. Random generators, which others may use, only with
        ``generators``.

        With ``names``, only attributes of these names, and what containers hold that some path of such names leads to:
        code that uses no others did not change the rest, and another thread may have. Raises the first error of what
        cannot be put back, once all else is.
        """
        failed: list[tuple[Saved, Exception]] = []
        for saved in (
            *self._saved,
            *self._filled(),
            *self._changed_functions(),
            *(self._generators if generators else ()),
        ):
            try:
                is_shared = (
                    names is not None and issubclass(type(saved.value), _SHARED) and not saved.accessor.is_by_name
                )
                if saved.differs() and (not is_shared or self._is_reached(saved, names or (), set())):
                    saved.restore(names)
            except Exception as why:
                failed.append((saved, why))
        # What cannot be written itself, as a view that code may not write to, may show what was put back elsewhere.
        for saved, error in failed:
            if saved.differs():
                raise error

    def unrestorable_by(self, names: Collection[str], whole: Collection[type]) -> str | None:
        """The path of an object that ``restore`` cannot put back, and that code can come to which uses these names, and
        reads objects of the classes ``whole`` under any name; or None."""
        for saved in self._saved[self._num_held :]:
            self._held_at.setdefault(id(saved.path), saved)
        self._num_held = len(self._saved)
        return next((path_text(path) for path in self.unrestorable if self._is_named(path, names, whole, set())), None)

    def _is_named(self, path: Any, names: Collection[str], whole: Collection[type], visited: set[int]) -> bool:
        """Whether such code can come to what is at the end of a path: not to an attribute of another name, nor to what
        a container holds that it cannot come to. Of what else holds it not all paths are there, so it counts."""
        parent, label = path
        holder = self._held_at.get(id(parent))
        if holder is not None and holder.accessor.is_by_name and f"{label}".startswith("."):
            kind = holder.value if issubclass(type(holder.value), type) else type(holder.value)
            return label[1:] in names or any(issubclass(kind, one) or issubclass(one, kind) for one in whole)
        if holder is None or holder.accessor is not snapshot.ENTRIES:
            return True
        if id(holder) in visited:
            return False
        visited.add(id(holder))
        return any(self._is_named(p, names, whole, visited) for p in self._paths_of(holder))

    def _paths_of(self, saved: Saved) -> list[Any]:
        return [saved.path, *(path for value, path in self._again if value is saved.value)]

    def _is_reached(self, saved: Saved, names: Collection[str], visited: set[int]) -> bool:
        """Whether code that uses only these names can come to a container: by one of the paths that lead to it."""
        if id(saved) in visited:
            return False
        visited.add(id(saved))
        for parent, label in self._paths_of(saved):
            outer = None
            while parent and outer is None and f"{label}".startswith("["):
                outer = next((other for other in self._saved if other.path is parent), None)
                parent, label = parent
            if outer is not None:
                if self._is_reached(outer, names, visited):
                    return True
            elif not f"{label}".startswith(".") or label[1:] in names:
                return True
        return False

    def _save(self, path: Any, value: Any, accessor: Accessor) -> Any:
        before = accessor.read(value)
        self._saved.append(Saved(path, value, accessor, before))
        return before

    def _edges(self, value: Any, path: Any) -> Edges:
        """What ``value`` holds, with labels; notes what of it can change."""
        if type(value) in _PLAIN_CONTAINERS:
            return self._entries(value, path)
        role = self._kinds[type(value)].role
        if role in ("leaf", "trusted"):
            return iter(())
        edges: Callable[[Any, Any], Edges] = getattr(self, f"_{role}_edges")
        return edges(value, path)

    def _front_end_edges(self, front_end: Any, path: Any) -> Edges:
        return (("", part) for part in objects.stands_for(front_end))

    def _method_edges(self, method: Any, path: Any) -> Edges:
        yield from (("", part) for part in (*objects.stands_for(method), type(method)))
        if not issubclass(type(method), types.MethodType):
            yield from (
                (name, held) for name, held in self._attributes(method, path) if not objects.describes(name[1:])
            )

    def _module_edges(self, module: types.ModuleType, path: Any) -> Edges:
        """Nothing: code that runs names the variables that count."""
        if objects.is_followed(type(module)) and objects.is_user_module(module):
            self.user_namespaces.append(module)
        return iter([("", type(module))])

    def _array_edges(self, array: Any, path: Any) -> Edges:
        """Nothing, or what nobody can compare: an array of objects."""
        if array.dtype.hasobject:
            return self._opaque_edges(array, path)
        self._save(path, array, snapshot.ARRAY)
        return iter(())

    def _compiled_edges(self, value: Any, path: Any) -> Edges:
        self.has_accessor |= objects.is_accessor(value)
        self.has_identity |= objects.is_by_identity(value)
        self.has_opaque |= objects.is_finder(value)
        return (("", inner) for inner in objects.referents(value))

    def _cell_edges(self, cell: Any, path: Any) -> Edges:
        return iter(self._save(path, cell, snapshot.CELL).items())

    def _reference_edges(self, reference: Any, path: Any) -> Edges:
        is_variable = type(reference) is ContextVar
        held = self._save(path, reference, snapshot.CONTEXT) if is_variable else {"()": objects.referent(reference)}
        return chain([("", type(reference))], held.items())

    def _generator_edges(self, generator: Any, path: Any) -> Edges:
        self._generators.append(snapshot.save_random(path, generator))
        return self._attributes(generator, path)

    def _attributes(self, value: Any, path: Any) -> Edges:
        if attribute_table(value) is None:
            return iter(())
        is_tensor = issubclass(type(value), torch.Tensor)
        held = self._save(path, value, snapshot.OF_TENSORS if is_tensor else snapshot.ATTRIBUTES)
        return ((f".{name}", inner) for name, inner in held.items())

    def _entries(self, container: Any, path: Any) -> Edges:
        if type(container) is dict and "__builtins__" in container:
            if not objects.is_module_table(container):
                self.user_namespaces.append(container)
            return iter(())  # variables, which are followed by name
        entries = self._save(path, container, snapshot.ENTRIES)
        if not entries:
            return iter(())
        keys = dict.keys(container) if issubclass(type(container), dict) else ()
        return chain(snapshot.labelled(container, entries).items(), (("[key]", key) for key in keys))

    def _opaque_edges(self, value: Any, path: Any) -> Edges:
        """What nobody can compare."""
        self.has_opaque = True
        if not objects.is_machine(type(value)):
            self.unrestorable.append(path)
        return iter(())

    def _instance_edges(self, value: Any, path: Any) -> Edges:
        """An object with attributes, slots or entries: all of them."""
        kind = type(value)
        yield from self._attributes(value, path)
        slots = self._kinds[kind].slots
        if slots:
            yield from self._save(path, value, snapshot.accessor_of_slots(slots)).items()
        if issubclass(kind, CONTAINERS):
            yield from self._entries(value, path)
        elif issubclass(kind, (tuple, frozenset)):
            yield from ((f"[{index}]", inner) for index, inner in enumerate(content(value)))
        elif not slots:
            self.has_opaque |= issubclass(kind, objects.CACHES)
            yield from (("", inner) for inner in objects.referents(value))
        yield "", kind

    def _tensor_edges(self, tensor: torch.Tensor, path: Any) -> Edges:
        self.tensors.append(tensor)
        if type(tensor) in _PLAIN_TENSORS and is_strided(tensor):
            self._save(path, tensor, snapshot.accessor_of_tensor(tensor))
        return chain([("", type(tensor))], self._attributes(tensor, path))

    def _function_edges(self, fn: types.FunctionType, path: Any) -> Edges:
        """Attributes of a function, and its closure and defaults once it runs; of the library's decorators only what
        they wrap."""
        code = fn.__code__
        if objects.is_library_code(code.co_filename):
            yield from (("", held) for held in objects.wrapped_by(fn))
            if is_break(fn):
                return
        self._functions.append((fn, path))
        self._parts += snapshot.parts_of(fn)
        self._waiting.setdefault(id(code), []).append((fn, path))
        if fn.__dict__:
            yield "", fn.__dict__
        if self._follows_all or id(code) in self._run:
            self._visit_parts(fn, path)

    def _class_edges(self, kind: type, path: Any) -> Edges:
        """The data of a class of the user, and what the closures of its methods hold."""
        self.has_accessor |= objects.is_accessor(kind)
        for base in self._kinds[kind].users:
            if base is not kind:
                yield "", base
            else:
                yield "", type(kind)
                held = self._save(path, kind, snapshot.CLASS)
                for name, inner in held.items():
                    is_own = objects.describes(name) or name in ("__dict__", "__weakref__")
                    if not (is_own or objects.is_recognized(inner, name)):
                        yield f".{name}", inner
