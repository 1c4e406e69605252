"""Guards: what must be as it was when a graph was captured, apart from the arguments.

A graph holds the addresses of every parameter, buffer and captured tensor, and the code paths that ``training`` chose.
A module that was moved, reloaded by assignment or switched to training would go on to be served with the old memory
and the old path, without an error.
"""

import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverloadPacket

__all__ = ["StateGuard", "WorkspaceGuard", "find_modules", "same_callable", "same_objects"]

_END = object()
_CONSTANTS = (bool, int, float, complex, str, type(None))
_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values
_training = attrgetter("training")
_requires_grad = attrgetter("requires_grad")


class StateGuard:
    """Fingerprint of the modules and tensors that a callable reaches; ``holds()`` tells whether it still fits.

    Compared by identity and address in C-speed loops, tens of nanoseconds for each parameter and module. The objects
    are held, so that an address cannot come back as another tensor's. Thread-safe: it never changes.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        modules = [m for root in find_modules(fn) for m in root.modules()]
        self._modules = tuple(modules)
        # A scripted module keeps its members elsewhere; its parameters are compared by address below.
        tables = [t for m in modules for t in (m._parameters, m._buffers, m._modules) if t and isinstance(t, dict)]
        self._tables: tuple[dict[str, Any], ...] = tuple(tables)
        self._members = (*chain.from_iterable(map(_values, tables)), _END)
        self._cells = (*_captured_variables(fn), *_loose_tensors(modules), *_tensors_of_objects(fn))
        parameters = [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
        held = (*self._members, *parameters, *(value for _, value in self._cells))
        # Lazy parameters and subclasses have no address to compare; their identity is compared all the same.
        self._tensors = tuple(dict.fromkeys(t for t in held if type(t) in (torch.Tensor, nn.Parameter)))
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        self._readers = [(itemgetter(*names), vars(m)) for m in modules if (names := _constant_names(m))]
        self._constants = [read(table) for read, table in self._readers]

    def holds(self) -> bool:
        """Whether all members are the same objects at the same addresses, and the modules' constants (``training`` and
        whatever number, string or flag hangs on them) have the same values."""
        try:
            return (
                all(map(is_, chain(chain.from_iterable(map(_values, self._tables)), (_END,)), self._members))
                and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
                and [read(table) for read, table in self._readers] == self._constants
                and (not self._cells or all(current() is held for current, held in self._cells))
            )
        except KeyError:  # a constant was deleted
            return False

    def attributes(self) -> list[Any]:
        """What hangs now on the modules, objects, dicts and lists that the callable reaches, two levels deep."""
        # A packet of operators (``torch.ops.aten.add``) keeps the overloads that were asked for.
        reached = [v for v in _reached(self._fn) if not isinstance(v, (type, types.ModuleType, OpOverloadPacket))]
        outer = [value for holder in (*self._modules, *reached) for value in _content(holder)]
        return outer + [value for holder in outer if isinstance(holder, (dict, list)) for value in _content(holder)]

    @property
    def trainable(self) -> bool:
        """Whether a call may have to be differentiated: a captured tensor requires a gradient, and unless it stands
        alone its module is in training mode. Looked up anew each time."""
        training = not self._modules or any(map(_training, self._modules))
        return training and any(map(_requires_grad, self._tensors))

    @property
    def storages(self) -> set[int]:
        """The storages whose address ``holds`` compares (by their ``_cdata``)."""
        return {tensor.untyped_storage()._cdata for tensor in self._tensors}

    def __len__(self) -> int:
        return len(self._tensors)


class WorkspaceGuard:
    """Holds memory that a graph reads and that neither the graph, nor its inputs, nor a ``StateGuard`` owns, such as a
    workspace that a library keeps; ``holds()`` tells whether it is still where it was, and as large."""

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


def same_callable(a: Any, b: Any) -> bool:
    """Whether two callables do the same: one object, or one piece of code over the same objects.

    So a lambda that is written in a loop counts as one callable, and one that captured something else does not.
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
        cells_a, cells_b = ([_cell_value(cell) for cell in f.__closure__ or ()] for f in (a, b))
        defaults_a, defaults_b = ((*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()) for f in (a, b))
        held = [(*cells_a, *defaults_a), (*cells_b, *defaults_b)]
        return a.__code__ is b.__code__ and len(held[0]) == len(held[1]) and all(map(is_, *held))
    return False


