"""What a run says of all batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from torch._ops import OpOverload

from .batches import BatchSpace
from .labels import Dim, Sizes
from .slots import Slots


class Step(NamedTuple):
    """One operator of the run."""

    operator: OpOverload
    dims: tuple[tuple[Dim | int, ...] | None, ...]
    """The dimensions of each tensor that it took, then of each result, which are sizes where it follows no batch; None
    where no rule tells them."""


@dataclass(frozen=True)
class Verdict:
    """Whether rows are independent, and for which batches the run speaks."""

    mixes: str
    """Where rows mix for sure, with the line; else empty."""
    unknown: str
    """Which operator no rule tells of, with the line, so that only the user can say; else empty."""
    mixed_axes: frozenset[int]
    """The lengths along which elements go into each other, as in attention."""
    by_place: str
    """Where rows get something by their place in the batch, as numbers from ``arange``, with the line; else empty. So
    a row is the same before other padding, and another one at another place."""
    outputs: tuple[tuple[tuple[int, ...], ...] | None, ...]
    """For each dimension of each output the axes that it follows, the outermost first; None if nothing tells."""
    uncut: Mapping[int, str]
    """The lengths along which an output cannot be cut by its end, and why."""
    steps: tuple[Step, ...]
    """The operators in order, but for those that keep elements as they are."""
    slots: Slots
    """State that elements write at places which they name."""
    space: BatchSpace = field(repr=False)
    """The batches for which Python takes the path of the run."""
    sizes: Sizes = field(repr=False)

    @property
    def independent(self) -> bool:
        """Whether no row depends on another."""
        return not self.mixes and not self.unknown

    def has_shapes(
        self, shapes: Sequence[tuple[OpOverload, tuple[tuple[int, ...], ...]]], extents: Sequence[int]
    ) -> bool:
        """Whether a plain run of another batch is the run that the labels tell of.

        Args:
            shapes: The operators of the plain run in order, each with the shapes of what it took and gave.
            extents: The extents of its batch.

        Returns:
            Whether the operators are the same, and the tensors have the shapes of the labels. What no rule tells is
            left out. False shows a label that was right by chance alone.
        """
        where = self.space.place_of(extents)
        if where is None or len(shapes) != len(self.steps):
            return False
        if any(extents[axis] != self.space.own[axis] for axis in self.sizes.fixed):
            return False
        extent_of = cache(lambda dim: dim if isinstance(dim, int) else self.sizes.at(dim, where))
        for step, (operator, given) in zip(self.steps, shapes, strict=True):
            if step.operator != operator or len(step.dims) != len(given):
                return False
            for dims, shape in zip(step.dims, given, strict=True):
                if dims is not None and tuple(map(extent_of, dims)) != tuple(shape):
                    return False
        return True
