"""Compares a padded graph with eager on rows that no call brought, where its padding follows a rule.

The proof that rows are independent replays a graph with other padding, but it keeps to the rules: those of the user, a
scratch row of zeros, masks whose padding hides what it pads. Whether such padding is neutral depends on the real rows:
a maximum of at least zero hides zeros. So real rows of other kinds are tried here.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..capture.padding import is_discrete, telling_places, uniform
from ..capture.request import CaptureResult
from ..errors import GraphDispatchError
from ..memory.entry import CUDAGraphEntry
from ..memory.proof import RowProof
from .group import GraphGroup

if TYPE_CHECKING:
    from .server import Server

__all__ = ["stretch"]

_log = logging.getLogger("graphdispatch")


def stretch(
    server: "Server",
    group: GraphGroup,
    values: Sequence[Any],
    rows: int,
    entry: CUDAGraphEntry,
    kept: Collection[int],
) -> CaptureResult | None:
    """Compare a graph with eager on other rows made of a padded batch; the result that found a difference, or None.

    ``kept`` are the arguments (by index) whose padding follows a rule in all proofs, beside those that the entry's
    proof kept. Leaves no effects. Nothing happens where the callable raises for such rows.
    """
    proof = entry.proof
    assert proof is not None
    for axis in {axis for spec in group.inputs.specs for _, axis in spec.spans}:  # padding along each
        rows -= int(1 < axis.of(rows) == axis.of(entry.size)) << axis.shift
    for what, batch in _others(group, values, rows, proof, kept):
        try:
            result = server.graphs.verify(group, batch, rows, entry, keep_effects=False)
        except GraphDispatchError:
            raise
        except Exception as error:
            _log.debug("%r was not compared on %s: %s", entry, what, error)
            continue
        if result.entry is None:
            return result
    return None


def _others(
    group: GraphGroup, values: Sequence[Any], rows: int, proof: RowProof, kept: Collection[int]
) -> Iterator[tuple[str, list[Any]]]:
    """Batches whose real rows may show what a rule hides, each with what it is: one row in place of all, for rules of
    integers; and, unless the callable checks its data, small numbers and the other sign for rules of others."""
    specs = group.inputs.specs
    arguments = [values[spec.position] for spec in specs]
    real = [i for i in sorted(kept) if specs[i].dtype.is_floating_point]
    for factor in _FACTORS if real and not proof.limited else ():
        made = {i: specs[i].repeated(arguments[i].detach(), rows) for i in range(len(specs))}
        made |= {i: (made[i] * factor).to(specs[i].dtype) for i in real}
        yield f"rows times {factor}", _with(group, values, made)
    whole = [*proof.kept, *(i for i in sorted(kept) if is_discrete(specs[i], arguments[i]))]
    for place in telling_places(specs, arguments, rows, whole)[:_MOST_PLACES]:
        made = {i: uniform(spec, arguments[i], place, rows) for i, spec in enumerate(specs)}
        yield "one row in place of all", _with(group, values, made)


def _with(group: GraphGroup, values: Sequence[Any], made: Mapping[int, torch.Tensor]) -> list[Any]:
    batch = list(values)
    for index, value in made.items():
        batch[group.inputs.specs[index].position] = value
    return batch


_FACTORS = (2.0**-10, -1.0)
_MOST_PLACES = 2
