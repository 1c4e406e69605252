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
    others = _others(group, values, rows, proof, kept)
    while True:
        what = "other rows"
        try:
            what, batch = next(others)
            result = server.graphs.verify(group, batch, rows, entry, keep_effects=False)
        except StopIteration:
            return None
        except GraphDispatchError:
            raise
        except Exception as error:  # a generator that raised is at its end
            _log.debug("%r was not compared on %s: %s", entry, what, error)
            continue
        if result.entry is None:
            return result


def _others(
    group: GraphGroup, values: Sequence[Any], rows: int, proof: RowProof, kept: Collection[int]
) -> Iterator[tuple[str, list[Any]]]:
    """Batches whose real rows may show what a rule hides, each with what it is: numbers of other kinds for rules of
    floating-point numbers, those of the batch alone where others are limited; one row in place of all for others."""
    specs = group.inputs.specs
    arguments = [values[spec.position] for spec in specs]
    real = [i for i in kept if specs[i].dtype.is_floating_point]
    signs = [partial(of_kind, real, partial(edge if proof.limited else far, sign)) for sign in (1, -1)] if real else []
    whole = [*proof.kept, *(i for i in sorted(kept) if is_discrete(specs[i], arguments[i]))]
    places = telling_places(specs, arguments, rows, whole)[:_MOST_PLACES]
    kinds: dict[str, Sequence[Make]] = {
        "small numbers": [partial(of_kind, real, small)] if real and not proof.limited else [],
        "numbers of one sign": signs,
        "one row in place of all": [partial(uniform, place) for place in places],
    }
    for name, makes in kinds.items():
        for make in makes:
            batch = list(values)
            for index, (spec, value) in enumerate(zip(specs, arguments, strict=True)):
                made = make(index, spec, value, rows)
                batch[spec.position] = spec.repeated(value.detach(), rows) if made is None else made
            yield name, batch


_MOST_PLACES = 2
