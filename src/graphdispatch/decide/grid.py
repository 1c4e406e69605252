"""Decisions for batches with several dynamic dimensions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..axes import Axis
from ..descriptors import BatchDescriptor
from ..errors import ConfigError, shown
from ..extents import HIDDEN, Extents
from ..modes import CUDAGraphMode
from ..reasons import Reason
from .decision import Decision, SizeTable

__all__ = ["GridTable", "descriptor_of"]

_HIDDEN = (
    "a mask hides a whole row, so that what is real in it would depend on padding; leave such rows out, or give the "
    "mask a pad rule, which says that this does not matter"
)


class GridTable(SizeTable):
    """Decisions for every combination of extents, each made once, at its first lookup. Immutable and thread-safe.

    A batch is served by the smallest of ``points`` (combinations of sizes, one for each axis) that has room for it: of
    all the one with the smallest product. They need not be all combinations of some sizes.
    """

    def __init__(
        self, axes: Sequence[Axis], points: Iterable[Sequence[int]], mode: CUDAGraphMode, *, pad_batches: bool = True
    ) -> None:
        self.axes = tuple(axes)
        packed = [Extents.pack(self.axes, point) for point in points]
        super().__init__(sorted(packed), mode, pad_batches=pad_batches)
        self._by_cells = sorted(packed, key=lambda size: (size.cells, size.lengths))

    @property
    def largest(self) -> int:
        """The largest size of each axis; 0 without sizes."""
        lengths = [size.lengths for size in self._by_cells]
        return Extents.pack(self.axes, list(map(max, zip(*lengths, strict=True)))) if lengths else 0

    def checked(self, sizes: Sequence[Any] | None) -> tuple[int, ...]:
        """``sizes``, or all, by their numbers. Raises ``ConfigError`` for one that is not captured here."""
        if sizes is None:
            return self.sizes
        if isinstance(sizes, (str, bytes, Mapping)) or not isinstance(sizes, Iterable):
            raise ConfigError(f"sizes must be several of {self.points}, got {shown(sizes)}")
        return tuple(map(self.number_of, sizes))

    def number_of(self, size: Any) -> int:
        """The number of a size. Raises ``ConfigError`` for one that is not captured here."""
        known = {size.lengths: size for size in self._by_cells}
        given = size.lengths if isinstance(size, Extents) else size
        if not isinstance(given, tuple) or given not in known:
            raise ConfigError(f"sizes must be among {self.points}, got {shown(size)}")
        return known[given]

    @property
    def points(self) -> tuple[Any, ...]:
        """The sizes as combinations of lengths, increasing."""
        return tuple(sorted(size.lengths for size in self._by_cells))

    def min_batch_of(self, size: int) -> int:
        """A batch that needs this size along each axis, by a little."""
        smaller = [max((s for s in column if s < own), default=0) for own, column in self._columns(size)]
        return Extents.pack(self.axes, [1 + length for length in smaller])

    def _columns(self, size: int) -> Iterable[tuple[int, tuple[int, ...]]]:
        lengths = Extents.of(self.axes, size).lengths
        return zip(lengths, zip(*(one.lengths for one in self._by_cells), strict=True), strict=True)

    def exceeds(self, other: SizeTable) -> bool:
        """Whether a batch may be longer, along some axis, than any that ``other`` serves."""
        return not (isinstance(other, GridTable) and Extents.of(self.axes, other.largest).covers(self.largest))

    def _decide(self, rows: int) -> Decision:
        batch = Extents.of(self.axes, rows)
        if not self.sizes:
            return Decision.eager(Reason.DISABLED, batch)
        if rows & HIDDEN:
            return Decision.eager(Reason.PADDING_UNPROVEN, Extents.of(self.axes, rows ^ HIDDEN), _HIDDEN)
        if not all(batch.lengths):
            return Decision.eager(Reason.NO_ROWS)
        size = next((size for size in self._by_cells if size.covers(batch)), None)
        if size is None:
            reason = Reason.ABOVE_LARGEST_SIZE
            names = " x ".join(axis.name for axis in self.axes)
            return Decision.eager(reason, batch, f"{reason.text} ({names}; largest: {self.largest!s})")
        if batch != size and not self.pads:
            return Decision.eager(Reason.NOT_CAPTURED, batch)
        reason = Reason.EXACT if batch == size else Reason.PADDED
        return Decision(self.mode, descriptor_of(size), size, reason, batch)


def descriptor_of(size: int) -> BatchDescriptor:
    """What a graph of a size serves: as many tokens as its cells, in as many requests as its first extent; uniform
    decode where each has one."""
    if not isinstance(size, Extents):
        return BatchDescriptor(size)
    first = size.lengths[0]
    return BatchDescriptor(size.cells, first, size.cells == first)
