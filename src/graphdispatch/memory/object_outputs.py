"""Objects among outputs: opened into the values that they hold, so that a graph can return them.

An object that the call makes (a cache, a batch encoding) is a node like a dict: its attributes are outputs. A hit makes
a new object of the same class around the graph's results, without calling code of the class. An object that was there
before the call is returned itself.
"""

from collections.abc import Callable
from operator import is_
from types import AsyncGeneratorType, CoroutineType, GeneratorType, MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..call.spec import VALUES
from ..errors import CaptureError
from ..reasons import Reason
from ..state.objects import attribute_table, slots_of

__all__ = ["Opened", "Opener", "closed", "has_objects", "is_opened", "is_shape", "opened_like"]

_MOST_OBJECTS = 4096


class Adapter(NamedTuple):
    """How the objects of a class are opened into a tuple, list or dict, and made of one again."""

    open: Callable[[Any], Any]
    close: Callable[[type, Any], Any]


def _dict_of(kind: type, content: Any) -> Any:
    made: Any = dict.__new__(kind)
    dict.update(made, content)
    return made


def _list_of(kind: type, content: Any) -> Any:
    made: Any = list.__new__(kind)
    list.extend(made, content)
    return made


_ADAPTERS: dict[type, Adapter] = {
    dict: Adapter(lambda value: dict(dict.items(value)), _dict_of),
    list: Adapter(lambda value: list(list.__iter__(value)), _list_of),
    tuple: Adapter(lambda value: tuple(tuple.__iter__(value)), tuple.__new__),
    MappingProxyType: Adapter(dict, lambda kind, content: kind(content)),
    SimpleNamespace: Adapter(lambda value: None, lambda kind, content: kind()),
    torch.Size: Adapter(list, lambda kind, content: torch.Size(content)),
    object: Adapter(lambda value: None, lambda kind, content: object.__new__(kind)),
}
"""By the class that an object's class takes its ``__new__`` from. Attributes are opened besides."""


class Opened:
    """An object that the call made, as a node of its outputs: what an object of class ``kind``
    contains, then its attributes in the order of ``names``."""

    __slots__ = ("kind", "names", "values")

    def __init__(self, kind: type, names: tuple[str, ...], values: list[Any]) -> None:
        self.kind = kind
        self.names = names
        self.values = values


def _make_opened(values: Any, context: Any) -> Opened:
    kind, names = context
    return Opened(kind, names, list(values))


register_pytree_node(
    Opened,
    lambda node: (node.values, (node.kind, node.names)),
    _make_opened,
    serialized_type_name="graphdispatch.Opened",
)


def is_shape(node: Any) -> bool:
    """Whether a value is a ``torch.Size``, which torch takes apart and makes a tuple of."""
    return type(node) is torch.Size


def is_opened(node: Any) -> bool:
    """Whether a node of outputs stands for an object."""
    return type(node) is Opened


_LATER = (CoroutineType, GeneratorType, AsyncGeneratorType)


class Opener:
    """Opens the outputs of the runs of one call. ``knows`` tells whether a value was there before the first of them."""

    def __init__(self, knows: Callable[[Any], bool]) -> None:
        self._knows = knows
        self._runs: list[dict[int, Any]] = []

    def open(self, output: Any) -> Any:
        """An output with its new objects opened; the output itself if there are none.

        Raises ``CaptureError`` for an object that an earlier run has returned, too, and that nobody knew before; and
        for a coroutine or generator.
        """
        made: dict[int, Any] = {}
        result = self._open(output, made)
        for value in made.values():
            if any(id(value) in run for run in self._runs):
                raise CaptureError(
                    f"an output is the same {type(value).__qualname__} in each run, and the callable does not reach it "
                    "otherwise; return tensors and constants",
                    Reason.OUTPUT_UNSUPPORTED,
                )
        self._runs.append(made)  # held, so that no other object gets the same id
        return result

    def _open(self, tree: Any, made: dict[int, Any]) -> Any:
        leaves, spec = tree_flatten(tree, is_leaf=is_shape)
        opened = [self._open_leaf(leaf, made) for leaf in leaves]
        return tree if all(map(is_, opened, leaves)) else tree_unflatten(opened, spec)

    def _open_leaf(self, value: Any, made: dict[int, Any]) -> Any:
        kind = type(value)
        if kind is torch.Size:
            return Opened(kind, (), [list(value)])
        if issubclass(kind, _LATER):
            raise CaptureError(
                f"an output ({kind.__name__}) runs code after the call, outside of any graph; graph a function without "
                "await and yield, and call it from there",
                Reason.OUTPUT_UNSUPPORTED,
            )
        if not _can_open(kind) or id(value) in made or len(made) >= _MOST_OBJECTS or self._knows(value):
            return value
        made[id(value)] = value
        attributes = {**(attribute_table(value) or {}), **_slots(value)}
        content = _adapter(kind).open(value)
        parts = [content, *attributes.values()]
        return Opened(kind, tuple(attributes), [self._open(part, made) for part in parts])


def _can_open(kind: type) -> bool:
    """Whether objects of a class can be made anew of what they hold."""
    if kind in VALUES or issubclass(kind, (torch.Tensor, nn.Module, type, BaseException)) or hasattr(kind, "__del__"):
        return False
    new: Any = kind.__new__
    is_plain = bool(kind.__flags__ & _HEAP) or kind in _ADAPTERS
    return is_plain and kind is not object and any(new is base.__new__ for base in _ADAPTERS)


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement


def _adapter(kind: Any) -> Adapter:
    new: Any = kind.__new__
    return next(adapter for base, adapter in _ADAPTERS.items() if new is base.__new__)


def _slots(value: Any) -> dict[str, Any]:
    held = {}
    for label, slot in slots_of(type(value)).items():
        try:
            held[label.removeprefix(".")] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    return held


def has_objects(tree: Any) -> bool:
    """Whether an object was opened among these outputs."""
    return any(map(is_opened, tree_leaves(tree, is_leaf=is_opened)))


def closed(tree: Any) -> Any:
    """The tree with an object in the place of each node that was opened."""
    return tree_map(lambda node: _close(node) if type(node) is Opened else node, tree, is_leaf=is_opened)


def _close(node: Opened) -> Any:
    content, *values = [closed(value) for value in node.values]
    made = _adapter(node.kind).close(node.kind, content)
    table = attribute_table(made)
    for name, value in zip(node.names, values, strict=True):
        if table is not None and name not in slots_of(node.kind):
            table[name] = value
        else:
            object.__setattr__(made, name, value)
    return made


def opened_like(output: Any, like: Any) -> Any:
    """An output opened where the same output of another run, ``like``, was opened."""
    _, spec = tree_flatten(like, is_leaf=is_opened)
    nodes = spec.flatten_up_to(like)
    values = spec.flatten_up_to(output)
    return tree_unflatten([_open_like(value, node) for value, node in zip(values, nodes, strict=True)], spec)


def _open_like(value: Any, node: Any) -> Any:
    if type(node) is not Opened:
        return value
    attributes = {**(attribute_table(value) or {}), **_slots(value)}
    parts = [_adapter(node.kind).open(value), *(attributes[name] for name in node.names)]
    return Opened(node.kind, node.names, [opened_like(part, old) for part, old in zip(parts, node.values, strict=True)])
