"""Outputs: which part of what a graph writes belongs to the batch, and how it is returned.

    clone     copies, one allocation each
    view      a handle on graph memory; stale after the pool's next replay
    static    graph memory itself

Which dimension of an output follows the batch is learnt by comparing a run of the real rows with a run of another
number of rows, never from a dimension that merely equals the number of rows.

Note [objects among outputs]
    An object that the call makes and that holds all it has in attributes (a cache, a batch encoding, a dataclass) is a
    node like a dict: its attributes are outputs. A hit makes a new object of the same class around the graph's results,
    without calling code of the class. An object that was there before the call is returned itself.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, repeat
from operator import is_, itemgetter
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import (
    TreeSpec,
    is_namedtuple_instance,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from ..backends.base import Pool
from ..backends.operators import storage_key
from ..backends.tracing import untraced
from ..errors import CaptureError, StaleOutputError
from ..reasons import Reason
from ..sizes import Axis, extents_text
from .attributes import attribute_table, slots_of
from .flatten import VALUES, describe, is_tensor


class OutputView:
    """A handle on outputs in memory that is used again: ``get()`` returns them, or raises once they were overwritten.

    Outputs are valid until the next replay of any graph in the same pool; those of an eager step, too, as it may return
    what it was given. Clone what you keep for longer.

    Args:
        value: The outputs.
        source: Whose memory it is. None: memory that no replay touches, as of a copy.
    """

    __slots__ = ("_generation", "_source", "_value")

    def __init__(self, value: Any, source: Pool | None) -> None:
        self._value = value
        self._source = source
        self._generation = source.generation if source is not None else 0

    @property
    def is_stale(self) -> bool:
        """Whether a later replay has used the memory."""
        source = self._source
        return source is not None and source.generation != self._generation

    @untraced
    def get(self) -> Any:
        """The outputs.

        Returns:
            The tensors in the shared memory, not copies.

        Raises:
            StaleOutputError: A later replay has used their memory.
        """
        if self.is_stale:
            raise StaleOutputError(
                "this view of a graph's output is stale: a later replay has used its memory; "
                "read it before the next call, or use outputs='clone'"
            )
        return self._value

    def __copy__(self) -> "OutputView":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return OutputView, (self.get(), None)  # a copy has tensors of its own, which no replay touches

    def __repr__(self) -> str:
        return f"<OutputView {'stale' if self.is_stale else 'fresh'}>"


@dataclass(frozen=True)
class OutputRule:
    """For each tensor among the outputs, the dimensions that follow the batch: (dimension, rows per row, axis)."""

    follows: tuple[tuple[tuple[int, int, Axis], ...], ...]

    def check(self, axes: Sequence[Axis], tree: Any, rows: int, wider: Any, size: int) -> None:
        """Raise ``CaptureError`` unless outputs of ``rows`` and of ``size`` differ in shape as the rule says."""
        own, theirs = _tensors(tree), _tensors(wider)
        if len(own) != len(self.follows) or len(theirs) < len(own):
            raise CaptureError(
                f"the number of outputs follows the batch ({len(own)} for {extents_text(axes, rows)} and {len(theirs)} "
                f"for {extents_text(axes, size)}); return one tensor for all rows",
                Reason.OUTPUT_ROWS_UNKNOWN,
            )
        for index, (dims, real, full) in enumerate(zip(self.follows, own, theirs, strict=False)):
            for tensor, number in ((real, rows), (full, size)):
                expected = {**dict(enumerate(full.shape)), **extents_of(dims, number)}
                if tuple(tensor.shape) != tuple(expected.values()):
                    at, to = extents_text(axes, rows), extents_text(axes, size)
                    raise CaptureError(
                        f"output {index} has shape {tuple(real.shape)} for a batch of {at} and {tuple(full.shape)} for "
                        f"{to}; a graph can be cut only along dimensions that are a fixed multiple of the rows (of one "
                        "dynamic dimension, where there are several)",
                        Reason.OUTPUT_ROWS_UNKNOWN,
                    )


def learn_output_rule(
    axes: Sequence[Axis], tree: Any, rows: int, others: Sequence[tuple[Axis, int, Any]]
) -> OutputRule:
    """The rule that explains the shapes of outputs for ``rows``, and for ``others``: each with another extent along its
    axis alone.

    Raises ``CaptureError`` if an output follows the batch in a way that cannot be cut to the real rows.
    """
    tensors = _tensors(tree)
    found: list[dict[int, tuple[int, int, Axis]]] = [{} for _ in tensors]
    for axis, _, other in others:
        for dims, own, theirs in zip(found, tensors, _tensors(other), strict=False):
            changed = ((dim, a) for dim, (a, b) in enumerate(zip(own.shape, theirs.shape, strict=False)) if a != b)
            dims |= {dim: (dim, extent // axis.of(rows), axis) for dim, extent in changed}
    rule = OutputRule(tuple(tuple(dims[dim] for dim in sorted(dims)) for dims in found))
    for _, number, other in others:
        rule.check(axes, tree, rows, other, number)
    return rule


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if is_tensor(leaf)]


class Outputs:
    """What one graph writes, cut to the real rows and returned as the mode says.

    ``is_own[i]`` tells whether output tensor ``i`` is the graph's memory; a tensor that is not (a cache that the model
    returns) is returned itself, as by eager. ``firsts[i]`` is the place of the first output that is the same tensor, so
    that what eager returns twice is one tensor here, too; none are the same if it is left out. ``given[i]`` is the
    position of the argument that it is, or None: with ``outputs="clone"`` the caller gets its own tensor back.
    """

    def __init__(
        self,
        tree: Any,
        rule: OutputRule,
        is_own: Sequence[bool],
        mode: str,
        pool: Pool,
        firsts: Sequence[int] = (),
        given: Sequence[int | None] = (),
    ) -> None:
        self.tree = tree
        self.rule = rule
        leaves, spec = tree_flatten(tree)
        self._tensors = [(place, leaf) for place, leaf in enumerate(leaves) if is_tensor(leaf)]
        self._is_own = tuple(is_own)
        self._firsts = tuple(firsts) if len(set(firsts)) < len(firsts) else ()
        self._given = tuple(given) if any(position is not None for position in given) else ()
        self._mode = mode
        self._pool = pool
        self._build = _builder(leaves, spec)
        self.has_objects = any(map(_is_opened, tree_leaves(tree, is_leaf=_is_opened)))
        if self.has_objects:
            build = self._build
            self._build = lambda tensors: closed(build(tensors))

    def taker(self, rows: int) -> Callable[[Sequence[Any] | None], Any]:
        """What returns the outputs of the latest replay for ``rows`` real rows, given the values of the call or None.
        Call it with the pool's lock held."""
        cut, build = self.peek(rows), self._build
        if self._mode == "view":
            return lambda _: OutputView(build(cut), self._pool)
        if self._mode != "clone" or not any(self._is_own):
            return lambda _: build(cut)
        if build is _only and not self._given:
            clone = cut[0].clone
            return lambda _: clone()
        parts = list(zip(cut, self._is_own, strict=True))
        if self._firsts or self._given:
            return partial(self._take_once, parts)
        return lambda _: build([tensor.clone() if own else tensor for tensor, own in parts])

    def _take_once(self, parts: Sequence[tuple[torch.Tensor, bool]], values: Sequence[Any] | None) -> Any:
        """Copies of the outputs, of which each is made once; those that are arguments are the caller's tensors."""
        firsts = self._firsts or range(len(parts))
        made: dict[int, torch.Tensor] = {}
        for first in set(firsts):
            tensor, own = parts[first]
            position = self._given[first] if self._given else None
            argument = values[position] if values is not None and position is not None else None
            if argument is not None and argument.shape == tensor.shape:
                made[first] = argument
            else:
                made[first] = tensor.clone() if own else tensor
        return self._build([made[first] for first in firsts])

    def parts(self, rows: int) -> tuple[tuple[torch.Tensor, ...], tuple[bool, ...], bool] | tuple[()]:
        """What the core needs to return the outputs for ``rows`` real rows; empty where only ``taker`` can.

        It is the tensors, whether each is the graph's own (the core clones these and returns the others themselves),
        and whether they form a tuple.
        """
        is_plain = self._mode == "clone" and self._build in (_only, tuple) and not (self._firsts or self._given)
        if not is_plain or not any(self._is_own):
            return ()
        return tuple(self.peek(rows)), self._is_own, self._build is tuple

    def with_values(self, answer: Any, rows: int) -> Any:
        """Eager's answer for ``rows`` rows, in the tensors that a replay would return. Takes the pool's lock.

        With ``outputs="static"`` they are the graph's own, so that their addresses hold from the first call on.
        """
        if self._mode != "static":
            return answer
        if self.has_objects:
            kept = set(map(id, tree_leaves(self.tree)))  # objects that were there before the call
            answer = Opener(lambda value: id(value) in kept).open(answer)
        with self._pool.lock:
            cut, given = self.peek(rows), _tensors(answer)
            lent = {storage_key(target) for target, own in zip(cut, self._is_own, strict=True) if own}
            given = [source.clone() if storage_key(source) in lent else source for source in given]  # as fed back
            for target, source, own in zip(cut, given, self._is_own, strict=True):
                if own:
                    part = _once(target)
                    part.copy_(source[tuple(map(slice, part.shape))])
            return self._build(cut)

    def lent(self, size: int) -> list[torch.Tensor]:
        """The graph's own tensors that callers get to hold, of a graph of ``size`` rows: each element once."""
        if self._mode == "clone":
            return []
        return [_once(tensor) for tensor, own in zip(self.peek(size), self._is_own, strict=True) if own]

    def covers(self, argument: torch.Tensor, position: int, size: int) -> bool:
        """Whether an argument lies in what callers get to hold of a graph of ``size`` rows, and not just where the
        graph returns this very argument."""
        for tensor, place in zip(self.lent(size), compress(self._given or repeat(None), self._is_own), strict=False):
            is_itself = place == position and tensor.data_ptr() == argument.data_ptr()
            if storage_key(tensor) == storage_key(argument) and not (
                is_itself and tensor.stride() == argument.stride()
            ):
                return True
        return False

    def against_joining(self, axis: Axis) -> str:
        """Why the outputs of several batches are not put together as those of one, along this axis; empty if they
        are."""
        if self._mode != "clone" or self.has_objects or self._firsts or self._given:
            return "its outputs are views, objects, arguments, or one tensor twice"
        along = [[dim for dim, _, own in dims if own is axis] for dims in self.rule.follows]
        return "" if all(len(dims) < _TWICE for dims in along) else "an output has rows along two dimensions"

    def joined(self, answers: Sequence[Any], axis: Axis) -> Any:
        """The outputs of several batches as those of one: rows one behind the other. What follows no rows is the same
        in all of them, and that of the first is taken."""
        taken, spec = zip(*map(tree_flatten, answers), strict=True)
        leaves = list(taken[0])
        for (place, _), dims in zip(self._tensors, self.rule.follows, strict=True):
            for dim in (dim for dim, _, own in dims if own is axis):
                leaves[place] = torch.cat([one[place] for one in taken], dim)
        return tree_unflatten(leaves, spec[0])

    def peek(self, rows: int) -> list[torch.Tensor]:
        """The output tensors in graph memory, cut to ``rows`` rows, in order."""
        with torch.inference_mode(False), torch.no_grad():
            tensors = zip(self._tensors, self.rule.follows, strict=True)
            cut = [first_rows(tensor, dims, rows) for (_, tensor), dims in tensors]
            return [cut[first] for first in self._firsts] or cut


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Each element of a tensor once: along an expanded dimension all are one in memory."""
    return tensor[tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())]


def first_rows(tensor: torch.Tensor, dims: tuple[tuple[int, int, Axis], ...], rows: int) -> torch.Tensor:
    """An output cut to its first rows; ``dims`` are the dimensions that follow the batch, as in ``OutputRule``."""
    for dim, extent in extents_of(dims, rows).items():
        tensor = tensor.narrow(dim, 0, extent)
    return tensor


def extents_of(dims: tuple[tuple[int, int, Axis], ...], rows: int) -> dict[int, int]:
    """The extent of each of these dimensions for ``rows`` rows."""
    return {dim: factor * axis.of(rows) for dim, factor, axis in dims}


_TWICE = 2
_only: Callable[[list[torch.Tensor]], Any] = itemgetter(0)


def _builder(leaves: list[Any], spec: TreeSpec) -> Callable[[list[torch.Tensor]], Any]:
    """How a list of output tensors becomes the callable's own structure again."""
    places = [place for place, leaf in enumerate(leaves) if is_tensor(leaf)]
    if spec.is_leaf():
        return _only if places else lambda _: leaves[0]
    if spec.type is tuple and spec.num_nodes == len(leaves) + 1 == len(places) + 1:
        return tuple

    def build(tensors: list[torch.Tensor]) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return tree_unflatten(filled, spec)

    return build


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
    if issubclass(kind, (torch.Tensor, nn.Module)) or hasattr(kind, "__del__") or slots_of(kind):
        return False
    new: Any = kind.__new__
    return new is object.__new__ and bool(kind.__dictoffset__ and kind.__flags__ & _HEAP)


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement


def closed(tree: Any) -> Any:
    """The tree with an object in the place of each node that was opened."""
    return tree_map(lambda node: _close(node) if _is_opened(node) else node, tree, is_leaf=_is_opened)


def _close(node: Opened) -> Any:
    content = closed(node.content)
    if node.kind is torch.Size:
        return torch.Size(content)
    made: Any = object.__new__(node.kind)
    table = attribute_table(made)
    assert table is not None
    table.update(content)
    return made
