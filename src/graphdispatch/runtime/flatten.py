"""Calls as flat lists of values: how arguments are named, ordered, flattened and put together again.

Positional and keyword forms of one call become the same list, in the order of the callable's parameters, so that the
same graphs serve them.
"""

import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.utils import _pytree as pytree

from .attributes import attribute_table
from .constants import VALUES, frozen, is_constant, within


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor by its type, whatever it says of its class."""
    return issubclass(type(value), torch.Tensor)


_LEAF = pytree.tree_structure(None)
_BARE_NODES = frozenset((dict, list, tuple))
"""Containers that hold nothing but their entries."""


def _is_leaf(value: Any) -> bool:
    return is_tensor(value) or type(value) in VALUES


def _holds_more(node: Any) -> bool:
    """Whether an object that torch's pytree flattens holds what no leaf is and no constant of its structure, such as an
    attribute beside its entries. Then it is a leaf itself, which nobody can compare."""
    kind = type(node)
    if kind in _BARE_NODES:
        return False
    found = pytree.SUPPORTED_NODES.get(pytree._get_node_type(node))
    if found is None:
        return False
    children, context = found.flatten_fn(node)
    parts = list(within(context))
    if not all(is_constant(one) or type(one) in _BARE_NODES for one in parts):
        return True
    held = set(map(frozen, (None, *parts, *children)))
    return any(frozen(one) not in held for one in (attribute_table(node) or {}).values())


def _structure_of(spec: pytree.TreeSpec) -> Any:
    """The containers of a nest with their keys, equal to those of a nest that looks the same: 1 is not True."""
    if spec.is_leaf():
        return None
    return spec.type, frozen(spec.context), *(_structure_of(spec.child(place)) for place in range(spec.num_children))


def leaves_of(values: Sequence[Any]) -> Sequence[Any]:
    """The values of a nest of arguments."""
    return values if all(map(_is_leaf, values)) else pytree.tree_leaves(list(values), is_leaf=_holds_more)


def _paths_of(value: Any) -> list[str]:
    """The paths of the leaves of one argument: ``['ids']``, ``[0].weight``; empty for a leaf. Where the keys of a class
    are not known, or cannot be printed, the leaves are numbered."""
    try:
        return [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(value, is_leaf=_holds_more)]
    except Exception:
        return [f"[{place}]" for place in range(len(pytree.tree_leaves(value, is_leaf=_holds_more)))]


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names that ``fn`` accepts, or None if it has no signature or takes ``**kwargs``."""
    parameters = _parameters(fn)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters)


def declared_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names in the signature of ``fn``; none if it has no signature."""
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return tuple(p.name for p in _parameters(fn) or () if p.kind not in variadic)


def _target(fn: Any) -> Any:
    """What has the parameters of ``fn``: of a module its ``forward``, behind a partial, too."""
    if issubclass(type(fn), torch.nn.Module):
        # Of a scripted module it is no dict, and a traced one has none.
        modules = dict(vars(fn).get("_modules", {}).items())
        return modules.get("_orig_mod", fn).forward  # what torch.compile made of a module takes anything
    if type(fn) is MethodType and fn.__func__ is torch.nn.Module._call_impl:  # of a module that is served in place
        return _target(fn.__self__)
    if type(fn) is partial:
        return partial(_target(fn.func), *fn.args, **fn.keywords)
    return fn


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    target = _target(fn)
    if type(target) in (torch.ScriptFunction, torch.ScriptMethod):
        return _scripted(target)
    by_class = inspect.getattr_static(type(target), "__call__", None)
    for wanted in (target, *([MethodType(by_class, target)] if type(by_class) is FunctionType else [])):
        try:
            return list(inspect.signature(wanted).parameters.values())
        except (TypeError, ValueError):  # a builtin without a signature
            continue
        except Exception:  # of an object that does not let itself be looked at; its class does
            continue
    return None


def _scripted(fn: Any) -> list[inspect.Parameter]:
    """The parameters that the schema of a scripted or traced function tells; of a method all but the first."""
    kind, arguments = inspect.Parameter.POSITIONAL_OR_KEYWORD, fn.schema.arguments[type(fn) is torch.ScriptMethod :]
    defaults = (one.default_value if one.has_default_value() else inspect.Parameter.empty for one in arguments)
    return [inspect.Parameter(one.name, kind, default=given) for one, given in zip(arguments, defaults, strict=True)]


def describe(value: Any) -> str:
    """A value that is no tensor, in one line of a message: a plain constant itself, and of anything else, which may
    hold tensors, the type, with what lets graphs see the tensors of a dataclass or mapping, or the numbers of an
    array."""
    if type(value) in VALUES:
        return reprlib.repr(value)
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")  # numpy has a bool of its own
    hint = " (torch.from_numpy makes a tensor of it)" if name == "numpy.ndarray" else ""
    if issubclass(kind, Mapping) and kind not in pytree.SUPPORTED_NODES:
        hint = " (graphs see what a plain dict holds)"
    if kind in pytree.SUPPORTED_NODES:
        hint = " (with more than its pytree holds)"
    elif is_dataclass(kind):
        hint = f" (torch.utils._pytree.register_dataclass({kind.__qualname__}) lets graphs see its fields)"
    return f"a {name}{hint}"


class CallSpec:
    """One form of a call: so many positional arguments, these keywords, which are its ``key``.

    ``names`` are the arguments in the callable's own order, ``order`` the place of each in the call (None if the two
    are the same).
    """

    def __init__(self, fn: Callable[..., Any], positional: int, keywords: Sequence[str]) -> None:
        self.positional, self.keywords = positional, tuple(keywords)
        self.key = (positional, *keywords)
        given: list[str] = []
        rank: dict[str, int] = {}
        rest = "arg"
        for parameter in _parameters(fn) or ():
            name, kind = parameter.name, parameter.kind
            rank[name] = len(rank)
            if kind is parameter.VAR_POSITIONAL:
                rest = name
            elif kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) and len(given) < positional:
                # A name given twice is the callable's own TypeError to raise; here it must not merge two arguments.
                given.append(name if name not in keywords else f"{name}#{len(given)}")
        known = len(given)
        for place in range(known, positional):
            given.append(f"{rest}[{place - known}]" if rest != "arg" else f"arg{place}")
        given += keywords
        places = [(rank.get(name, len(rank)), "", place) for place, name in enumerate(given[:positional])]
        places += [(rank.get(name, len(rank) + 1), name, place) for place, name in enumerate(keywords, positional)]
        order = [place for *_, place in sorted(places)]
        self.names = tuple(map(given.__getitem__, order))
        self.order = None if order == list(range(len(order))) else tuple(order)

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The call's top-level arguments in the order of ``names``."""
        given = [*args, *kwargs.values()]
        return given if self.order is None else [given[i] for i in self.order]


