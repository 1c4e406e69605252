"""Compares graphs with eager on batches that no call brought.

A second batch is made of an example where all calls are alike: its rows in another order, with other numbers.

Note [rows that a rule hides]
    The proof that rows are independent replays a graph with other padding, but it keeps to the rules: those of the
    user, a scratch row of zeros, masks whose padding hides what it pads. Whether such padding is neutral depends on the
    real rows: a maximum of at least zero hides zeros. So real rows of other kinds are tried here.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..capture.probes import Make, edge, far, is_discrete, may_replace, of_kind, small, telling_places, uniform
from ..capture.request import CaptureResult
from ..errors import GraphDispatchError, error_of_signal
from ..memory.entry import CUDAGraphEntry
from ..memory.proof import RowProof
from ..sizes import lengths_of, pack
from .graphs import GraphSet
from .group import GraphGroup

_log = logging.getLogger("graphdispatch")
_MOST_PLACES = 2


def difference_on(
    graphs: GraphSet, group: GraphGroup, batch: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> CaptureResult | None:
    """Compare a graph with eager on a batch that no call brought: what found a difference, or None. Leaves no effects,
    and raises what the callable raises."""
    result = graphs.verify(group, batch, rows, entry, keep_effects=False)
    return result if result.entry is None else None


def _difference_on_made(
    graphs: GraphSet,
    group: GraphGroup,
    make: Callable[[], Sequence[Any] | None],
    rows: int,
    entry: CUDAGraphEntry,
    name: str,
) -> CaptureResult | None:
    """The same on a batch that is made: nothing is compared where none can be, or the callable raises for it."""
    try:
        batch = make()
        return difference_on(graphs, group, batch, rows, entry) if batch is not None else None
    except GraphDispatchError:
        raise
    except Exception as error:
        if error_of_signal(error) is not None:
            raise
        _log.debug("%r was not compared on %s: %s", entry, name, error)
        return None


def settle(
    graphs: GraphSet, group: GraphGroup, values: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> CaptureResult | None:
    """The same with another batch made of one: all calls were alike, or this one cannot tell."""

    def other() -> Sequence[Any] | None:
        batch = varied(group, values, rows)
        return batch if entry.differs(batch) else None

    return None if graphs.cache.is_frozen else _difference_on_made(graphs, group, other, rows, entry, "another batch")


def compare(
    graphs: GraphSet, group: GraphGroup, values: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> CaptureResult:
    """Compare a graph with eager on a call's batch, and where a rule pads it also on other rows.

    A batch of zeros cannot show that the code takes another branch for so many rows; then another one is made of it.
    """
    result = graphs.verify(group, values, rows, entry)
    if entry.depends_on_padding(rows):
        return result
    was_dull = rows != entry.size and not entry.compared.covers(rows, entry.size)
    found = settle(graphs, group, values, rows, entry) if was_dull and result.entry is not None else None
    if found is None and result.entry is not None:
        found = stretched(graphs, group, values, rows, entry)
    return result if found is None else replace(found, answer=result.answer)


def stretched(
    graphs: GraphSet, group: GraphGroup, values: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> CaptureResult | None:
    """What other rows, made of a padded batch, show where no proof may replace the padding, for as many batches as
    proofs ask; else None: see Note [rows that a rule hides]."""
    proof, specs, may_write = entry.proof, group.inputs.specs, graphs.options.padding_writes
    if rows == entry.size or entry.program.is_stretched or proof is None or proof.untested:
        return None
    kept = {i for i, spec in enumerate(specs) if spec.spans and not may_replace(specs, i, may_write)}
    # One row has no other to show more.
    entry.program.is_stretched = proof.is_complete and group.inputs.cells(rows) > 1
    if not kept and not proof.kept:
        return None
    axes = group.inputs.axes
    lengths = zip(lengths_of(axes, rows), lengths_of(axes, entry.size), strict=True)
    rows = pack(axes, [own - (1 < own == full) for own, full in lengths])  # padding along each
    try:
        kinds = list(_kinds(group, values, rows, proof, kept))
    except Exception as error:
        _log.debug("%r was not compared on other rows: %s", entry, error)
        return None
    tried = (
        _difference_on_made(graphs, group, partial(_batch, group, values, rows, make), rows, entry, name)
        for name, make in kinds
    )
    return next((found for found in tried if found is not None), None)


def _kinds(
    group: GraphGroup, values: Sequence[Any], rows: int, proof: RowProof, kept: Collection[int]
) -> Iterator[tuple[str, Make]]:
    """Kinds of real rows that may show what a rule hides, in words, and how each argument is made so.

    ``kept`` are the arguments (by index) whose padding follows a rule in all proofs, beside those that ``proof`` kept.
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


def varied(group: GraphGroup, leaves: Sequence[Any], rows: int) -> list[Any]:
    """Another batch, made of an example: its rows in turn, from the second one on, with other floating-point numbers.

    Each number is up to a quarter larger or smaller, so that zeros and what is not finite stay; but a tensor of zeros
    alone gets other numbers.
    """
    generator = torch.Generator().manual_seed(rows)
    batch = group.resized(leaves, rows, shift=1)
    for spec in group.inputs.specs:
        if spec.dtype.is_floating_point and spec.dtype.itemsize > 1:
            factor = 0.75 + torch.rand(spec.sized(rows), generator=generator, device="cpu") / 2
            value = batch[spec.position] if spec.spans else batch[spec.position].clone()
            factor = factor.to(spec.device, spec.dtype)
            batch[spec.position] = value.mul_(factor) if bool(value.any()) else factor - 1
    return batch
