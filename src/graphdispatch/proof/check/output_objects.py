"""Objects among the outputs of a call.

Note [objects among outputs]
    An object that the call makes and that holds all it has in attributes (a cache, a batch encoding, a dataclass) is a
    node like a dict: its attributes are outputs. A hit makes a new object of the same class around the graph's results,
    without calling code of the class. An object that was there before the call is returned itself.
"""

from collections import OrderedDict
from collections.abc import Callable
from operator import is_
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import is_namedtuple_instance, tree_flatten, tree_leaves, tree_unflatten

from ...errors import CaptureError
from ...reasons import Reason
from ...runtime.attributes import attribute_table
from ...runtime.outputs import Objects
from ..rows.batches import SizeNumber
from ..state.objects import slots_of

_MOST_OBJECTS = 4096


class Opened(NamedTuple):
    """An object that the call made, as a node of its outputs: its class, and its attributes by name; or a shape, and
    its lengths."""

    kind: type
    content: Any


def _is_opened(node: Any) -> bool:
    """Whether a node of outputs stands for an object."""
    return type(node) is Opened


_LATER = (CoroutineType, GeneratorType, AsyncGeneratorType)


def _is_whole(node: Any) -> bool:
    """Whether a node among outputs is not for torch to flatten. Raises ``CaptureError`` for an ordered dict or named
    tuple with attributes, which torch would leave out."""
    if (type(node) is OrderedDict or is_namedtuple_instance(node)) and attribute_table(node):
        raise CaptureError(
            f"an output ({type(node).__qualname__}) carries the attributes {', '.join(attribute_table(node) or ())}; "
            "return their values beside it",
            Reason.OUTPUT_UNSUPPORTED,
        )
    return type(node) is torch.Size


class Opener:
    """Opens the outputs of the runs of one call. ``has_met`` says whether a value was there before the first one."""

    def __init__(self, has_met: Callable[[Any], bool]) -> None:
        self._has_met = has_met
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
        # Torch flattens a shape, and makes a tuple of it.
        leaves, spec = tree_flatten(tree, is_leaf=_is_whole)
        opened = [self._open_leaf(leaf, made) for leaf in leaves]
        return tree if all(map(is_, opened, leaves)) else tree_unflatten(opened, spec)

    def _open_leaf(self, value: Any, made: dict[int, Any]) -> Any:
        kind = type(value)
        if kind is torch.Size:
            return Opened(kind, list(value))
        if issubclass(kind, _LATER):
            raise CaptureError(
                f"an output ({kind.__name__}) runs code after the call, outside of any graph; graph a function without "
                "await and yield, and call it from there",
                Reason.OUTPUT_UNSUPPORTED,
            )
        if not _can_open(kind) or id(value) in made or len(made) >= _MOST_OBJECTS or self._has_met(value):
            return value
        made[id(value)] = value
        attributes = attribute_table(value) or {}
        return Opened(kind, {name: self._open(part, made) for name, part in attributes.items()})


def _can_open(kind: type) -> bool:
    """Whether objects of a class can be made anew of their attributes alone."""
    if issubclass(kind, (torch.Tensor, nn.Module, SizeNumber)) or hasattr(kind, "__del__") or slots_of(kind):
        return False
    new: Any = kind.__new__
    return new is object.__new__ and bool(kind.__dictoffset__ and kind.__flags__ & _HEAP)


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement


def _made(kind: type, content: Any) -> Any:
    """A new object of a class that has these attributes; or a shape of these lengths."""
    if kind is torch.Size:
        return torch.Size(content)
    made: Any = object.__new__(kind)
    table = attribute_table(made)
    assert table is not None
    table.update(content)
    return made


class OpenedObjects(Objects):
    """The objects among the outputs of one graph, of which its tree has the opened form."""

    def open(self, answer: Any, tree: Any) -> Any:
        """As ``Objects.open``."""
        kept = set(map(id, tree_leaves(tree)))  # objects that were there before the call
        return Opener(lambda value: id(value) in kept).open(answer)

    def maker(self, node: Any) -> Callable[[list[Any]], Any] | None:
        """As ``Objects.maker``."""
        return (lambda parts: _made(*parts)) if _is_opened(node) else None


def objects_in(tree: Any) -> OpenedObjects | None:
    """What opens the objects among outputs, and makes them anew; None if there are none."""
    return OpenedObjects() if any(map(_is_opened, tree_leaves(tree, is_leaf=_is_opened))) else None
