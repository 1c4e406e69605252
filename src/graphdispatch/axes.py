"""The dynamic dimensions of a batch, and where each has its extent in the number that stands for the batch."""

from typing import NamedTuple

__all__ = ["ROWS", "Axis", "cells_of"]


class Axis(NamedTuple):
    """One dynamic dimension, and where its extent is in the number."""

    name: str
    shift: int = 0
    mask: int = -1

    def of(self, number: int) -> int:
        """The extent along this axis."""
        return number >> self.shift & self.mask

    @property
    def bits(self) -> int:
        """Where the extent is in the number."""
        return self.mask << self.shift

    def put(self, extent: int) -> int:
        """The number of a batch that has this extent, and none along other axes. What is too long counts as longest."""
        return (extent if self.mask < 0 else min(extent, self.mask)) << self.shift


ROWS = Axis("rows")
"""The only dynamic dimension: the number is its extent."""


def cells_of(number: int) -> int:
    """The rows of a batch, or the product of its extents where there are several dynamic dimensions."""
    cells: int = getattr(number, "cells", number)
    return cells
