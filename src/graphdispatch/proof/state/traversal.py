"""One traversal over what a callable reaches: where the objects of each role lead.

``StateWalk`` follows all of it, to put it back; ``StateReads`` what code reads, to compare it. Which attributes, slots
and entries count, and what is noted of them, is theirs to say. Nothing of the user's is called.
"""

import types
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ...runtime.attributes import attribute_table, content
from . import objects, snapshot
from .objects import CONTAINERS
from .snapshot import Accessor

Edges = Iterable[tuple[str, Any]]
"""What an object leads to, each with its label in a path."""
PLAIN_CONTAINERS = frozenset(CONTAINERS)


class Traversal:
    """Visits objects and what they lead to, each once, without a limit of depth. Holds all of them.

    ``_visit_`` with the name of a role says where its objects lead. If a subclass has ``_note_`` with that name, it is
    called before. Of what an ``Accessor`` reads, ``_held_in`` of a subclass says what counts.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._kinds = objects.Kinds()
        self._by_role: dict[str, tuple[Callable[..., Edges], Callable[..., None] | None]] = {
            role: (getattr(self, f"_visit_{role}"), getattr(self, f"_note_{role}", None)) for role in objects.ROLES
        }

    def visit(self, value: Any, path: Any) -> None:
        """Follow ``value``, which was met at ``path``: a chain (path of its owner, label)."""
        pending, seen, kinds = [(value, path)], self._seen, self._kinds
        while pending:
            value, path = pending.pop()
            role = kinds[type(value)].role
            if id(value) in seen:
                self._meet_again(value, path)
            elif role != "leaf" and self._meet(value, path):
                edges, note = self._by_role[role]
                if note is not None:
                    note(value, path)
                for label, held in edges(value, path):
                    if kinds[type(held)].role != "leaf":
                        pending.append((held, (path, label)))

    def has_met(self, value: Any) -> bool:
        """Whether it met this very object."""
        return id(value) in self._seen

    def _meet(self, value: Any, path: Any) -> bool:
        """Note an object; whether to follow it."""
        self._seen[id(value)] = value
        return True

    def _meet_again(self, value: Any, path: Any) -> None:
        """Note that another path leads to an object."""

    def _visit_trusted(self, value: Any, path: Any) -> Edges:
        return ()

    _visit_opaque = _visit_trusted

    def _visit_front_end(self, front_end: Any, path: Any) -> Edges:
        return [("", part) for part in objects.stands_for(front_end)]

    def _visit_tensor(self, tensor: torch.Tensor, path: Any) -> Edges:
        return [("", type(tensor)), *self._attributes_of(tensor, path)]

    def _visit_array(self, array: Any, path: Any) -> Edges:
        """Numbers; an array of objects nobody can compare."""
        if not array.dtype.hasobject:
            return self._held_in(array, snapshot.ARRAY, path)
        self._note_opaque(array, path)
        return ()

    def _note_opaque(self, value: Any, path: Any) -> None:
        """Note what nobody can compare."""
        raise NotImplementedError

    def _visit_module(self, module: types.ModuleType, path: Any) -> Edges:
        return [("", type(module))]  # of its variables code names those that count

    def _visit_method(self, method: Any, path: Any) -> Edges:
        yield "", type(method)
        yield from self._fixed_in(method, [("", part) for part in objects.stands_for(method)], path)
        if not issubclass(type(method), types.MethodType):
            yield from self._attributes_of(method, path)

    def _visit_compiled(self, value: Any, path: Any) -> Edges:
        """A function or descriptor of compiled code."""
        return self._fixed_in(value, [("", inner) for inner in objects.referents(value)], path)

    def _visit_cell(self, cell: types.CellType, path: Any) -> Edges:
        return [("", objects.cell_value(cell))]

    def _visit_reference(self, reference: Any, path: Any) -> Edges:
        label, held = ".get()" if type(reference) is ContextVar else "()", objects.referent(reference)
        default = objects.referents(reference) if held is objects.ABSENT else []
        yield from (("", type(reference)), (label, held))
        yield from self._fixed_in(reference, [("", one) for one in default], path)

    def _visit_generator(self, generator: Any, path: Any) -> Edges:
        return self._visit_instance(generator, path)

    def _visit_instance(self, value: Any, path: Any) -> Edges:
        """A container, or another object with attributes or slots."""
        kind = type(value)
        if kind is dict and "__builtins__" in value:
            return () if objects.is_module_table(value) else self._variables_of(value)
        if kind in PLAIN_CONTAINERS:
            return self._held_in(value, snapshot.ENTRIES, path)
        return self._parts_of(value, kind, path)

    def _parts_of(self, value: Any, kind: type, path: Any) -> Edges:
        edges = [("", kind), *self._attributes_of(value, path)]
        slots = self._kinds[kind].slots
        if slots:
            edges += self._held_in(value, snapshot.accessor_of_slots(slots), path)
        if issubclass(kind, CONTAINERS):
            edges += self._held_in(value, snapshot.ENTRIES, path)
        elif issubclass(kind, (tuple, frozenset)):
            held = [(f"[{index}]", inner) for index, inner in enumerate(content(value))]
            edges += self._fixed_in(value, held, path)
        elif not slots:
            edges += self._fixed_in(value, [("", inner) for inner in objects.referents(value)], path)
        return edges

    def _visit_class(self, kind: type, path: Any) -> Edges:
        """A class of the user, or one of torch's modules, of which others may replace methods."""
        users = self._kinds[kind].users
        edges = [("", base) for base in type.mro(kind)[1:] if base in users or issubclass(base, nn.Module)]
        if kind in users or issubclass(kind, nn.Module):
            edges += [("", type(kind)), *self._held_in(kind, snapshot.CLASS, path)]
        return edges

    def _visit_function(self, fn: types.FunctionType, path: Any) -> Edges:
        """Attributes of a function, and if it may run its closure and defaults, which nobody else can come by; of the
        library's decorators only what they wrap."""
        held = self._held_in(fn, snapshot.ATTRIBUTES, path)
        if objects.is_library_code(fn.__code__.co_filename):
            return [*held, *(("", one) for one in objects.wrapped_by(fn))]
        if not self._runs(fn):
            return held
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        return [*held, ("", fn.__defaults__), ("", fn.__kwdefaults__), *((f" {name}", cell) for name, cell in cells)]

    def _fixed_in(self, home: Any, held: list[tuple[str, Any]], path: Any) -> Edges:
        """What an object holds where nothing can be replaced."""
        return held

    def _attributes_of(self, value: Any, path: Any) -> Edges:
        return () if attribute_table(value) is None else self._held_in(value, snapshot.ATTRIBUTES, path)

    def _held_in(self, value: Any, accessor: Accessor, path: Any) -> Edges:
        """What counts of all the attributes, slots, entries or numbers that ``accessor`` reads."""
        raise NotImplementedError

    def _variables_of(self, table: dict[str, Any]) -> Edges:
        """What counts of the variables of a text that ``exec`` or ``runpy`` ran."""
        raise NotImplementedError

    def _runs(self, fn: types.FunctionType) -> bool:
        """Whether a function may run."""
        return True
