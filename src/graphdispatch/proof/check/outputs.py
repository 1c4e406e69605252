"""What the outputs of one call say of its graph: which dimensions follow the batch, which values are frozen, and which
objects are made anew.

Which dimension of an output follows the batch is learnt, where no label says so, by comparing a run of the real rows
with runs of other batches, never from a dimension that merely equals the number of rows.

Note [objects among outputs]
    An object that the call makes and that holds all it has in attributes (a cache, a batch encoding, a dataclass) is a
    node like a dict: its attributes are outputs. A hit makes a new object of the same class around the graph's results,
    without calling code of the class. An object that was there before the call is returned itself.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, is_namedtuple_instance, tree_flatten, tree_leaves, tree_unflatten

from ...errors import CaptureError
from ...reasons import Reason
from ...runtime.attributes import attribute_table
from ...runtime.constants import VALUES
from ...runtime.flatten import describe, is_tensor
from ...runtime.outputs import Objects, OutputRule
from ...sizes import Axis, extents_text
from ..rows.batches import SizeNumber
from ..state.objects import slots_of

_MOST_OBJECTS = 4096


def check_rule(rule: OutputRule, axes: Sequence[Axis], tree: Any, rows: int, wider: Any, size: int) -> None:
    """Raise ``CaptureError`` unless outputs of ``rows`` and of ``size`` differ in shape as the rule says."""
    own, theirs = _tensors(tree), _tensors(wider)
    if len(own) != len(rule.follows) or len(theirs) < len(own):
        raise CaptureError(
            f"the number of outputs follows the batch ({len(own)} for {extents_text(axes, rows)} and {len(theirs)} "
            f"for {extents_text(axes, size)}); return one tensor for all rows",
            Reason.OUTPUT_ROWS_UNKNOWN,
        )
    for index, (dims, real, full) in enumerate(zip(rule.follows, own, theirs, strict=False)):
        for tensor, number in ((real, rows), (full, size)):
            followed = {dim: factor * axis.of(number) for dim, factor, axis in dims}
            expected = {**dict(enumerate(full.shape)), **followed}
            if tuple(tensor.shape) != tuple(expected.values()):
                at, to = extents_text(axes, rows), extents_text(axes, size)
                raise CaptureError(
                    f"output {index} has shape {tuple(real.shape)} for a batch of {at} and {tuple(full.shape)} for "
                    f"{to}; a graph can be cut only along dimensions that are a fixed multiple of the rows (of one "
                    "dynamic dimension, where there are several)",
                    Reason.OUTPUT_ROWS_UNKNOWN,
                )


def learn_output_rule(axes: Sequence[Axis], tree: Any, rows: int, others: Sequence[tuple[int, Any]]) -> OutputRule:
    """The rule that explains the shapes of outputs for ``rows``, and for ``others``.

    Raises ``CaptureError`` if an output follows the batch in a way that cannot be cut to the real rows.
    """
    tensors = _tensors(tree)
    found: list[dict[int, tuple[int, int, Axis]]] = [{} for _ in tensors]
    for number, other in others:
        for dims, own, theirs in zip(found, tensors, _tensors(other), strict=False):
            for dim, (a, b) in enumerate(zip(own.shape, theirs.shape, strict=False)):
                factors = ((axis, *divmod(a, axis.of(rows))) for axis in axes if a != b)
                fits = [(dim, k, axis) for axis, k, rest in factors if not rest and k * axis.of(number) == b]
                dims |= {dim: fits[0]} if len(fits) == 1 else {}
    rule = OutputRule(tuple(tuple(dims[dim] for dim in sorted(dims)) for dims in found))
    for number, other in others:
        check_rule(rule, axes, tree, rows, other, number)
    return rule


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if is_tensor(leaf)]


def is_same_value(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors are indistinguishable: one object, or equal constants of one type."""
    return a is b or (type(a) is type(b) and type(a) in VALUES and repr(a) == repr(b))


def _line(spec: TreeSpec) -> str:
    return " ".join(str(spec).split())


def _other(a: Any, b: Any) -> str:
    """``b`` beside ``a``: another object that would be described alike needs no more words."""
    return describe(b) if describe(b) != describe(a) else "another one"


def check_values(eager: Any, graph: Any) -> None:
    """Raise ``CaptureError`` unless both outputs have one structure and equal values that are not tensors.

    A value that a graph gives back is frozen: it must be a plain constant, or the very same object each time.
    """
    eager_leaves, eager_spec = tree_flatten(eager)
    graph_leaves, graph_spec = tree_flatten(graph)
    if eager_spec != graph_spec or len(eager_leaves) != len(graph_leaves):
        raise CaptureError(
            f"the outputs have another structure in the graph than in eager: {_line(graph_spec)} instead of "
            f"{_line(eager_spec)}",
            Reason.OUTPUT_UNSUPPORTED,
        )
    for a, b in zip(eager_leaves, graph_leaves, strict=True):
        if is_tensor(a) and is_tensor(b):
            continue
        if not is_same_value(a, b):
            raise CaptureError(
                f"an output that is no tensor is {describe(a)} in eager and {_other(a, b)} in the graph; return "
                "tensors and constants, or objects that hold such (torch.utils._pytree.register_pytree_node says what "
                "others hold; use_cache=False keeps a model's cache out)",
                Reason.OUTPUT_UNSUPPORTED,
            )


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
