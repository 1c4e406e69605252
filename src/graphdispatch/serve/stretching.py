"""Compares a padded graph with eager on rows that no call brought, where its padding follows a rule.

The proof that rows are independent replays a graph with other padding, but it keeps to the rules: those of the user, a
scratch row of zeros, masks whose padding hides what it pads. Whether such padding is neutral depends on the real rows:
a maximum of at least zero hides zeros. So real rows of other kinds are tried here.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..capture.padding import Make, edge, far, is_discrete, of_kind, small, telling_places, uniform
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
    try:
        kinds = list(_kinds(group, values, rows, proof, kept))
    except Exception as error:
        _log.debug("%r was not compared on other rows: %s", entry, error)
        return None
    for name, make in kinds:
        try:
            result = server.graphs.verify(group, _batch(group, values, rows, make), rows, entry, keep_effects=False)
        except GraphDispatchError:
            raise
        except Exception as error:
            _log.debug("%r was not compared on %s: %s", entry, name, error)
            continue
        if result.entry is None:
            return result
    return None


def _kinds(
    group: GraphGroup, values: Sequence[Any], rows: int, proof: RowProof, kept: Collection[int]
) -> Iterator[tuple[str, Make]]:
    """Kinds of real rows that may show what a rule hides, in words, and how each argument is made so.

    Rules of floating-point numbers get numbers of other kinds, or the edges of the batch if the callable limits what it
    takes. For all other rules one row of the batch takes the place of all.
    """
    specs = group.inputs.specs
    arguments = [values[spec.position] for spec in specs]
    real = [i for i in kept if specs[i].dtype.is_floating_point]
    if real and not proof.limited:
        yield "small numbers", partial(of_kind, real, small)
    for sign in (1, -1) if real else ():
        yield "numbers of one sign", partial(of_kind, real, partial(edge if proof.limited else far, sign))
    whole = [*proof.kept, *(i for i in sorted(kept) if is_discrete(specs[i], arguments[i]))]
    for place in telling_places(specs, arguments, rows, whole)[:_MOST_PLACES]:
        yield "one row in place of all", partial(uniform, place)


def _batch(group: GraphGroup, values: Sequence[Any], rows: int, make: Make) -> list[Any]:
    """The call's values with other rows."""
    batch = list(values)
    for index, spec in enumerate(group.inputs.specs):
        value = values[spec.position].detach()
        made = make(index, spec, value, rows)
        batch[spec.position] = spec.repeated(value, rows) if made is None else made
    return batch


_MOST_PLACES = 2
