"""What the outputs of one call say of its graph: which dimensions follow the batch, and which values are frozen.

Which dimension of an output follows the batch is learnt, where no label says so, by comparing a run of the real rows
with runs of other batches, never from a dimension that merely equals the number of rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from ...errors import CaptureError
from ...reasons import Reason
from ...runtime.constants import VALUES
from ...runtime.flatten import describe, is_tensor
from ...runtime.outputs import OutputRule, extents_of
from ...sizes import Axis, extents_text


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
            expected = {**dict(enumerate(full.shape)), **extents_of(dims, number)}
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
