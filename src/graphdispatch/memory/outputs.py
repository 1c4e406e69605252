"""Outputs: which part of what a graph writes belongs to the batch, and how it is returned.

    clone     copies, one allocation each
    view      a handle on graph memory; stale after the pool's next replay
    static    graph memory itself

Which dimension of an output follows the batch is learnt by comparing a run of the real rows with a run of another
number of rows, never from a dimension that merely equals the number of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..backends.base import Pool
from ..backends.tracing import untraced
from ..call.spec import VALUES, describe, is_tensor
from ..errors import CaptureError, StaleOutputError
from ..reasons import Reason
from ..sizes import Axis, extents_text
from .object_outputs import closed, has_objects, opened_like

__all__ = [
    "OutputRule",
    "OutputView",
    "Outputs",
    "check_values",
    "extents_of",
    "first_rows",
    "is_same_value",
    "learn_output_rule",
]


class OutputView:
    """A handle on outputs in memory that is used again: ``get()`` returns them, or raises once they were overwritten.

    Outputs in graph memory are valid until the next replay of any graph in the same pool. Clone what you keep for
    longer.

    Args:
        value: The outputs.
        source: Whose memory it is. None: memory that no replay touches, as of an eager step.
    """

    __slots__ = ("_generation", "_source", "_value")

    def __init__(self, value: Any, source: Pool | None) -> None:
        """``source`` is whose memory it is; None is for outputs that no replay touches (of an eager step)."""
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
        for index, (dims, real, full) in enumerate(zip(self.follows, _tensors(tree), _tensors(wider), strict=True)):
            for tensor, number in ((real, rows), (full, size)):
                expected = {**dict(enumerate(full.shape)), **extents_of(dims, number)}
                if tuple(tensor.shape) != tuple(expected.values()):
                    at, to = extents_text(axes, rows), extents_text(axes, size)
                    raise CaptureError(
                        f"output {index} has shape {tuple(real.shape)} for a batch of {at} and {tuple(full.shape)} for "
                        f"{to}, where only dimensions {[dim for dim, *_ in dims]} follow the batch; {_REMEDY}",
                        Reason.OUTPUT_ROWS_UNKNOWN,
                    )


_REMEDY = (
    "a graph can be cut only along dimensions that are a fixed multiple of the rows (of one dynamic dimension, where "
    "there are several)"
)


def learn_output_rule(
    axes: Sequence[Axis], tree: Any, rows: int, others: Sequence[tuple[Axis, int, Any]]
) -> OutputRule:
    """The rule that explains the shapes of outputs for ``rows``, and for ``others``: each with another extent along its
    axis alone.

    Raises ``CaptureError`` if an output follows the batch in a way that cannot be cut to the real rows.
    """
    found = [(axis, number, _tensors(other)) for axis, number, other in others]
    follows = []
    for index, tensor in enumerate(_tensors(tree)):
        dims: dict[int, tuple[int, int, Axis]] = {}
        for axis, number, outputs in found:
            other, m, n = outputs[index], axis.of(rows), axis.of(number)
            pairs = list(enumerate(zip(tensor.shape, other.shape, strict=False)))
            changed = {dim: (a, b) for dim, (a, b) in pairs if a != b}
            if tensor.dim() != other.dim() or any(
                dim in dims or a % m or b % n or a // m != b // n for dim, (a, b) in changed.items()
            ):
                raise CaptureError(
                    f"output {index} has shape {tuple(tensor.shape)} for a batch of {extents_text(axes, rows)} and "
                    f"{tuple(other.shape)} for {extents_text(axes, number)}; {_REMEDY}",
                    Reason.OUTPUT_ROWS_UNKNOWN,
                )
            dims |= {dim: (dim, a // m, axis) for dim, (a, _) in changed.items()}
        follows.append(tuple(dims[dim] for dim in sorted(dims)))
    return OutputRule(tuple(follows))


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
        self._has_objects = has_objects(tree)
        if self._has_objects:
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
        """Eager's answer for ``rows`` rows, in the tensors that a replay would return. Hold the pool's lock.

        With ``outputs="static"`` they are the graph's own, so that their addresses hold from the first call on.
        """
        if self._mode != "static":
            return answer
        if self._has_objects:
            answer = opened_like(answer, self.tree)
        cut = self.peek(rows)
        for target, source, own in zip(cut, _tensors(answer), self._is_own, strict=True):
            if own:
                apart = tuple(slice(1 if stride == 0 else None) for stride in target.stride())
                target[apart].copy_(source[apart])  # along an expanded dimension all elements are one in memory
        return self._build(cut)

    def peek(self, rows: int) -> list[torch.Tensor]:
        """The output tensors in graph memory, cut to ``rows`` rows, in order."""
        with torch.inference_mode(False), torch.no_grad():
            tensors = zip(self._tensors, self.rule.follows, strict=True)
            cut = [first_rows(tensor, dims, rows) for (_, tensor), dims in tensors]
            return [cut[first] for first in self._firsts] or cut

    @property
    def nbytes(self) -> int:
        """The size of all output tensors, wherever they lie."""
        return sum(tensor.nbytes for _, tensor in self._tensors)


def first_rows(tensor: torch.Tensor, dims: tuple[tuple[int, int, Axis], ...], rows: int) -> torch.Tensor:
    """An output cut to its first rows; ``dims`` are the dimensions that follow the batch, as in ``OutputRule``."""
    for dim, extent in extents_of(dims, rows).items():
        tensor = tensor.narrow(dim, 0, extent)
    return tensor


def extents_of(dims: tuple[tuple[int, int, Axis], ...], rows: int) -> dict[int, int]:
    """The extent of each of these dimensions for ``rows`` rows."""
    return {dim: factor * axis.of(rows) for dim, factor, axis in dims}


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
