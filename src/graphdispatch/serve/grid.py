"""The route of calls with several dynamic dimensions."""

from collections.abc import Hashable

from ..decide.grid import descriptor_of
from ..descriptors import BatchDescriptor
from ..extents import Extents
from .group import Route

__all__ = ["GridRoute"]


class GridRoute(Route):
    """A route whose graphs are named by the extents that they have room for."""

    def descriptor_of(self, size: int) -> BatchDescriptor:
        """What the graph of ``size`` serves."""
        return descriptor_of(size)

    def name_of(self, size: int) -> Hashable:
        """The extents, one for each dimension: batch size and sequence length."""
        return size.lengths if isinstance(size, Extents) else size
