"""Guards: fingerprints of the state that must be as it was when a graph was captured.

A graph holds the addresses of every parameter, buffer and captured tensor, and the code paths that ``training`` chose.
Without a guard, the graphs of a module that was moved, reloaded by assignment or switched to training would go on
using the old memory and the old path, without an error.
"""

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from copy import copy
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..backends.operators import storage_key
from .discovery import StateDiscovery
from .objects import CONSTANTS, CONTAINERS, cell_value, content, live_table

__all__ = ["StateGuard", "StateSnapshot", "WorkspaceGuard", "same_callable", "same_objects", "wants_gradient"]

_END = (object(),)
_GLOBAL_HOOKS = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_training = attrgetter("training")
_address, _numel, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.numel, torch.Tensor.is_contiguous
_requires_grad = attrgetter("requires_grad")


class StateGuard:
    """Fingerprint of the modules, tensors and variables that a callable reaches (``discovery.py`` finds them);
    ``holds()`` tells whether it still fits.

    It compares identities and addresses in loops of C speed: tens of nanoseconds for each parameter, module and
    variable, and nothing for kinds of state that the callable does not have. It holds the objects, so that no other
    tensor can get the address of one of them. Thread-safe.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._latest_hook = RemovableHandle.next_id  # first: what is registered from here on is new
        found = StateDiscovery(fn)
        self._modules = tuple(found.modules)
        self._holders = (*found.modules, *found.objects, *found.containers)
        # A scripted module keeps its members elsewhere; its parameters are compared by address below.
        members = [
            t for m in found.modules for t in (m._parameters, m._buffers, m._modules) if t and isinstance(t, dict)
        ]
        # Tables of hooks by the ids of their handles. Later hooks have larger ids.
        self._hooks: list[dict[int, Any]] = list(_GLOBAL_HOOKS)
        self._hooks += [vars(m)[name] for m in found.modules for name in _HOOKS if name in vars(m)]
        watched = [part for t in (*found.containers, *filter(None, self._hooks)) for part in _parts(t)]
        # A mark after each container, so that an entry cannot move from one container to the next unseen.
        marked = [part for values in watched for part in (values, _END)]
        contents: tuple[Iterable[Any], ...] = (*(t.values() for t in members), *marked)
        # At least two names, so that the reader gives a tuple.
        numbers: list[Callable[[], Any]]
        numbers = [partial(itemgetter(*names, names[0]), table) for table, names in found.read_numbers if names]
        variables = [reader for reader, _ in found.variables]
        contents += (_END,) if contents else ()
        contents += (_Readers(numbers, several=True),) if numbers else ()
        self._contents = (*contents, _Readers(variables, several=False)) if variables else contents
        self._held = tuple(chain.from_iterable(self._contents))
        parameters = [t for m in found.modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
        tensors = dict.fromkeys((*parameters, *found.tensors, *filter(torch.is_tensor, self._held)))
        # Lazy parameters and subclasses have no address to compare; ``_held`` compares their identity.
        plain = (torch.Tensor, nn.Parameter)
        self._tensors = tuple(t for t in tensors if type(t) in plain and t.layout is torch.strided)
        self._addresses = list(map(_address, self._tensors))
        # These tell whether a tensor was cut or transposed in place. Shape and strides would tell more, but take three
        # times as long.
        self._numels = list(map(_numel, self._tensors))
        self._contiguous = list(map(_is_contiguous, self._tensors))
        self._readers = [partial(itemgetter(*names), table) for table, names in found.module_attributes if names]
        self._constants = [read() for read in self._readers]
        self._tables: list[Sized] = [*(table for table, _ in found.module_attributes), *found.large_containers]
        self._sizes = list(map(len, self._tables))

    def holds(self) -> bool:
        """Whether the state is as it was when the guard was made.

        All members, numbers and variables must be the same objects or equal constants, the tensors must lie where they
        lay with the same extent, and the modules' other attributes must have the same values.
        """
        try:
            if RemovableHandle.next_id != self._latest_hook and not self._no_new_hooks():
                return False
            if self._held and not all(map(is_, chain.from_iterable(self._contents), self._held)):
                now = list(chain.from_iterable(self._contents))
                if not same_objects(now, list(self._held)):
                    return False
            if self._tensors and (
                list(map(_address, self._tensors)) != self._addresses
                or list(map(_numel, self._tensors)) != self._numels
                or list(map(_is_contiguous, self._tensors)) != self._contiguous
            ):
                return False
            if self._readers and list(map(call, self._readers)) != self._constants:
                return False
            return not self._tables or list(map(len, self._tables)) == self._sizes
        except (KeyError, RuntimeError, TypeError, ValueError):  # deleted meanwhile, or it cannot be compared
            return False

    def _no_new_hooks(self) -> bool:
        """Whether hooks were registered meanwhile only elsewhere in the process, and none on the callable's modules."""
        latest = RemovableHandle.next_id
        known = self._latest_hook
        if any(number >= known for table in self._hooks for number in table):
            return False
        self._latest_hook = latest  # so that a later call need not look again; racing threads set nearly the same
        return True

    def attributes(self) -> list[Any]:
        """The present attributes and entries of what the callable reaches, two levels deep."""
        outer = [value for holder in self._holders for value in content(holder)]
        return outer + [value for holder in outer if isinstance(holder, (dict, list)) for value in content(holder)]

    def snapshot(self) -> "StateSnapshot":
        """The attributes and entries of what the callable reaches as they are now, to put them back."""
        return StateSnapshot(self._holders)

    @property
    def trainable(self) -> bool:
        """Whether a call may have to be differentiated: a captured tensor requires a gradient, and if the callable
        reaches modules, one of them is in training mode. Looked up anew each time."""
        training = not self._modules or any(map(_training, self._modules))
        return training and any(map(_requires_grad, self._tensors))

    @property
    def storages(self) -> set[int]:
        """The keys of the storages whose address ``holds`` compares."""
        return set(map(storage_key, self._tensors))

    def __len__(self) -> int:
        return len(self._tensors)


