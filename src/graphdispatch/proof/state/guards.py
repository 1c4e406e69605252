"""Guards: what of a callable's state must be as it was when a graph was captured.

A graph holds the addresses of every parameter, buffer and captured tensor, and the code paths and constants that
Python chose. Without a guard, the graphs of a module that was moved, reloaded by assignment or switched to training
would go on using the old memory and the old path, without an error.
"""

import gc
import reprlib
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, call, is_
from typing import Any

import torch
import torch.utils._device
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...backends.operators import storage_key
from ...native.bound import GUARD
from ...runtime.attributes import attribute_table, content, dict_class_of
from ...runtime.constants import VALUES
from ...runtime.flatten import describe
from ...runtime.protocols import Guard
from . import objects
from .objects import ABSENT, equal_content, same_objects
from .reads import CodeNotes, Reader, Results, StateReads, has_memory

_SETTINGS: tuple[Callable[[], Any], ...] = (torch.get_default_dtype, torch._C._get_deterministic_algorithms)
"""Settings of the process that operators read when they are called, and that a graph freezes."""
_DEVICE = [(vars(torch.utils._device), [name]) for name in ("CURRENT_DEVICE",) if hasattr(torch.utils._device, name)]
"""The setting that torch keeps in a variable."""
_MOST_WAITED = 4096
_GONE = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)
"""What reading raises where something was deleted meanwhile."""
_training = attrgetter("training")
_FORMS: tuple[Callable[[torch.Tensor], Any], ...] = (
    *(type, torch.Tensor.size, torch.Tensor.stride, attrgetter("dtype")),
    *(torch.Tensor.is_conj, torch.Tensor.is_neg),
)
_requires_grad = attrgetter("requires_grad")
_flat = chain.from_iterable


def _unwrapped(table: Any) -> Any:
    """The dict that a table is, or that a class shows as one."""
    return gc.get_referents(table)[0] if type(table) is types.MappingProxyType else table


