"""Another batch made of an example, and graphs whose calls are all alike settled by one."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..capture.request import CaptureResult
from ..errors import GraphDispatchError
from ..memory.entry import CUDAGraphEntry
from .group import GraphGroup

if TYPE_CHECKING:
    from .server import Server

__all__ = ["compare", "settle", "stretch", "varied"]

_log = logging.getLogger("graphdispatch")


def settle(server: "Server", group: GraphGroup, values: Sequence[Any], rows: int, entry: CUDAGraphEntry) -> None:
    """Compare a graph all of whose calls were alike with eager on another batch, so that further ones can be hits.

    Leaves no effects. Nothing happens where no other batch can be made, and where the callable raises for it.
    """
    other = varied(group, values, rows)
    if server.graphs.is_frozen or not group.differs(entry, other):
        return
    try:
        server.graphs.verify(group, other, rows, entry, keep_effects=False)
    except GraphDispatchError:
        raise
    except Exception as error:
        _log.debug("%r was not compared on another batch: %s", entry, error)


def compare(
    server: "Server", group: GraphGroup, values: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> CaptureResult:
    """Compare a graph with eager on a call's batch, and where a rule of the user pads it also on other rows."""
    result = server.graphs.verify(group, values, rows, entry)
    found = stretch(server, group, values, rows, entry) if result.entry is not None else None
    return result if found is None else replace(found, answer=result.answer)


def stretch(
    server: "Server", group: GraphGroup, values: Sequence[Any], rows: int, entry: CUDAGraphEntry
) -> CaptureResult | None:
    """Compare a graph with eager on the rows of a padded batch with small numbers, and with the other sign, if the user
    has a rule for padding of floating-point numbers; the result that found a difference, or None.

    A rule is kept in all proofs, so that only other real rows can show whether it is neutral for them. Once for each
    entry. Leaves no effects. Nothing happens where the callable checks its data, or raises for such rows.
    """
    specs = [spec for spec in group.inputs.specs if spec.dim is not None and spec.dtype.is_floating_point]
    is_limited = entry.proof is None or entry.proof.limited
    if rows == entry.size or entry.is_stretched or is_limited or not any(spec.is_pad_given for spec in specs):
        return None
    entry.is_stretched = True
    for factor in _FACTORS:
        batch = list(values)
        for spec in specs:
            batch[spec.position] = (values[spec.position].detach() * factor).to(spec.dtype)
        try:
            result = server.graphs.verify(group, batch, rows, entry, keep_effects=False)
        except GraphDispatchError:
            raise
        except Exception as error:
            _log.debug("%r was not compared on rows times %s: %s", entry, factor, error)
            continue
        if result.entry is None:
            return result
    return None


_FACTORS = (2.0**-10, -1.0)


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
            value = batch[spec.position] if spec.dim is not None else batch[spec.position].clone()
            factor = factor.to(spec.device, spec.dtype)
            batch[spec.position] = value.mul_(factor) if bool(value.any()) else factor - 1
    return batch