class StateSnapshot:
    """What the attributes and containers that a callable reaches hold, two levels deep; ``restore`` puts it back."""

    def __init__(self, holders: Iterable[Any]) -> None:
        outer = [table for holder in holders if (table := live_table(holder)) is not None]
        inner = [value for table in outer for value in content(table) if isinstance(value, CONTAINERS)]
        self._saved = [(table, copy(table)) for table in {id(table): table for table in (*outer, *inner)}.values()]

    def restore(self) -> None:
        """Put back every attribute and entry that was rebound, added or removed."""
        for table, before in self._saved:
            if not same_objects(*(list(chain(*_parts(now))) for now in (table, before))):
                table.clear()
                (table.update if isinstance(table, (dict, set)) else table.extend)(before)


class _Readers:
    """Iterates over what some readers give now; with ``several``, over the entries of the tuples that they give."""

    __slots__ = ("readers", "several")

    def __init__(self, readers: list[Callable[[], Any]], several: bool) -> None:
        self.readers = readers
        self.several = several

    def __iter__(self) -> Iterator[Any]:
        given = map(call, self.readers)
        return chain.from_iterable(given) if self.several else given


def _parts(container: Collection[Any]) -> tuple[Iterable[Any], ...]:
    """Live views of what a container holds: the keys and the values of a dict, the entries of a list."""
    return (container, container.values()) if isinstance(container, dict) else (container,)


class WorkspaceGuard:
    """Holds memory that a graph reads but that no ``StateGuard`` covers, such as a library's workspace. It is neither
    the graph's own nor one of its inputs. ``holds()`` tells whether it is still where it was, and as large."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._spans = self._read()

    def holds(self) -> bool:
        """Whether no storage has grown, shrunk or moved."""
        return self._read() == self._spans

    def _read(self) -> list[tuple[int, int]]:
        return [(storage.data_ptr(), storage.nbytes()) for storage in self._storages]

    def __len__(self) -> int:
        return len(self._storages)


def wants_gradient(value: Any) -> bool:
    """Whether an argument is a tensor that requires a gradient, or an object that holds such a tensor."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return any(isinstance(inner, torch.Tensor) and inner.requires_grad for inner in tree_leaves(content(value)))


def same_callable(a: Any, b: Any) -> bool:
    """Whether two callables do the same: they are one object, or the same code over the same objects.

    So a lambda that is made again in a loop counts as the same callable, unless it captured something else.
    """
    if a is b:
        return True
    if isinstance(a, partial) and isinstance(b, partial):
        same_args = (
            len(a.args) == len(b.args) and all(map(is_, a.args, b.args)) and a.keywords.keys() == b.keywords.keys()
        )
        return same_args and same_callable(a.func, b.func) and all(a.keywords[k] is b.keywords[k] for k in a.keywords)
    if isinstance(a, types.MethodType) and isinstance(b, types.MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    if isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType):
        cells_a, cells_b = ([cell_value(cell) for cell in f.__closure__ or ()] for f in (a, b))
        defaults_a, defaults_b = ((*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()) for f in (a, b))
        held = [(*cells_a, *defaults_a), (*cells_b, *defaults_b)]
        return a.__code__ is b.__code__ and len(held[0]) == len(held[1]) and all(map(is_, *held))
    return False


def same_objects(before: list[Any], after: list[Any]) -> bool:
    """Whether two lists hold the same objects. Equal constants of one type count as the same."""
    return len(before) == len(after) and all(
        a is b or (type(a) is type(b) and isinstance(a, CONSTANTS) and repr(a) == repr(b))
        for a, b in zip(before, after, strict=True)
    )
