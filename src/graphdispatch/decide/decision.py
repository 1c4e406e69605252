"""Decisions: mode, descriptor, padded size and reason, from an immutable table of sizes."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..axes import cells_of
from ..config import ResolvedConfig
from ..descriptors import BatchDescriptor
from ..errors import ConfigError, shown
from ..modes import CUDAGraphMode
from ..reasons import Reason
from .memo import Memo

__all__ = ["Decision", "SizeTable"]

_AGAINST_PADDING = (
    "; where padding is the cause, call eval(), give a mask or a pad rule, or have a size for it (sizes=)"
)


class Decision(NamedTuple):
    """What to do with one batch, and why. Immutable.

    Attributes:
        mode: The runtime mode; ``NONE`` is eager.
        descriptor: What the graph serves; None in an eager step.
        size: The padded number of rows; in an eager step, the rows themselves.
        reason: Why.
        rows: The number of real rows; 0 if unknown.
        detail: The reason in words of this case; empty if ``reason.text`` says it all.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor | None
    size: int
    reason: Reason
    rows: int = 0
    detail: str = ""

    @classmethod
    def eager(cls, reason: Reason, rows: int = 0, detail: str = "") -> "Decision":
        """The decision to run eagerly.

        Args:
            reason: Why.
            rows: The number of rows; 0 if unknown.
            detail: The reason in words of this case.

        Returns:
            A decision of mode ``NONE`` without a descriptor.
        """
        return cls(CUDAGraphMode.NONE, None, rows, reason, rows, detail)

    def as_mode(self, mode: CUDAGraphMode) -> "Decision":
        """The same decision, served by a graph of another mode.

        Args:
            mode: The runtime mode.

        Returns:
            The decision.
        """
        return self if mode is self.mode else self._replace(mode=mode)

    def explain(self) -> str:
        """One line for a person."""
        counted = f"{self.rows} row{'s' * (self.rows != 1)}"
        if self.mode is CUDAGraphMode.NONE:
            count = f", {counted}" if self.rows else ""
            remedy = _AGAINST_PADDING if self.reason is Reason.VERIFICATION_FAILED else ""
            return f"eager{count}: {self.detail or self.reason.text}{remedy}"
        rows, size = cells_of(self.rows), cells_of(self.size)
        padding = 100 * (1 - rows / size) if size else 0.0
        change = f"{self.rows} -> {self.size} rows, {padding:.1f} % padding" if padding else counted
        note = "" if self.reason.is_graph else f" ({self.detail or self.reason.text})"
        return f"{self.mode.name} graph, {change}{note}"


class SizeTable:
    """Decisions for every number of rows, for one dynamic dimension: each made once, at its first lookup.

    Immutable and thread-safe. ``sizes`` are the capture sizes, in increasing order, and ``min_batches`` the smallest
    batch that each serves (none: all above the next smaller size); with ``pad_batches=False`` only exact sizes are
    served.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        mode: CUDAGraphMode,
        *,
        pad_batches: bool = True,
        min_batches: Sequence[int] = (),
    ) -> None:
        self.sizes = tuple(sizes)
        self.mode = mode
        self.fixed = Decision(mode, BatchDescriptor(1), 1, Reason.EXACT, 1)
        """The decision for calls without a batch dimension."""
        self.pads = pad_batches
        """Whether a batch is served by a larger size."""
        self._min_batches = dict(zip(self.sizes, min_batches or [1 + size for size in (0, *self.sizes)], strict=False))
        self._decisions = Memo(self._decide)

    @classmethod
    def of(cls, resolved: ResolvedConfig, mode: CUDAGraphMode) -> "SizeTable":
        """The table of a configuration for one runtime mode; without sizes in mode NONE."""
        if not mode.has_graphs():
            return cls((), mode)
        return cls(resolved.sizes, mode, pad_batches=resolved.config.pad_batches, min_batches=resolved.min_batches)

    def checked(self, sizes: Sequence[int] | None) -> tuple[int, ...]:
        """``sizes``, or all. Raises ``ConfigError`` for one that is not captured here, and for what is no sequence."""
        if sizes is None:
            return self.sizes
        if isinstance(sizes, (str, bytes, Mapping)) or not isinstance(sizes, Iterable):
            raise ConfigError(
                f"sizes must be several of the capture sizes {self.sizes}, as [8, 16], got {shown(sizes)}"
            )
        given = tuple(sizes)
        for size in given:
            if type(size) is not int or size not in self.sizes:
                raise ConfigError(f"sizes must be among the capture sizes {self.sizes}, got {shown(size)}")
        return given

    def min_batch_of(self, size: int) -> int:
        """The smallest batch that a graph of ``size`` serves, or would serve if it were among the sizes."""
        if size in self.sizes:
            return self.served_by(size)[0]
        return 1 + max((smaller for smaller in self.sizes if smaller < size), default=0)

    @classmethod
    def of_one(
        cls, size: int, mode: CUDAGraphMode, descriptor: BatchDescriptor | None = None, *, pads: bool = False
    ) -> "SizeTable":
        """The table of a single graph of ``size`` rows; if it ``pads``, it serves every batch of at most as many."""
        table = cls((size,), mode, pad_batches=pads)
        table.fixed = Decision(mode, descriptor or BatchDescriptor(size), size, Reason.EXACT, size)
        return table

    @property
    def largest(self) -> int:
        """The largest size, or 0 if there is none."""
        return self.sizes[-1] if self.sizes else 0

    def decide(self, rows: int) -> Decision:
        """The decision for ``rows`` rows."""
        return self._decisions[rows]

    @property
    def points(self) -> tuple[Any, ...]:
        """The sizes, as the user gave them."""
        return self.sizes

    def number_of(self, size: Any) -> int:
        """The number of a size that the user named."""
        number: int = size
        return number

    def exceeds(self, other: "SizeTable") -> bool:
        """Whether a batch may be longer than any that ``other`` serves."""
        return self.largest > other.largest

    def served_by(self, size: int) -> range:
        """The numbers of rows that the graph of ``size`` serves."""
        return range(self._min_batches[size], size + 1)

    def _decide(self, rows: int) -> Decision:
        if not self.sizes:
            return Decision.eager(Reason.DISABLED, rows)
        if rows == 0:
            return Decision.eager(Reason.NO_ROWS)
        if not 0 < rows <= self.largest:
            reason = Reason.ABOVE_LARGEST_SIZE
            return Decision.eager(reason, rows, f"{reason.text} (largest: {self.largest})")
        size = self.sizes[bisect_left(self.sizes, rows)]
        if rows != size and not self.pads:
            return Decision.eager(Reason.NOT_CAPTURED, rows)
        if rows < self._min_batches[size]:
            return Decision.eager(Reason.POLICY, rows, f"eager is expected to be faster than {size} padded rows")
        reason = Reason.EXACT if rows == size else Reason.PADDED
        return Decision(self.mode, BatchDescriptor(size), size, reason, rows)