def same_objects(before: list[Any], after: list[Any]) -> bool:
    """Whether two lists hold the same objects, where equal constants count as the same."""
    return len(before) == len(after) and all(
        a is b or (type(a) is type(b) and isinstance(a, _CONSTANTS) and a == b)
        for a, b in zip(before, after, strict=True)
    )


def _constant_names(module: nn.Module) -> list[str]:
    """The names of a module's constants; torch's own private ones are left out."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, _CONSTANTS) and not name.startswith("_") and value is not None
    ]


def find_modules(fn: Any) -> list[nn.Module]:
    """The modules that a callable is, is bound to, or captured by closure, ``partial`` or global name."""
    found = [value for value in _reached(fn) if isinstance(value, nn.Module)]
    return list(dict.fromkeys(found))


def _reached(fn: Any) -> Iterator[Any]:
    if isinstance(fn, nn.Module):
        yield fn
    elif isinstance(fn, partial):
        yield from _reached(fn.func)
        yield from (*fn.args, *fn.keywords.values())
    elif isinstance(fn, types.MethodType):
        yield fn.__self__
        yield from _reached(fn.__func__)
    elif isinstance(fn, types.FunctionType):
        yield from (current() for current in _variables(fn))
        yield from (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
    elif not isinstance(fn, type) and isinstance(vars(type(fn)).get("__call__"), types.FunctionType):
        yield from vars(fn).values() if hasattr(fn, "__dict__") else ()


def _variables(fn: types.FunctionType) -> list[Callable[[], Any]]:
    """Readers of the variables that a function uses and does not own: closure cells and globals."""
    cells = [partial(_cell_value, cell) for cell in fn.__closure__ or ()]
    names = [name for name in fn.__code__.co_names if name in fn.__globals__]
    return [*cells, *(partial(fn.__globals__.get, name) for name in names)]


def _content(holder: Any) -> list[Any]:
    table = holder if isinstance(holder, (dict, list)) else getattr(holder, "__dict__", {})
    return list(table.values() if isinstance(table, dict) else table)


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: the variable is not assigned yet
        return None


def _captured_variables(fn: Any) -> Iterator[tuple[Callable[[], Any], Any]]:
    """Variables that hold a module, a tensor or a constant now, which must still be the same one at each replay."""
    if isinstance(fn, partial):
        fn = fn.func
    if isinstance(fn, types.MethodType):
        fn = fn.__func__
    if isinstance(fn, types.FunctionType):
        for current in _variables(fn):
            held = current()
            if isinstance(held, (torch.Tensor, nn.Module, *_CONSTANTS)):
                yield current, held


def _tensors_of_objects(fn: Any) -> Iterator[tuple[Callable[[], Any], Any]]:
    """Tensors that hang on the plain objects that a callable reaches, under names that its code reads.

    Other attributes are left alone: an object may keep its last result, which changes with each call.
    """
    inner = fn.func if isinstance(fn, partial) else fn
    holder = inner.__self__ if isinstance(inner, types.MethodType) else inner
    for reached in {id(v): v for v in (holder, *_reached(fn))}.values():
        if isinstance(reached, (nn.Module, type, types.FunctionType, types.ModuleType)):
            continue
        table = getattr(reached, "__dict__", {})
        held = {name: value for name, value in table.items() if isinstance(value, torch.Tensor)}
        if held:
            yield from ((partial(table.get, n), held[n]) for n in held.keys() & _names_read(inner, type(reached)))


def _names_read(fn: Any, owner: type) -> set[str]:
    """The names in the code of a callable, and in the methods of ``owner`` that it may call."""
    start = fn.__func__ if isinstance(fn, types.MethodType) else fn
    codes = [f.__code__ for f in (start, vars(owner).get("__call__")) if isinstance(f, types.FunctionType)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        new = set(code.co_names) - names
        names |= new
        codes += [m.__code__ for m in (getattr(owner, n, None) for n in new) if isinstance(m, types.FunctionType)]
    return names


def _loose_tensors(modules: list[nn.Module]) -> Iterator[tuple[Callable[[], Any], Any]]:
    """Tensors that hang on modules as plain attributes, neither parameter nor buffer."""
    for table in map(vars, modules):
        yield from ((partial(table.get, name), v) for name, v in table.items() if isinstance(v, torch.Tensor))
