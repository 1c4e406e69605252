"""What code reads: notes of the code that ran, and the state that it reads, as far as the callable reaches it.

The code tells names, and not whose attributes they are. So every object within reach is compared under all these names:
too much now and then, and never too little.
"""

import builtins
import copyreg
import os
import random
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial, partialmethod
from operator import attrgetter, is_, methodcaller
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...backends.code_events import is_own_code, is_torch_code
from ...backends.operators import is_strided
from ...runtime.attributes import attribute_table, content
from ..watch.bytecode import code_reads, original_of
from . import objects, snapshot
from .objects import holds_modules, is_library_code
from .snapshot import MEMBERS, Accessor, form_of, save_random
from .traversal import Edges, Traversal


class Reader(NamedTuple):
    """How to read one thing that is compared: by a call, and in the native guard's terms. ``further`` is a slot's
    descriptor."""

    call: Callable[[], Any]
    kind: str = "call"
    subject: Any = None
    further: Any = None

    def expecting(self, value: Any) -> tuple[str, Any, Any, Any]:
        """What the native guard takes: the reader, and what it must read."""
        return self.kind, self.call if self.kind == "call" else self.subject, self.further, value


_SET_FIELDS = ("names", "optional", "library_names", "unreached_functions", "variables")


class CodeNotes:
    """Notes of the code that ran: the names that it holds, its variables, and the code itself. Those of several runs
    add up. A guard compares what they name."""

    def __init__(self) -> None:
        self.codes: dict[int, types.CodeType] = {}
        """By ``id``: the code of two copies of a file is equal, and some has no hash."""
        self.names: set[str] = set()
        """Names of attributes that code of the user reads."""
        self.optional: set[str] = set()
        """Names that code of the user looks up by ``getattr`` or ``hasattr``, so that they need not exist."""
        self.library_names: set[str] = set()
        """Those that code of libraries reads."""
        self.unreached_functions: set[types.FunctionType | types.MethodType] = set()
        """Closures and methods that ran, to which neither roots nor variables lead."""
        self.tables: dict[int, dict[str, Any]] = {}
        """The namespaces that code of the user uses, by their ``id``."""
        self.variables: set[tuple[int, str]] = set()
        """The variables that it looks up there, each by the ``id`` of its namespace and its name. Where one is not
        there, a builtin serves, or a default."""
        self.reads_whole = False
        """Whether code reads objects under names that do not stand in it."""

    def lacks(self, other: "CodeNotes") -> bool:
        """Whether ``other`` notes code of the user, or what any code reads, that these notes do not have."""
        users = (key for key, code in other.codes.items() if not is_library_code(code.co_filename))
        if any(key not in self.codes for key in users) or other.reads_whole > self.reads_whole:
            return True
        return any(getattr(other, kind) - getattr(self, kind) for kind in _SET_FIELDS)

    def absorb(self, other: "CodeNotes") -> None:
        """Note all that ``other`` notes."""
        self.codes |= other.codes
        self.tables |= other.tables
        for kind in _SET_FIELDS:
            getattr(self, kind).update(getattr(other, kind))
        self.reads_whole = self.reads_whole or other.reads_whole

    @property
    def used(self) -> set[str]:
        """The names of attributes and variables that the code uses."""
        return self.names.union((name for _, name in self.variables), *(c.co_freevars for c in self.codes.values()))

    def note_variables(self, table: dict[str, Any], names: Iterable[str]) -> None:
        """Note that code looks variables of a namespace up."""
        self.tables[id(table)] = table
        self.variables.update((id(table), name) for name in names)

    def by_table(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Each namespace with the names of its variables."""
        found: defaultdict[int, list[str]] = defaultdict(list)
        for key, name in self.variables:
            found[key].append(name)
        return ((self.tables[key], names) for key, names in found.items())


HELD = ""
"""Stands among the names of modules for all that attributes hold: code looks whether such a module is loaded."""
IDENTITY = "is"
"""Stands among the names for code that compares objects."""


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has an address to compare: not a lazy parameter, or one of a class that computes in its own way.
    Of these the identity is compared, and what they hold."""
    is_own = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_own and not is_lazy(tensor) and is_strided(tensor) and not tensor._is_zerotensor()


def _grad(tensor: torch.Tensor) -> Any:
    return tensor.grad if tensor.is_leaf else None  # of others torch warns


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # those of inference mode have none


TENSOR_READERS: dict[str, Callable[[Any], Any]] = {
    **{name: attrgetter(name) for name in ("_backward_hooks", "grad_fn", "is_leaf", "output_nr")},
    **{name: attrgetter(name) for name in ("requires_grad", "retains_grad")},
    **{
        name: methodcaller(name)
        for name in ("_is_view", "is_conj", "is_inference", "is_neg", "is_pinned", "is_shared", "storage_offset")
    },
    **dict.fromkeys(
        ("storage", "typed_storage", "untyped_storage", "_typed_storage"),
        lambda tensor: tensor.untyped_storage().nbytes() - tensor.nbytes,
    ),
    **dict.fromkeys(("grad", "_grad"), _grad),
    "_base": methodcaller("_is_view"),
    "_version": _version,
}
"""Metadata of a tensor by attribute name, with how to read it without warnings or copies."""
ARGUMENT_READERS: dict[str, Callable[[Any], Any]] = {**TENSOR_READERS, "stride": torch.Tensor.stride}
"""The same of an argument; strides where it leaves gaps in memory: else they follow from what each call compares."""


def _tensor_readers(tensor: torch.Tensor, names: Collection[str]) -> list[Reader]:
    """What to compare of a tensor besides its address and form: what code reads under ``names``."""
    if not has_memory(tensor):
        return [Reader(partial(getattr, tensor, "requires_grad"))] if "requires_grad" in names else []
    return [Reader(partial(TENSOR_READERS[name], tensor)) for name in sorted(TENSOR_READERS.keys() & names)]


DIFFERENTIATES = torch.autograd.graph._engine_run_backward.__code__
"""What runs for each backward pass."""


def _is_watched() -> bool:
    """Whether somebody comes between a backward pass and its numbers: hooks of saved tensors, or a look for NaN."""
    return torch.is_anomaly_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _readers_of_leaf(tensor: torch.Tensor) -> list[Reader]:
    """What to compare of a tensor besides where a call differentiates: no code need name it."""
    if not (has_memory(tensor) and tensor.is_leaf):
        return []
    trains = tensor.requires_grad or isinstance(tensor, nn.Parameter)
    reads: list[Callable[[Any], Any]] = [attrgetter("requires_grad")]
    reads += [_grad, _hooks_of] if trains else []
    return [Reader(partial(read, tensor)) for read in reads]


def _hooks_of(leaf: torch.Tensor) -> int:
    """Which hooks a backward pass runs at a leaf, as a number: of later ones the identities are larger."""
    ids = [*(leaf._backward_hooks or ()), *(leaf._post_accumulate_grad_hooks or ())]
    return len(ids) << 32 | max(ids, default=0)


_AROUND_MODES = (f"{os.sep}contextlib.py", os.path.join("torch", "overrides.py"))
"""Where Python code runs around each function of torch while a mode sees it. It compares errors and modes alone."""


_KEYS_BY_IDENTITY = (torch.Tensor.__hash__.__code__, torch.utils.weak.WeakIdRef.__init__.__code__)
"""What runs where a tensor is a key."""


def metadata_names(codes: Collection[types.CodeType], *, compares: bool, has_gaps: bool) -> list[str]:
    """What of ``ARGUMENT_READERS`` all this code of the user reads, of whatever tensors, of which one ``has_gaps``; and
    ``IDENTITY`` where any code compares objects, or it ``compares`` them in a way that stands in no code."""
    others = [c for c in codes if not (is_own_code(c.co_filename) or c.co_filename.endswith(_AROUND_MODES))]
    theirs = [code for code in others if not is_library_code(code.co_filename)]
    # Torch's attention compares the query with the key.
    compares = compares or any(code_reads(code).compared for code in theirs)
    torchs = (code for code in others if is_torch_code(code.co_filename))
    compares = compares or any(not code_reads(code).compared.isdisjoint(code.co_varnames) for code in torchs)
    used = set().union(*(code_reads(code).attributes for code in theirs))
    compares = (
        compares or any(code in _KEYS_BY_IDENTITY for code in others) or not used.isdisjoint(("_cdata", "is_set_to"))
    )
    if any(original_of(code) is not None for code in others):  # functions that the compiler put inline may read it, too
        used, compares = {*used, "requires_grad"}, True
    readers = ARGUMENT_READERS if has_gaps else TENSOR_READERS
    return sorted(readers.keys() & used) + [IDENTITY] * compares


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
TABLES = frozenset((*MEMBERS, *_HOOKS, *_BACKWARD_HOOKS))
"""What a module keeps its members and hooks in: compared by identity here; its entries are compared besides. The hooks
of the backward pass count where a call differentiates."""
_BY_TORCH = frozenset(("training", "forward", "_call_impl"))
"""Attributes of modules that torch's code names, and that of a model need not."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"} - TABLES
_WRAPPERS = (property, staticmethod, classmethod, partial, partialmethod)
_CLASSES_READ_WHOLE = (nn.ParameterList, nn.ParameterDict)
"""Classes of torch whose own code reads attributes under names that stand nowhere."""
_TENSOR_ATTRIBUTES = frozenset(dir(torch.Tensor))
_RUN_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
"""What a function runs by, which may change in place."""
_HELD_BY_FUNCTIONS = frozenset(("__closure__", "__defaults__", "__kwdefaults__"))
"""By these names code comes at what a function holds that does not run."""
_SAID_OF_FUNCTIONS = ("__name__", "__qualname__", "__module__", "__doc__")
"""What it says of itself."""
_STATES = {random.Random: "getstate", np.random.RandomState: "get_state", np.random.BitGenerator: "state"}
"""Names by which code reads the state of a generator, and does not change it."""


class Results:
    """Tells whether a ``functools.lru_cache`` holds all that it held when this was made; it may hold more.

    While its own table has the same keys and values, nothing else is looked at.
    """

    __slots__ = ("_kept", "_latest", "_table")

    def __init__(self, cache: Any) -> None:
        self._table = objects.results_of(cache)
        self._kept = self._latest = content(self._table)

    def __call__(self) -> bool:
        """Whether it holds all that it held."""
        now, latest = content(self._table), self._latest
        if len(now) == len(latest) and all(map(is_, now, latest)):
            return True
        if not set(map(id, self._kept)).issubset(map(id, now)):
            return False
        self._latest = now  # objects that are held, so that none can get the address of another
        return True


class StateReads(Traversal):
    """What the code in ``trace`` reads of what the ``roots`` and the traced variables reach.

    Without a trace: what tells which modules and tensors the callable reaches; ``by_names`` also through modules and
    classes, under the names in the code that it may run. Holds what it found.
    """

    def __init__(self, roots: Iterable[Any], trace: CodeNotes | None, *, by_names: bool = False) -> None:
        super().__init__()
        self.modules: list[nn.Module] = []
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        """Objects, modules, tensors and arrays with attributes: their class is compared, and whether their ``__dict__``
        itself is another."""
        self.contents: list[Iterable[Any]] = []
        """Containers, those of the parameters, buffers and submodules of modules among them."""
        self.fixed: list[tuple[Any, Any]] = []
        """Objects that stand where nothing can be replaced, each with what holds it: among the roots, in a tuple, a
        method or an object of compiled code."""
        self.attributes: list[tuple[Mapping[str, Any], list[str]]] = []
        """Tables of attributes and variables, and the names in them that are compared."""
        self.tables: list[Mapping[str, Any]] = []
        """Tables whose keys are compared, in order: a name that was not there may hide one of a class."""
        self.absent: list[tuple[Mapping[str, Any], frozenset[str]]] = []
        """Tables of variables, and the names that the code looked up in vain there."""
        self.readers: list[Reader] = []
        self.hooks: list[dict[int, Any]] = []
        self.unguarded = ""
        self._is_traced, self._by_names = trace is not None, by_names
        self._notes = notes = CodeNotes() if trace is None else trace
        self._names = frozenset(notes.names)
        self._library_names = self._names | notes.library_names
        self._all = notes.reads_whole
        self._names_of: dict[type, frozenset[str] | None] = {}
        self._differentiates = id(DIFFERENTIATES) in notes.codes
        self._hook_names = _HOOKS + _BACKWARD_HOOKS * self._differentiates
        self._passed_over = _MODULE_ATTRIBUTES.union(() if self._differentiates else _BACKWARD_HOOKS)
        self._constants: list[tuple[Mapping[str, Any], list[str]]] = []
        """Without a trace: tables, and the names of constants there, of which it counts only that they are constant."""
        self._of_constants: list[Iterable[Any]] = []
        """Containers of such."""
        hooks = (hook for hooks in objects.GLOBAL_HOOKS for hook in hooks.values())
        self._follow(self._fixed_in(None, [("", one) for one in (*roots, *hooks)], None))
        self._follow(("", fn) for fn in notes.unreached_functions)
        for table, names in notes.by_table():
            self._follow(self._compare_variables(table, names))
            self.absent.append((table, frozenset(names) - table.keys()))
        self.missing = notes.optional - _TENSOR_ATTRIBUTES
        self._compare_process()
        if by_names:
            self.readers.append(Reader(self._are_constant))

    def _compare_process(self) -> None:
        """What no object holds: if code looks whether modules are loaded whose names attributes hold, those of all that
        are compared; what is around a backward pass; and which type autocast has for code that names it."""
        if any("autocast" in name for name in self._names):
            devices = {"cpu", getattr(torch.accelerator.current_accelerator(), "type", "cpu")}
            self.readers += (Reader(partial(torch.get_autocast_dtype, device)) for device in sorted(devices))
        if self._differentiates:
            self.readers.append(Reader(_is_watched))
            if _is_watched():
                self._refuse("hooks of saved tensors or anomaly detection around the call, which a backward pass heeds")
        if (id(sys.modules), HELD) in self._notes.variables:
            held = {one for table, names in self.attributes for one in map(table.get, names) if type(one) is str}
            self.attributes.append((sys.modules, [name for name in held if name in sys.modules]))
            self.absent.append((sys.modules, frozenset(held) - sys.modules.keys()))

    def _follow(self, edges: Edges) -> None:
        for _, held in edges:
            self.visit(held, None)

    def _follow_named(self, homes: Iterable[Any], names: frozenset[str]) -> Edges:
        """What code may reach under its ``names`` from these variables of it: what modules and classes of the user have
        there, and the methods of objects."""
        seen, pending = dict[int, Any](), list(homes)
        while pending:
            home = pending.pop()
            if id(home) in seen:
                continue
            seen[id(home)] = home
            is_class = issubclass(type(home), type)
            users = objects.user_classes(home if is_class else type(home))
            if objects.is_user_module(home) or (is_class and users):
                table = vars(home) if is_class else attribute_table(home) or {}
                pending += (found := self._watch_named(table, names))
                yield from (("", held) for held in found)
            else:
                yield from self._follow_methods(users, names)

    def _follow_methods(self, users: Sequence[type], names: Collection[str]) -> Edges:
        """The methods of classes of the user under these names, and what the classes have under the names in the code
        of those."""
        found, pending = set[str](), set(names)
        while pending:
            found |= pending
            held = [one for base in users for one in self._watch_named(vars(base), pending)]
            yield from (("", one) for one in held)
            codes = (fn.__code__ for one in held for fn in objects.functions_in(one))
            pending = set().union(*map(objects.names_in, codes)) - found

    def _watch_named(self, table: Mapping[str, Any], names: Collection[str]) -> list[Any]:
        """What a table has under these names, which is compared."""
        return [one for _, one in self._compare(table, names)] if any(name in table for name in names) else []

    def _are_constant(self) -> bool:
        """Whether all constants still are: nothing came in their place that may train."""
        named = (table[name] for table, names in self._constants for name in names)
        return objects.are_constant(named) and all(objects.are_constant(content(one)) for one in self._of_constants)

    def _fixed_in(self, home: Any, held: list[tuple[str, Any]], path: Any) -> Edges:
        self.fixed += ((home, one) for _, one in held if self._kinds[type(one)].role == "instance")
        return held

    def _held_in(self, value: Any, accessor: Accessor, path: Any) -> Edges:
        if accessor is snapshot.ENTRIES:
            return self._read_entries(value)
        if accessor is snapshot.CLASS:
            return self._read_class(value)
        if accessor is snapshot.ARRAY:  # by its bytes as they lie in memory
            self.readers += (Reader(partial(read, value)) for read in (np.ndarray.tobytes, form_of))
            return ()
        return self._read_attributes(value) if accessor is snapshot.ATTRIBUTES else self._read_slots(value)

    def _read_attributes(self, value: Any) -> Edges:
        table, kind = attribute_table(value), type(value)
        is_bare = issubclass(kind, (torch.Tensor, types.FunctionType)) and not objects.own_attributes(value)
        if table is None or (is_bare and not self._notes.optional):
            return ()
        if table or kind is not types.FunctionType:  # they are many, and have attributes one by one
            self.objects.append(value)
        names = self._named(kind, table)
        if not issubclass(kind, nn.Module):
            return self._compare(table, names)
        names = names.intersection(table) | _BY_TORCH | TABLES  # of few: the code has very many
        compared = self._compare(table, names, is_library=not self._kinds[kind].users)
        return [*compared, *self._members_of(value, table)]

    def _members_of(self, module: nn.Module, table: dict[str, Any]) -> Edges:
        """What a module holds for torch."""
        self.modules.append(module)
        for name in MEMBERS:
            members: Any = table.get(name)
            # Also one that is empty and may get its first. A scripted module keeps its members elsewhere.
            if issubclass(type(members), dict):
                self.contents.append(members)
                yield from members.items()
        for name in self._hook_names:
            if name in table:
                self.hooks.append(table[name])
                yield from table[name].items()
        if not isinstance(table.get("_parameters"), dict):
            yield from (("", tensor) for tensor in (*module.parameters(), *module.buffers()))

    def _read_slots(self, value: Any) -> Edges:
        slots = self._kinds[type(value)].slots
        names = self._named(type(value), slots)
        for name, member in slots.items():
            is_slot = "__slots__" in vars(member.__objclass__)
            if not self._is_traced or name in names or not is_slot:  # compiled code reads its own under no name
                read = partial(objects.slot_value, member, value)
                self.readers.append(Reader(read, *(("slot", value, member) if is_slot else ())))
                yield "", read()

    def _read_entries(self, container: Any) -> Edges:
        is_constant = objects.are_constant(content(container))
        (self.contents if self._is_traced or not is_constant else self._of_constants).append(container)
        return () if is_constant else [("", one) for one in content(container)]

    def _variables_of(self, table: dict[str, Any]) -> Edges:
        own = (name for name in table if not f"{name}".startswith("__"))
        return self._compare_variables(table, own if self._all else self._names)

    def _note_opaque(self, value: Any, path: Any) -> None:
        what = " of objects" if self._kinds[type(value)].role == "array" else ""
        self._refuse(f"a {type(value).__module__}.{type(value).__qualname__}{what}")

    def _note_tensor(self, tensor: torch.Tensor, path: Any) -> None:
        self.tensors.append(tensor)
        self.readers += _tensor_readers(tensor, self._names)
        if self._differentiates:
            self.readers += _readers_of_leaf(tensor)

    def _visit_method(self, method: Any, path: Any) -> Edges:
        yield from super()._visit_method(method, path)
        if self._by_names and type(method) is types.MethodType:
            for fn in objects.functions_in(method.__func__):
                yield from self._follow_named([method.__self__], objects.names_in(fn.__code__))

    def _note_compiled(self, value: Any, path: Any) -> None:
        if objects.hides(value):
            self._refuse(f"{value.__name__}() under another name")

    _note_class = _note_compiled

    def _note_cell(self, cell: types.CellType, path: Any) -> None:
        self.readers.append(Reader(partial(objects.cell_value, cell), "cell", cell))

    def _note_reference(self, reference: Any, path: Any) -> None:
        kind = {ContextVar: "context", weakref.ref: "reference", weakref.KeyedRef: "reference"}.get(type(reference))
        self.readers.append(Reader(partial(objects.referent, reference), kind or "call", reference))

    def _note_generator(self, generator: Any, path: Any) -> None:
        if any(issubclass(type(generator), home) and name in self._names for home, name in _STATES.items()):
            self.readers.append(Reader(partial(save_random((), generator).accessor.read, None)))

    def _note_instance(self, value: Any, path: Any) -> None:
        if self._is_traced and issubclass(type(value), objects.CACHES):
            self.readers.append(Reader(Results(value)))

    def _visit_module(self, module: types.ModuleType, path: Any) -> Edges:
        """A module is compared as any object, since code may pass it on. Of one of a library it is noted what is read
        there, where code has it as a variable. Where code reads names that do not stand in it, its settings count."""
        yield from super()._visit_module(module, path)
        table = vars(module)
        present = [name for name in self._names if name in table]
        is_whole = self._all and objects.is_whole(module)
        if is_whole:
            present += (name for name in objects.setting_names(module) if name not in self._names)
            self.tables.append(table)
        # What comes to be there later may be read then, where else the module's ``__getattr__`` would give it.
        finds = ("__getattr__" in table or hasattr(type(module), "__getattr__")) and objects.is_user_module(module)
        self.absent.append((table, (self._names if finds else frozenset(self._notes.optional)) - table.keys()))
        if is_whole or id(table) not in self._notes.tables or objects.is_user_module(module):
            yield from self._compare_variables(table, present)

    def _read_class(self, kind: type) -> Edges:
        """What code reads of a class of the user. Of a class of torch's modules, which others patch, what ran and the
        names of the code."""
        users, table, nested = self._kinds[kind].users, vars(kind), f"{kind.__qualname__}."
        if not self._is_traced:
            return self._follow_methods(users, ("forward", "__call__")) if self._by_names else ()
        if kind not in users:
            copyreg._slotnames(kind)  # type: ignore[attr-defined]  # else a pickle would add what this adds
            codes = self._notes.codes
            ran = (name for name, held in table.items() if id(getattr(held, "__code__", None)) in codes)
            self._compare(table, self._names.intersection(table).union(ran))
            return ()
        self.readers.append(Reader(partial(getattr, kind, "__mro__"), "__mro__", kind))
        read = [
            name
            for name, held in table.items()
            if self._is_read(name, held, is_whole=self._all and _is_data_of(nested, held))
        ]
        held = ((n, one) for n, one in self._compare(table, read) if not objects.shows(one, n))
        return [*held, *dict.items(table.get("_member_map_", {}))]

    def _is_read(self, name: str, member: Any, *, is_whole: bool) -> bool:
        """Whether code reads a class attribute: a method that ran, or another one under a name of the code; data under
        any name if it reads the class as a whole (``getattr(self, self.names[0])``)."""
        kind, codes = type(member), self._notes.codes
        if name in self._names:
            return True
        if kind is types.FunctionType:
            return id(member.__code__) in codes
        functions = objects.functions_in(member)
        if functions and not self._kinds[kind].users:
            return any(id(fn.__code__) in codes for fn in functions)
        if name[:2] == "__":  # of which operators, functions and patterns read many under no name
            return not objects.describes(name)
        return is_whole or issubclass(kind, _WRAPPERS)

    def _runs(self, fn: types.FunctionType) -> bool:
        """Whether its code ran, or any may have; or code may take it to pieces."""
        may_run = not self._is_traced or self._all or not _HELD_BY_FUNCTIONS.isdisjoint(self._names)
        return may_run or id(fn.__code__) in self._notes.codes

    def _visit_function(self, fn: types.FunctionType, path: Any) -> Edges:
        """What a function runs by, if its code ran, and what code reads of it as of any object."""
        edges = super()._visit_function(fn, path)
        if objects.is_library_code(fn.__code__.co_filename):
            return edges
        ran = self._runs(fn)
        parts = [name for name in _RUN_OF_FUNCTIONS if name in self._names or (ran and getattr(fn, name))]
        parts += [name for name in _SAID_OF_FUNCTIONS if name in self._names or self._all]
        self.readers += (Reader(partial(getattr, fn, name), name, fn) for name in parts)
        if not ran:
            return edges
        edges = [*edges, ("", fn.__dict__.get("__wrapped__"))]
        if not self._is_traced:
            edges += self._compare_variables(fn.__globals__, objects.names_in(fn.__code__))
        if self._by_names:
            names = objects.names_in(fn.__code__)
            cells = map(objects.cell_value, fn.__closure__ or ())
            variables = (table.get(name) for table in (fn.__globals__, sys.modules) for name in names)
            edges += self._follow_named([*cells, *variables], names)
        return edges

    def _compare_variables(self, table: Mapping[str, Any], names: Iterable[str]) -> Edges:
        """Compare variables of these names; those to follow. Code that names a builtin shows what it does with it."""
        present = [name for name in names if name in table]
        if not present:
            return ()
        self.attributes.append((table, present))
        held = ((n, table[n]) for n in present if not (self._is_traced and holds_modules(table, n)))
        return [(n, one) for n, one in held if vars(builtins).get(n) is not one and not objects.shows(one, n)]

    def _named(self, kind: type, own: Iterable[str]) -> frozenset[str]:
        """The names to compare of an object of a class: those of the user's code, where libraries wrote some of the
        class of their code, too; all its ``own``, if code reads them under names that do not stand in it."""
        if not self._is_traced:
            return frozenset(own)
        if kind not in self._names_of:
            self._names_of[kind] = self._names_for(kind)
        names = self._names_of[kind]
        return frozenset(own) if names is None else names

    def _names_for(self, kind: type) -> frozenset[str] | None:
        if self._all or issubclass(kind, _CLASSES_READ_WHOLE):
            return None
        users = self._kinds[kind].users
        if any("__getattr__" in vars(base) or "__getattribute__" in vars(base) for base in users):
            return None
        is_library = not {nn.Module, *users}.issuperset(objects.written_classes(kind))
        return self._library_names if is_library else self._names

    def _compare(self, table: Mapping[str, Any], names: Iterable[str], *, is_library: bool = False) -> Edges:
        """Compare the attributes in ``table`` under ``names``; without a trace, those that are no constants, and of the
        others whether they become such, but for those of a library's module. Those to follow."""
        self.tables.append(table)
        named = names if isinstance(names, frozenset) else frozenset(names)
        kept = chosen = [n for n in table if n in named and n not in self._passed_over]
        if not self._is_traced:
            constant = [n for n in kept if n not in TABLES and objects.are_constant([table[n]])]
            chosen = [n for n in kept if n not in constant]
            if not is_library:
                self._constants.append((table, constant))
        if chosen:
            self.attributes.append((table, chosen))
        return [(n, table[n]) for n in kept if n not in TABLES]

    def _refuse(self, what: str) -> None:
        if self._is_traced:
            self.unguarded = self.unguarded or what


def _is_data_of(nested: str, member: Any) -> bool:
    """Whether a class attribute is data, or a class that the class itself has made: not one of somebody else's."""
    return not issubclass(type(member), type) or str(member.__qualname__).startswith(nested)