class StateGuard:
    """Fingerprint of what a callable reads besides its arguments; ``holds()`` tells whether it still fits.

    With a ``trace`` of the runs behind a graph, it compares what that code reads: the variables, and of every object
    that it can reach from there the attributes under the names in the code, and all of them where the code reads under
    other names. Without one, it compares the variables, modules and containers that tell which tensors the callable
    reaches, ``by_names`` in its code, too, or not. It compares ``tensors`` by shape and strides, and those whose
    storage's key is in ``used`` by address.

    Members, numbers and variables must be the same objects or equal constants. The guard holds the objects, so that no
    other tensor can get the address of one of them.

    The comparison runs in loops of C speed: tens of nanoseconds for each parameter and variable. Once it has held,
    ``native`` compares the same in one pass of C++, where the native core is in use. What ``native`` finds as it was is
    so; anything else Python compares again. Thread-safe.
    """

    __slots__ = ("__dict__", "__weakref__", "native")
    is_broken = False
    """Whether it did not hold when it was last looked at; the graph set changes that."""

    def __init__(
        self,
        roots: Iterable[Any],
        trace: CodeNotes | None = None,
        used: Collection[int] | None = None,
        *,
        by_names: bool = False,
    ) -> None:
        self._latest_hook = RemovableHandle.next_id  # first: what is registered from here on is new
        self.notes = CodeNotes()
        """What the code that the guard was made for reads; empty without a trace."""
        if trace is not None:
            self.notes.absorb(trace)
        with torch._C.DisableTorchFunction():  # nothing of the user's is called
            self._roots = tuple(roots)
            reads = StateReads(self._roots, trace, by_names=by_names)
        self.unguarded = reads.unguarded
        """What the code reads and nobody can compare, so that no graph may be made; empty if there is nothing."""
        self.missing = reads.missing
        """Names that the code looks up and that need not exist; an argument may have such an attribute."""
        self.modules = tuple(reads.modules)
        # Tables of hooks by the ids of their handles. Later hooks have larger ids.
        self._hooks: list[dict[int, Any]] = [*objects.GLOBAL_HOOKS, *reads.hooks]
        self._watched = (*reads.contents, *filter(None, self._hooks))
        self._named = [*_DEVICE, *reads.attributes]
        self._fixed = reads.fixed
        homes = (one for one in reads.objects if attribute_table(one) is not None)
        tables = (Reader(_reader_of_table(one), "__dict__", one) for one in homes)
        self._readers = [*map(Reader, _SETTINGS), *tables, *reads.readers]
        self._calls = [reader.call for reader in self._readers]
        with torch._C.DisableTorchFunction():
            tensors = list(filter(has_memory, reads.tensors))
            self.placed = tuple(t for t in tensors if used is None or storage_key(t) in used)
            self.tensors = (*self.placed, *(t for t in tensors if used is not None and storage_key(t) not in used))
        self._addresses, self._forms = self._places()
        self._objects = tuple(reads.objects)
        self._held = self._now()
        self._tables = tuple(reads.tables)
        self._keys = list(map(tuple, self._tables))
        self._absent = [(table, names) for table, names in reads.absent if names]
        self._trains = self._find_training()
        self._loose = self._find_loose()
        self.native: Any = None
        """The native guard, or None: before ``holds`` was first true, without the core, or where only Python can tell.
        Racing threads may make two; either serves."""
        self._wait = 1
        self._due = 1  # checks that hold until the next native guard is made; 0: never

    def holds(self) -> bool:
        """Whether the state is as it was when the guard was made."""
        native = self.native
        if native is not None and native.holds():
            return True
        try:
            if RemovableHandle.next_id != self._latest_hook and not self._no_new_hooks():
                return False
            now, held = self._now(), self._held
            if list(map(len, now)) != list(map(len, held)) or not all(map(is_, _flat(now), _flat(held))):
                if not all(map(same_objects, now, held)):
                    return False
                self._held = now  # equal constants, which are found faster the next time
            if self._places() != (self._addresses, self._forms) or list(map(tuple, self._tables)) != self._keys:
                return False
            if self._absent and not all(table.keys().isdisjoint(names) for table, names in self._absent):
                return False
        except _GONE:
            return False
        if self._due:
            self._compile(native)
        return True

    def _compile(self, native: Any) -> None:
        """Make a native guard of the present state, in place of ``native``, which no longer holds.

        One that has never held was made in vain; then the next is made later.
        """
        if self._due > 1:
            self._due -= 1
            return
        if native is not None:
            self._wait = 1 if native.has_held else min(2 * self._wait, _MOST_WAITED)
        self.native = compile_guard(self)
        self._due = 0 if self.native is None else self._wait

    def _now(self) -> list[tuple[Any, ...]]:
        """Everything that is compared by identity, as it is now: of each table, of each container, and of the rest."""
        now = []
        for table, names in self._named:
            now.append(tuple(map(table.__getitem__, names)))
        for one in self._watched:
            now.append((*one, *one.values()) if type(one) is dict else tuple(content(one)))
        return [*now, tuple(map(call, self._calls)), tuple(map(type, self._objects))]

    def _places(self) -> tuple[list[int], list[list[Any]]]:
        """Where the tensors that runs used lie now, and the shapes, strides and dtypes of all, and which are lazy."""
        with torch._C.DisableTorchFunction():
            forms = map(map, _FORMS, repeat(self.tensors))
            return list(map(torch.Tensor.data_ptr, self.placed)), list(map(list, forms))

    def renewed(self) -> "StateGuard | None":
        """A guard of the present state, if that differs from the guard's own only by containers, each in all places of
        another one that held the same; else None. It watches what is there now."""
        moved: dict[int, Any] = {}
        try:
            now, held = self._now(), self._held
            pairs = zip(_flat(now), _flat(held), strict=False)
            is_same = list(map(len, now)) == list(map(len, held)) and all(
                a is b or equal_content(a, b, moved) for a, b in pairs
            )
        except _GONE:
            return None
        is_kept = any(id(one) in moved and id(home) not in moved for home, one in self._fixed)
        if not is_same or not moved or is_kept:
            return None

        def follow(found: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(moved.get(id(one), one) for one in found)

        new = object.__new__(StateGuard)
        vars(new).update(vars(self), is_broken=False)
        for name in ("_watched", "_objects", "_tables"):
            setattr(new, name, follow(getattr(self, name)))
        new._held = list(map(follow, held))
        new._named = [(moved.get(id(table), table), names) for table, names in self._named]
        new._fixed = list(map(follow, self._fixed))
        if self._num_objects() != new._num_objects():
            return None  # code may compare whether two objects are one
        native, new.native = self.native, None
        new._wait = 1 if native is not None and native.has_held else min(2 * self._wait, _MOST_WAITED)
        new._due = new._wait + 1
        return new if new.holds() else None  # else one of the old ones is still in another place

    def _num_objects(self) -> int:
        """How many objects it watches, and finds in their places."""
        return len(set(map(id, chain(*self._held, self._watched, self._objects, *self._fixed))))

    def _no_new_hooks(self) -> bool:
        """Whether hooks were registered meanwhile only elsewhere in the process, and none on the callable's modules."""
        latest = RemovableHandle.next_id
        if any(number >= self._latest_hook for table in self._hooks for number in table):
            return False
        self._latest_hook = latest  # so that a later call need not look again; racing threads set nearly the same
        return True

    def has_moved(self) -> bool:
        """Whether one of the tensors no longer lies where it lay: this state does not come back."""
        return self._places()[0] != self._addresses

    def within(self, other: Guard) -> bool:
        """Whether ``other`` compares all addresses that this guard compares."""
        return {id(tensor) for tensor in self.placed} <= {id(tensor) for tensor in other.placed}

    @property
    def trainable(self) -> bool:
        """Of a guard that has just been found to hold: whether a call may have to be differentiated. A captured tensor
        requires a gradient, and it belongs to no module, or one of the modules is in training mode."""
        native = self.native
        answer = None if native is None else native.trainable()
        if answer is not None:
            return bool(answer)
        trains = any(map(_training, self._owners())) if self._trains is None else self._trains
        return any(map(_requires_grad, self.placed if trains else compress(self.placed, self._loose)))

    def _find_loose(self) -> list[bool]:
        """Of each tensor, whether it belongs to no module, such as a prompt that trains beside a frozen model. An
        attribute of a module that was computed, as by ``weight_norm``, belongs to it as what that was computed of."""
        owned = {id(one) for m in self.modules for one in chain(m._parameters.values(), m._buffers.values())}
        held = {id(one) for m in self.modules for one in (attribute_table(m) or {}).values()}
        with torch._C.DisableTorchFunction():
            return [id(one) not in owned and (one.is_leaf or id(one) not in held) for one in self.tensors]

    def _owners(self) -> list[nn.Module]:
        """The modules that have parameters or buffers of their own: whether an activation trains says nothing."""
        held = ((m, chain(m._parameters.values(), m._buffers.values())) for m in self.modules)
        return [module for module, members in held if any(one is not None for one in members)]

    def _find_training(self) -> bool | None:
        """Whether a call can train: no module has tensors, or one that has some is in training mode. None if the guard
        cannot tell, because it does not compare all these flags."""
        kinds = {type(module) for module in self.modules}
        bases = {base for kind in kinds for base in kind.__mro__[:-1]}
        if any("training" in vars(base) or "__getattribute__" in vars(base) for base in bases):
            return None
        rows = zip(self._named, self._held, strict=False)
        flags = {id(table): held[names.index("training")] for (table, names), held in rows if "training" in names}
        found = [flags.get(id(attribute_table(module)), objects.ABSENT) for module in self._owners()]
        return None if any(type(flag) is not bool for flag in found) else not found or any(found)

    def _held_attributes(self) -> Iterator[tuple[Any, Any, Any]]:
        """Each attribute, variable and entry of a dict that is compared: its table, its name, and what it held."""
        groups = iter(self._held)
        for table, names in self._named:
            yield from ((table, name, held) for name, held in zip(names, next(groups), strict=True))
        for container, entries in zip(self._watched, groups, strict=False):
            half = len(entries) // 2 if type(container) is dict else 0
            yield from ((container, key, held) for key, held in zip(entries[:half], entries[half:], strict=False))

    def change(self) -> str:
        """What of the state is not as it was: the first attribute, variable or entry of a dict with what it held and
        holds, or in general words."""
        for table, name, held in self._held_attributes():
            now = table.get(name, objects.ABSENT)
            if now is not held and not equal_content(now, held):
                if issubclass(type(now), torch.Tensor) and issubclass(type(held), torch.Tensor):
                    return f"{name}: another tensor in its place; copy_() into the old one keeps its graphs"
                was, is_now = _shown(held), _shown(now)
                return f"{name}: another object in its place ({was})" if was == is_now else f"{name}: {was} -> {is_now}"
        if not all(call() for call in self._calls if isinstance(call, Results)):
            return "a functools.lru_cache lost what it held: raise its maxsize, or call it with no new tensors"
        return "a weight, a module, an entry of a container, or an attribute that was not there"

    @property
    def storages(self) -> set[int]:
        """The keys of the storages whose address ``holds`` compares."""
        return set(map(storage_key, self.placed))


def compile_guard(guard: StateGuard) -> Any:
    """A native guard that expects what ``guard`` does; None if there is no core, or the guard compares something that
    only Python can.

    It takes what is expected from ``guard``, and reads nothing anew but what it then compares with that: another thread
    may be changing it.
    """
    latest = guard._latest_hook
    if GUARD is None or any(number >= latest for table in guard._hooks for number in table):
        return None
    addresses = chain(guard._addresses, repeat(None))  # of a tensor that no run used, the extent alone counts
    *groups, read, types_held = guard._held
    kinds, *extents = guard._forms[:3]
    try:
        tables = _tables(guard, groups)
        contents, sequences = _contents(guard._watched, groups[len(guard._named) :])
        native = GUARD(
            absent=ABSENT,
            handles=_raw(vars(RemovableHandle)),
            latest=latest,
            trains=-1 if guard._trains is None else int(guard._trains),
            tables=tables,
            contents=contents,
            sequences=sequences,
            readers=(
                *(("__class__", value, None, held) for value, held in zip(guard._objects, types_held, strict=True)),
                *(reader.expecting(held) for reader, held in zip(guard._readers, read, strict=True)),
            ),
            tensors=tuple(zip(guard.tensors, kinds, addresses, guard._loose, *extents, strict=False)),
            hooks=tuple((table,) for table in guard._hooks),
        )
        # The core reads dtypes and what is lazy, which have no names there.
        return native if guard._places()[1] == guard._forms else None
    except TypeError:
        return None


def _raw(table: Any) -> dict[str, Any]:
    """The dict behind the attributes of a class; a dict itself. Raises ``TypeError`` for a subclass of dict."""
    found = _unwrapped(table)
    if type(found) is not dict:
        raise TypeError("a subclass of dict may find its entries in another way")
    return found


def _contents(watched: Iterable[Any], held: Iterable[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Dicts with their keys and values, and other containers with their entries."""
    dicts, sequences = [], []
    for container, entries in zip(watched, held, strict=False):
        kind, half = type(container), len(entries) // 2
        if issubclass(kind, dict) and dict_class_of(container) is dict:
            dicts.append((container, entries[:half], entries[half:]))
        else:
            sequences.append((container if kind in (list, set, deque) else _Entries(container), entries))
    return tuple(dicts), tuple(sequences)


def _tables(guard: StateGuard, held: Iterable[Any]) -> tuple[tuple[Any, ...], ...]:
    """Tables with all their keys in order, or None where these are not compared, with names and values, and with names
    that are not there."""
    found: dict[int, list[Any]] = {}
    for table, keys in zip(guard._tables, guard._keys, strict=True):
        raw = _raw(table)
        found[id(raw)] = [raw, tuple(keys), ()]
    for table, absent in guard._absent:
        raw = _raw(table)
        found.setdefault(id(raw), [raw, None, ()])[2] += tuple(absent)
    for (table, names), values in zip(guard._named, held, strict=False):
        raw = _raw(table)
        found.setdefault(id(raw), [raw, None, ()]).extend(chain(*zip(names, values, strict=True)))
    return tuple((table, keys, tuple(entries), none) for table, keys, none, *entries in found.values())


def _reader_of_table(value: Any) -> Callable[[], Any]:
    """What reads where an object's attributes are: at C speed, where its class leaves that to Python."""
    kind = type(value)
    tables = [vars(base) for base in kind.__mro__[:-1]]
    descriptors = [table["__dict__"] for table in tables if "__dict__" in table]
    is_plain = all(type(each) is types.GetSetDescriptorType for each in descriptors)
    if kind.__dictoffset__ and is_plain and not any("__getattribute__" in table for table in tables):
        return partial(getattr, value, "__dict__")
    return partial(attribute_table, value)


def _shown(value: Any) -> str:
    """A value in one line, without code of the user's: a constant, or a container of constants, as it is written."""
    if value is objects.ABSENT:
        return "nothing"
    inner = content(value) if type(value) in (tuple, list, dict, set) else []
    return reprlib.repr(value) if inner and all(type(one) in VALUES for one in inner) else describe(value)


class _Entries:
    """The entries of an array, or of a list, set or deque whose class may iterate in another way."""

    __slots__ = ("container",)

    def __init__(self, container: Any) -> None:
        self.container = container

    def __iter__(self) -> Iterator[Any]:
        return iter(content(self.container))
