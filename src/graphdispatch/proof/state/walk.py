"""Walks over everything that a callable reaches, notes what it holds, and puts back what a run changed.

The walk follows attributes, slots, containers, partials, weak references, hooks and the user's classes, without a limit
of depth. A ``CodeTrace`` tells it of variables of modules, before code that names them runs. Nothing of the user's is
called.
"""

import random
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from itertools import chain, compress
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from ...backends.operators import is_strided
from ...runtime.signature import advice_for
from ..watch.bytecode import CHANGES
from . import objects, snapshot
from .objects import CONTAINERS, holds_modules
from .snapshot import Accessor, Changes, Saved, path_text
from .traversal import PLAIN_CONTAINERS, Edges, Traversal

_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_SHARED = (*CONTAINERS, tuple, frozenset, np.ndarray)
"""What code changes without the name of an attribute, once it has got hold of it."""
_MOST_FOLLOWED = 250_000
_ANY_CHANGES = Changes()


class StateWalk(Traversal):
    """What the ``roots`` and the code that runs reach, as it was when the walk met it. Holds all of it.

    ``overflow`` names the object at which the walk stopped, if there are too many. Meant for one thread, and for as
    long as a capture lasts.
    """

    def __init__(self, *roots: Any) -> None:
        super().__init__()
        self.roots = roots
        self.tensors: list[torch.Tensor] = []
        """Tensors wherever they are held, parameters and buffers included."""
        self.user_namespaces: list[types.ModuleType | dict[str, Any]] = []
        """Modules of the user that something holds, other than a variable of a module; and namespaces without one."""
        self.codes = set[int]()
        """The code of the functions that it met, by ``id``."""
        self._functions: list[tuple[types.FunctionType, Any]] = []
        self._parts: list[Any] = []
        """What each of them was made of, one after the other: they are many, and next to none changes."""
        self.has_opaque = False
        """Whether it met something that nobody can compare."""
        self._caches: list[Any] = []
        """The caches of results that it met, which may come to hold such."""
        self.has_changer = False
        """Whether it met a compiled function by which code may change containers under no name:
        ``partial(queue.append, 1)``."""
        self.has_unrestorable = False
        """Whether something opaque is no thread, lock or other machine: ``restore`` cannot put that back."""
        self.overflow: str | None = None
        self._saved: list[Saved] = []
        self._other_names: set[str] = set()
        """Of attributes by which it met containers again."""
        self._variables: dict[int, dict[str, Any]] = {}
        self._generators = [
            snapshot.save_random(((), name), home) for name, home in (("random", random), ("numpy.random", np.random))
        ]
        self._empty: list[tuple[Any, Any, Any]] = []
        """Empty containers of classes of Python's own, most of them for hooks, and empty tables of attributes of such
        and of functions, each with what it belongs to and the path of that."""
        named = [(root, objects.name_of(root)) for root in roots]
        for root, name in (*named, *((hooks, "hooks of all modules") for hooks in objects.GLOBAL_HOOKS)):
            self.visit(root, ((), name))
        self._save(((), "the default dtype or determinism"), None, snapshot.SETTINGS)

    def visit_variables(self, table: dict[str, Any], names: Iterable[str], where: str) -> None:
        """Note and follow the variables of a module under ``names``, which code is about to use."""
        noted = self._variables.get(id(table))  # which is `before` of what is saved, and grows with what code names
        if noted is None:
            noted = self._variables[id(table)] = {}
            self._saved.append(Saved(((), where), table, snapshot.accessor_of_variables(noted), noted))
        self._seen[id(table)] = table
        for name in names:
            if name not in noted:
                noted[name] = value = snapshot.variable(table, name)
                if not (holds_modules(table, name) or objects.shows(value, name)):
                    self.visit(value, ((), f"{where}.{name}"))

    def beyond(self, roots: Iterable[tuple[str, Any]]) -> "StateWalk | None":
        """A walk over what these objects reach, by name, and this walk has not met; None if there is nothing.
        Tensors count for their memory alone, and those among the roots themselves not at all."""
        walk = _WalkOfMade()
        # Settings of the process and hooks are this walk's.
        walk._saved, walk._empty, walk._generators, walk._seen = [], [], [], dict(self._seen)
        for name, root in roots:
            if not issubclass(type(root), torch.Tensor):
                walk.visit(root, ((), name))
        return walk if len(walk._seen) > len(self._seen) or walk.overflow else None

    def reaches_opaque(self) -> bool:
        """Whether it met something that nobody can compare, or a cache may have come to hold such."""
        made = self.beyond(("", objects.referents(cache)) for cache in self._caches)
        if self.has_opaque or made is None:
            return self.has_opaque
        return bool(made.has_opaque or made.overflow) or any(map(objects.own_attributes, made.tensors))

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

    def _filled(self) -> list[Saved]:
        """The containers that are no longer empty."""
        filled = compress(self._empty, map(itemgetter(0), self._empty))
        return [
            Saved(path, one, snapshot.ENTRIES, [])
            if container is one
            else Saved(path, one, snapshot.ATTRIBUTES, {"__class__": type(one)})
            for container, one, path in filled
        ]

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

    def restore(self, *, generators: bool = False, changes: Changes = _ANY_CHANGES) -> None:
        """Put back everything that is not as it was met. Random generators, which others may use, only with
        ``generators``.

        Only what code with such ``changes`` can have changed: another thread may have changed the rest. Raises the
        first error of what cannot be put back, once all else is.
        """
        failed: list[tuple[Saved, Exception]] = []
        held = (*self._saved, *self._filled(), *self._changed_functions(), *(self._generators if generators else ()))
        for saved in held:
            try:
                if saved.differs() and self._is_touched(saved, changes):
                    saved.restore(changes.names)
            except Exception as why:
                failed.append((saved, why))
        # What cannot be written itself, as a view that code may not write to, may show what was put back elsewhere.
        for saved, error in failed:
            if saved.differs():
                raise error

    def _is_touched(self, saved: Saved, changes: Changes) -> bool:
        """Whether code can have changed this. Of attributes and variables each one is looked at by itself."""
        label = f"{saved.path[1]}"
        if type(saved.value) is types.CellType:
            return changes.names is None or not label.startswith(" ") or label[1:] in changes.names
        if saved.accessor.is_by_name or not issubclass(type(saved.value), _SHARED) or changes.containers is None:
            return True
        used, name = changes.containers, _attribute_of(saved.path)
        return bool(used) and (not name or name in used or not self._other_names.isdisjoint(used))

    def _save(self, path: Any, value: Any, accessor: Accessor) -> Any:
        before = accessor.read(value)
        self._saved.append(Saved(path, value, accessor, before))
        return before

    def _meet_again(self, value: Any, path: Any) -> None:
        if issubclass(type(value), _SHARED):
            self._other_names.add(_attribute_of(path))

    def _meet(self, value: Any, path: Any) -> bool:
        """As ``Traversal._meet``; what is empty leads nowhere, and is most often many."""
        if len(self._seen) >= _MOST_FOLLOWED:
            self.overflow = self.overflow or path_text(path)
            return False
        self._seen[id(value)] = value
        kind = type(value)
        if not value if kind in PLAIN_CONTAINERS else kind is OrderedDict and not (value or value.__dict__):
            self._empty.append((value, value, path))
            if kind is OrderedDict:
                self._empty.append((value.__dict__, value, path))
            return False
        return True

    def _held_in(self, value: Any, accessor: Accessor, path: Any) -> Edges:
        """All of it, noted so that it can be put back."""
        if accessor is snapshot.CLASS and not self._kinds[value].users:
            return ()
        if accessor is snapshot.ATTRIBUTES and type(value) is types.FunctionType and not value.__dict__:
            self._empty.append((value.__dict__, value, path))
            return ()
        held = self._save(path, value, accessor)
        if accessor is snapshot.ARRAY:
            return ()
        if type(held) is list:
            keys = dict.keys(value) if issubclass(type(value), dict) else ()
            return chain(snapshot.labelled(value, held).items(), (("[key]", key) for key in keys))
        if accessor is snapshot.CLASS:
            held = {n: one for n, one in held.items() if not (objects.describes(n) or objects.shows(one, n))}
        return ((f".{name}", one) for name, one in held.items() if name not in objects.DESCRIBES)

    def _variables_of(self, table: dict[str, Any]) -> Edges:
        self.user_namespaces.append(table)
        return ()  # they are followed by name

    def _note_opaque(self, value: Any, path: Any) -> None:
        self.has_opaque = True
        self.has_unrestorable |= not objects.is_machine(type(value))

    def _note_tensor(self, tensor: torch.Tensor, path: Any) -> None:
        self.tensors.append(tensor)
        if type(tensor) in _PLAIN_TENSORS and is_strided(tensor):
            self._save(path, tensor, snapshot.accessor_of_tensor(tensor))

    def _note_module(self, module: types.ModuleType, path: Any) -> None:
        if objects.is_followed(type(module)) and objects.is_user_module(module):
            self.user_namespaces.append(module)

    def _note_compiled(self, value: Any, path: Any) -> None:
        self.has_changer |= value.__name__ in CHANGES
        self._note_class(value, path)

    def _note_class(self, value: Any, path: Any) -> None:
        if objects.hides(value):
            self._note_opaque(value, path)

    def _note_cell(self, cell: types.CellType, path: Any) -> None:
        self._save(path, cell, snapshot.CELL)

    def _note_reference(self, reference: Any, path: Any) -> None:
        if type(reference) is ContextVar:
            self._save(path, reference, snapshot.CONTEXT)

    def _note_generator(self, generator: Any, path: Any) -> None:
        self._generators.append(snapshot.save_random(path, generator))

    def _note_instance(self, value: Any, path: Any) -> None:
        if issubclass(type(value), objects.CACHES):
            self._caches.append(value)

    def _note_function(self, fn: types.FunctionType, path: Any) -> None:
        self._functions.append((fn, path))
        self._parts += snapshot.parts_of(fn)
        self.codes.add(id(fn.__code__))


class _WalkOfMade(StateWalk):
    """A walk over what a call makes: see ``beyond``. A break that gets it may change it, and nobody sees what comes to
    its caches."""

    def _note_instance(self, value: Any, path: Any) -> None:
        self.has_opaque |= issubclass(type(value), objects.CACHES)

    def _visit_tensor(self, tensor: torch.Tensor, path: Any) -> Edges:
        return ()

    def _note_tensor(self, tensor: torch.Tensor, path: Any) -> None:
        self.tensors.append(tensor)


def _attribute_of(path: Any) -> str:
    """The last attribute on the way to a container; empty if there is none, or a variable of a context comes after."""
    while path:
        path, label = path
        if f"{label}".startswith("."):
            name = f"{label}"[1:]
            return name if name.isidentifier() else ""
    return ""
