"""Another batch made of an example, and graphs whose calls are all alike settled by one."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import GraphDispatchError
from ..memory.entry import CUDAGraphEntry
from .group import GraphGroup

if TYPE_CHECKING:
    from .server import Server

__all__ = ["settle", "varied"]

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