class Leaf(NamedTuple):
    """One value of a flattened call: ``path`` such as ``batch['ids']``, and the argument it belongs to."""

    path: str
    argument: str


class Leaves(list[Any]):
    """The flattened values of one call, with the arguments that they were taken from, and the structure of each."""

    def __init__(self, leaves: Sequence[Any], arguments: Sequence[Any], structures: Sequence[Any]) -> None:
        super().__init__(leaves)
        self.arguments, self._structures = arguments, structures

    def still_fit(self) -> bool:
        """Whether the arguments still hold these very values in the same containers: nothing was put in, taken out, or
        replaced."""
        now = _flattened(self.arguments, self._structures)
        return now is not None and len(now) == len(self) and all(map(is_, now, self))


def _flattened(values: Sequence[Any], structures: Sequence[Any]) -> list[Any] | None:
    """The leaves of arguments of these structures, or None if the structure of one is another."""
    leaves: list[Any] = []
    for value, expected in zip(values, structures, strict=True):
        flat, spec = pytree.tree_flatten(value, is_leaf=_holds_more)
        if _structure_of(spec) != expected:
            return None
        leaves += flat
    return leaves


class FlatCall:
    """Calls ``fn`` with a flat list of leaves, in the form and structure of one recorded call."""

    __slots__ = ("_places", "_specs", "_structures", "fn", "is_flat", "leaves", "order", "spec")

    def __init__(self, fn: Callable[..., Any], spec: CallSpec, values: Sequence[Any]) -> None:
        self.fn = fn
        self.spec = spec
        self.order = spec.order
        """The place of each argument in the call, as in ``spec``; hits read it."""
        self.leaves: list[Leaf] = []
        self._specs: list[pytree.TreeSpec] = []
        for name, value in zip(spec.names, values, strict=True):
            paths, tree = [""], _LEAF
            if not _is_leaf(value):
                tree, paths = pytree.tree_structure(value, is_leaf=_holds_more), _paths_of(value)
            self._specs.append(tree)
            self.leaves += [Leaf(name + path, name.partition("[")[0]) for path in paths]
        self._structures = tuple(map(_structure_of, self._specs))
        self.is_flat = not any(self._structures)
        """Whether a call's arguments are its leaves, so that a hit need not flatten them."""
        self._places = sorted(range(len(values)), key=spec.order.__getitem__ if spec.order is not None else None)

    def flatten(self, values: Sequence[Any]) -> list[Any] | None:
        """The leaves of a call, or None if its structure is another one."""
        if self.is_flat:
            return list(values)
        leaves = _flattened(values, self._structures)
        return None if leaves is None else Leaves(leaves, values, self._structures)

    def in_new_containers(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of a call, with dicts and lists of their own around them."""
        return list(leaves) if self.is_flat else Leaves(leaves, self._unflatten(leaves), self._structures)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Call the callable with these leaves: with the caller's own dicts and lists where they are ``Leaves``, which
        it may change, and else with new ones."""
        arguments = leaves.arguments if isinstance(leaves, Leaves) else self._unflatten(leaves)
        given = list(map(arguments.__getitem__, self._places))
        positional = self.spec.positional
        return self.fn(*given[:positional], **dict(zip(self.spec.keywords, given[positional:], strict=True)))

    def _unflatten(self, leaves: Sequence[Any]) -> list[Any]:
        arguments: list[Any] = []
        start = 0
        for spec in self._specs:
            end = start + spec.num_leaves
            arguments.append(leaves[start] if spec.is_leaf() else pytree.tree_unflatten(list(leaves[start:end]), spec))
            start = end
        return arguments
