"""Compares graphs with eager on batches that no call brought.

A second batch is made of an example where all calls are alike: its rows in another order, with other numbers.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..capture.request import CaptureResult
from ..errors import GraphDispatchError, error_of_signal
from ..memory.entry import CUDAGraphEntry
from .graphs import GraphSet
from .group import GraphGroup

_log = logging.getLogger("graphdispatch")


def difference_on(
    graphs: GraphSet, group: GraphGroup, batch: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> CaptureResult | None:
    """Compare a graph with eager on a batch that no call brought: what found a difference, or None. Leaves no effects,
    and raises what the callable raises."""
    result = graphs.verify(group, batch, rows, entry, keep_effects=False)
    return result if result.entry is None else None


def settle(
    graphs: GraphSet, group: GraphGroup, values: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> CaptureResult | None:
    """The same with another batch made of one: all calls were alike, or this one cannot tell. Nothing is compared where
    none can be made, or the callable raises for it."""
    if graphs.cache.is_frozen:
        return None
    try:
        batch = varied(group, values, rows)
        return difference_on(graphs, group, batch, rows, entry) if entry.differs(batch) else None
    except GraphDispatchError:
        raise
    except Exception as error:
        if error_of_signal(error) is not None:
            raise
        _log.debug("%r was not compared on another batch: %s", entry, error)
        return None


def compare(
    graphs: GraphSet, group: GraphGroup, values: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> CaptureResult:
    """Compare a graph with eager on a call's batch.

    A batch of zeros cannot show that the code takes another branch for so many rows; then another one is made of it.
    """
    result = graphs.verify(group, values, rows, entry)
    if entry.depends_on_padding(rows):
        return result
    was_dull = rows != entry.size and not entry.compared.covers(rows, entry.size)
    found = settle(graphs, group, values, rows, entry) if was_dull and result.entry is not None else None
    return result if found is None else replace(found, answer=result.answer)


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
