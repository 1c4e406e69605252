"""Outputs: which part of what a graph writes belongs to the batch, and how it is returned.

clone     copies, one allocation each
view      a handle on graph memory; stale after the pool's next replay
static    graph memory itself
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, count, repeat
from operator import itemgetter
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_map_only, tree_unflatten

from ..backends.base import Pool
from ..backends.operators import storage_key, tensors_in
from ..backends.tracing import untraced
from ..errors import StaleOutputError
from ..sizes import Axis
from .flatten import is_tensor

WaysOut: TypeAlias = tuple[
    Sequence[Callable[[], Any]], Callable[[list[Any]], Any], Sequence[tuple[int, int, torch.Size]]
]
"""What makes each tensor; what puts them together; and by the place of one that is an argument of the call, where it
is among the call's values, and the shape that it has then."""


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


class Objects(Protocol):
    """What makes objects among outputs a part of their tree, as a capturer may."""

    def open(self, answer: Any, tree: Any) -> Any:
        """Eager's answer, with those objects opened that are opened in the graph's tree."""

    def maker(self, node: Any) -> Callable[[list[Any]], Any] | None:
        """What makes the object for which a node of a tree stands, of the node's parts; None for any other node."""


class Outputs:
    """What one graph writes, cut to the real rows and returned as the mode says.

    ``is_own[i]`` tells whether output tensor ``i`` is the graph's memory; a tensor that is not (a cache that the model
    returns) is returned itself, as by eager. ``is_new[i]`` tells of one that is not whether eager makes it in each call
    (a view of a cache); then each call gets another one, on the same memory. ``firsts[i]`` is the place of the first
    output that is the same tensor, so that what eager returns twice is one tensor here, too; none are the same if it is
    left out. ``given[i]`` is the position of the argument that it is, or None: with ``outputs="clone"`` the caller gets
    its own tensor back. ``objects`` opens objects and makes them anew, if there are some among them.
    """

    def __init__(
        self,
        tree: Any,
        rule: OutputRule,
        is_own: Sequence[bool],
        mode: str,
        pool: Pool,
        is_new: Sequence[bool] = (),
        firsts: Sequence[int] = (),
        given: Sequence[int | None] = (),
        objects: Objects | None = None,
    ) -> None:
        self.tree = tree
        self.rule = rule
        leaves = tree_flatten(tree)[0]
        self._tensors = [(place, leaf) for place, leaf in enumerate(leaves) if is_tensor(leaf)]
        self._is_own = tuple(is_own)
        self.is_new = tuple(is_new) if any(is_new) else ()
        self._firsts = tuple(firsts) if len(set(firsts)) < len(firsts) else ()
        self._given = tuple(given) if {*given} - {None} else ()
        self._mode = mode
        self._pool = pool
        self._build = _builder(tree, objects)
        self.objects = objects

    def ways_out(self, rows: int) -> WaysOut:
        """How the outputs of the latest replay are returned for ``rows`` real rows: what makes each tensor, what puts
        them together, and which of them are arguments. Used with the pool's lock held."""
        cut, build = self.peek(rows), self._build
        if self._mode == "view":
            return [], lambda _: OutputView(build(cut), self._pool), ()
        if self._mode != "clone" or not (any(self._is_own) or self.is_new):
            return [], lambda _: build(cut), ()
        makers = [
            tensor.clone if own else tensor.detach if new else partial(_same, tensor)
            for tensor, own, new in zip(cut, self._is_own, self.is_new or repeat(False), strict=False)
        ]
        firsts = sorted(set(self._firsts)) or range(len(cut))  # each is made once
        places = [firsts.index(first) for first in self._firsts]
        pairs = enumerate(self._given[first] for first in firsts) if self._given else ()
        returned = [(place, given, cut[firsts[place]].shape) for place, given in pairs if given is not None]
        again: Callable[[list[Any]], Any] = (lambda made: build([made[p] for p in places])) if places else build
        return [makers[first] for first in firsts], again, returned

    def for_core(self, rows: int) -> tuple[tuple[torch.Tensor, ...], tuple[bool, ...], bool] | tuple[()]:
        """What the core needs to return the outputs for ``rows`` real rows; empty where only ``ways_out`` tells.

        It is the tensors, whether each is the graph's own (the core clones these and returns the others themselves),
        and whether they form a tuple.
        """
        is_plain = self._mode == "clone" and self._build in (_only, tuple) and any(self._is_own)
        if not is_plain or self.is_new or self._firsts or self._given:
            return ()
        return tuple(self.peek(rows)), self._is_own, self._build is tuple

    def with_values(self, answer: Any, rows: int) -> Any:
        """Eager's answer for ``rows`` rows, in the tensors that a replay would return. Takes the pool's lock.

        With ``outputs="static"`` they are the graph's own, so that their addresses hold from the first call on.
        """
        if self._mode != "static":
            return answer
        if self.objects is not None:
            answer = self.objects.open(answer, self.tree)
        with self._pool.lock:
            self._pool.order_after_last_use()
            cut, given = self.peek(rows), tensors_in(answer)
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
        if self._mode != "clone" or self.objects is not None or self._firsts or self._given:
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
                order = sorted(range(leaves[place].dim()), key=leaves[place].stride, reverse=True)  # in memory
                whole = torch.cat([one[place].permute(order) for one in taken], order.index(dim))
                leaves[place] = whole.permute([order.index(own) for own in range(whole.dim())])
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
    for dim, factor, axis in dims:
        tensor = tensor.narrow(dim, 0, factor * axis.of(rows))
    return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_TWICE = 2
_only: Callable[[list[torch.Tensor]], Any] = itemgetter(0)


def _builder(tree: Any, objects: Objects | None) -> Callable[[list[torch.Tensor]], Any]:
    """How a list of output tensors becomes the callable's own structure again."""
    leaves, spec = tree_flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if is_tensor(leaf)]
    if spec.is_leaf():
        return _only if places else lambda _: tree
    if spec.type is tuple and spec.num_nodes == len(leaves) + 1 == len(places) + 1:
        return tuple
    make = _maker(tree, count(), objects)

    def build(tensors: list[torch.Tensor]) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return make(filled)

    return build


def _maker(tree: Any, places: Iterator[int], objects: Objects | None) -> Callable[[list[Any]], Any]:
    """What makes a part of a structure of all leaves of the whole, whose ``places`` are counted. Each hit runs it, and
    for large structures it takes a tenth of the time of torch's ``tree_unflatten``."""
    nodes, spec = tree_flatten(tree, is_leaf=lambda node: node is not tree)
    if spec.is_leaf():
        return itemgetter(next(places))
    parts = [_maker(node, places, objects) for node in nodes]
    if objects is not None and (make := objects.maker(tree)) is not None:
        return lambda leaves: make([part(leaves) for part in parts])
    unflatten, context = SUPPORTED_NODES[spec.type].unflatten_fn, spec.context
    return lambda leaves: unflatten([part(leaves) for part in parts], context)


def copied_from(buffers: set[int], output: Any) -> Any:
    """The outputs of a capture, with copies of those that lie in static inputs. The caller gets the graph's own tensors
    and may give one back as another argument, which the copy of the next batch would overwrite before it is read.

    Args:
        buffers: The keys of the storages of the static inputs.
        output: What the call returned.
    """
    inside = {id(leaf): leaf for leaf in tensors_in(output) if storage_key(leaf) in buffers}
    copies = {key: tensor.clone() for key, tensor in inside.items()}
    return tree_map_only(torch.Tensor, lambda tensor: copies.get(id(tensor), tensor), output)
