"""The dynamic dimensions of a batch, and the one number that stands for its extents along all of them.

Where there is one dynamic dimension the number is its rows. Where there are several, each has bits of its own in it. So
a lookup by the number is one lookup, whatever it stands for.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

__all__ = [
    "HIDDEN",
    "LONGEST",
    "MOST_AXES",
    "ROWS",
    "Axis",
    "Extents",
    "axes_of",
    "cells_of",
    "extents_text",
    "lengths_of",
    "pack",
]

_BITS = 21
MOST_AXES = 3
LONGEST = (1 << _BITS) - 1
"""What a longer extent counts as; no size is as large."""
HIDDEN = 1 << 63
"""Set in the number of a batch of which some row is padding alone, as its mask says."""


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


def axes_of(names: Sequence[str]) -> tuple[Axis, ...]:
    """Axes for at most ``MOST_AXES`` dimensions; the first of several is in the highest bits."""
    if len(names) == 1:
        return (Axis(names[0]),)
    shifts = range(_BITS * (len(names) - 1), -1, -_BITS)
    return tuple(Axis(name, shift, LONGEST) for name, shift in zip(names, shifts, strict=True))


def pack(axes: Sequence[Axis], lengths: Sequence[int]) -> int:
    """The number of a batch with these extents, one for each axis: its rows, if these are the only axis."""
    return lengths[0] if tuple(axes) == (ROWS,) else Extents.pack(axes, lengths)


def lengths_of(axes: Sequence[Axis], number: int) -> tuple[int, ...]:
    """The extents of a batch, one for each axis."""
    return tuple(axis.of(number) for axis in axes)


def extents_text(axes: Sequence[Axis], number: int) -> str:
    """The extents of a batch for a person: ``4 x 37``, or its rows."""
    return " x ".join(map(str, lengths_of(axes, number)))


class Extents(int):
    """The number of a batch with several dynamic dimensions; as text it names the extents, ``4 x 37``."""

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, axes: Sequence[Axis], number: int) -> "Extents":
        """A number as what it stands for."""
        extents = cls(number)
        extents.axes = tuple(axes)
        return extents

    @classmethod
    def pack(cls, axes: Sequence[Axis], lengths: Sequence[int]) -> "Extents":
        """The number of some lengths, one for each axis."""
        return cls.of(axes, sum(axis.put(n) for axis, n in zip(axes, lengths, strict=True)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The extents, one for each axis."""
        return lengths_of(self.axes, self)

    @property
    def cells(self) -> int:
        """Their product: what graphs compute on, as far as that follows the extents."""
        return prod(self.lengths)

    def __str__(self) -> str:
        return extents_text(self.axes, self)

    def __format__(self, spec: str) -> str:
        return format(str(self) if not spec or spec[-1] == "s" else int(self), spec)


def cells_of(number: int) -> int:
    """The rows of a batch, or the product of its extents where there are several dynamic dimensions."""
    cells: int = getattr(number, "cells", number)
    return cells
