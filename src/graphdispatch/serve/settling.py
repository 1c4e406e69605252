"""Derives a second batch from an example, and verifies graphs whose calls are all alike on it."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..axes import cells_of
from ..capture.padding import may_replace
from ..capture.request import CaptureResult
from ..errors import GraphDispatchError
from ..memory.entry import CUDAGraphEntry
from .group import GraphGroup

if TYPE_CHECKING:
    from .server import Server

__all__ = ["compare", "settle", "stretched", "varied"]

_log = logging.getLogger("graphdispatch")


def settle(
    server: "Server", group: GraphGroup, values: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> CaptureResult | None:
    """Compare a graph with eager on another batch made of one: all calls were alike, or this one cannot tell.

    The result, or None if nothing was compared: no other batch can be made, or the callable raises for it. Leaves no
    effects.
    """
    if server.graphs.is_frozen:
        return None
    try:
        other = varied(group, values, rows)
        if not entry.differs(other):
            return None
        return server.graphs.verify(group, other, rows, entry, keep_effects=False)
    except GraphDispatchError:
        raise
    except Exception as error:
        _log.debug("%r was not compared on another batch: %s", entry, error)
        return None


def compare(
    server: "Server", group: GraphGroup, values: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> CaptureResult:
    """Compare a graph with eager on a call's batch, and where a rule pads it also on other rows.

    A batch of zeros cannot show that the code takes another branch for so many rows; then another one is made of it.
    """
    result = server.graphs.verify(group, values, rows, entry)
    if entry.depends_on_padding(rows):
        return result
    was_dull = rows != entry.size and not entry.compared.covers(rows, entry.size)
    for further in (settle if was_dull else None, stretched):
        found = further(server, group, values, rows, entry) if further and result.entry is not None else None
        result = result if found is None or found.entry is not None else replace(found, answer=result.answer)
    return result


def stretched(
    server: "Server", group: GraphGroup, values: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> CaptureResult | None:
    """What ``stretch`` finds where no proof may replace the padding: for as many batches as proofs ask."""
    proof, specs, may_write = entry.proof, group.inputs.specs, server.graphs.options.padding_writes
    if rows == entry.size or entry.program.is_stretched or proof is None or proof.untested:
        return None
    kept = {i for i, spec in enumerate(specs) if spec.spans and not may_replace(specs, i, may_write)}
    entry.program.is_stretched = proof.is_complete and cells_of(rows) > 1  # one row has no other to show more
    if not kept and not proof.kept:
        return None
    from .stretching import stretch  # here, since few callables need a rule

    return stretch(server, group, values, rows, entry, kept)


def varied(group: GraphGroup, leaves: Sequence[Any], rows: int) -> list[Any]:
    """Another batch, made of an example: its rows in turn, from the second one on, with other floating-point numbers.

    Each number is up to a quarter larger or smaller, so that zeros and what is not finite stay; but a tensor of zeros
    alone gets other numbers.
    """
    generator = torch.Generator().manual_seed(rows)
    batch = group.resized(leaves, rows, shift=1)
    for spec in group.inputs.specs:
        if spec.dtype.is_floating_point and spec.dtype.itemsize > 1:
            factor = 0.75 + torch.rand(spec.sized(rows), generator=generator) / 2
            value = batch[spec.position] if spec.spans else batch[spec.position].clone()
            factor = factor.to(spec.device, spec.dtype)
            batch[spec.position] = value.mul_(factor) if bool(value.any()) else factor - 1
    return batch
