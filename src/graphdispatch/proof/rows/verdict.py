"""What a run says of all batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch._ops import OpOverload

from .batches import BatchSpace
from .labels import Dim, Sizes


class Step(NamedTuple):
    """One operator of the run."""

    operator: OpOverload
    results: tuple[tuple[Dim, ...] | None, ...]
    """The dimensions of each result; None where no rule tells them."""


@dataclass(frozen=True)
class Verdict:
    """Whether rows are independent, and for which batches the run speaks."""

    mixes: str
    """Where rows mix for sure, with the line; else empty."""
    unknown: str
    """Which operator no rule tells of, with the line, so that only the user can say; else empty."""
    mixed_axes: frozenset[int]
    """The lengths along which elements go into each other, as in attention."""
    outputs: tuple[tuple[tuple[int, ...], ...] | None, ...]
    """For each dimension of each output the axes that it follows, the outermost first; None if nothing tells."""
    steps: tuple[Step, ...]
    """The operators in order."""
    writes_state: bool
    """Whether it wrote to memory that it did not make."""
    notes: tuple[str, ...]
    space: BatchSpace = field(repr=False)
    sizes: Sizes = field(repr=False)

    @property
    def independent(self) -> bool:
        """Whether no row depends on another."""
        return not self.mixes and not self.unknown

    def speaks_for(self, extents: Sequence[int]) -> bool:
        """Whether Python takes the path of the run for a batch of these extents."""
        return self.space.speaks_for(extents)

    def why_not(self, extents: Sequence[int]) -> str:
        """The first guard that excludes a batch of these extents, with its line; else empty."""
        return self.space.why_not(extents)

    def has_shapes(
        self, shapes: Sequence[tuple[OpOverload, tuple[tuple[int, ...], ...]]], extents: Sequence[int]
    ) -> bool:
        """Whether a plain run of another batch is the run that the labels tell of.

        Args:
            shapes: The operators of the plain run in order, each with the shapes of its results.
            extents: The extents of its batch.

        Returns:
            Whether the operators are the same, and the results have the shapes of the labels. What no rule tells is
            left out. False shows a label that was right by chance alone.
        """
        where = self.space.place_of(extents)
        if where is None or len(shapes) != len(self.steps):
            return False
        known: dict[Dim, int] = {}
        for step, (operator, results) in zip(self.steps, shapes, strict=True):
            if step.operator is not operator or len(step.results) != len(results):
                return False
            for dims, shape in zip(step.results, results, strict=True):
                if dims is None:
                    continue
                for dim in dims:
                    if dim not in known:
                        known[dim] = self.sizes.at(dim, where)
                if tuple(map(known.__getitem__, dims)) != tuple(shape):
                    return False
        return True
