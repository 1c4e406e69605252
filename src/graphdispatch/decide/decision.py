"""Decisions: mode, descriptor, padded size and reason, precomputed in an immutable table of sizes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..config import ResolvedConfig
from ..descriptors import BatchDescriptor
from ..errors import ConfigError
from ..modes import CUDAGraphMode
from ..reasons import Reason

__all__ = ["Decision", "SizeTable"]


class Decision(NamedTuple):
    """What to do with one batch: the runtime mode, what the graph serves, the padded size, and why."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor | None
    size: int
    reason: Reason
    rows: int = 0
    detail: str = ""

    @classmethod
    def eager(cls, reason: Reason, rows: int = 0, detail: str = "") -> "Decision":
        """The decision to run eagerly."""
        return cls(CUDAGraphMode.NONE, None, rows, reason, rows, detail)

    def as_mode(self, mode: CUDAGraphMode) -> "Decision":
        """The same decision, served by a graph of ``mode``."""
        return self if mode is self.mode else self._replace(mode=mode)

    def explain(self) -> str:
        """One line for a person."""
        if self.mode is CUDAGraphMode.NONE:
            count = f", {self.rows} rows" if self.rows else ""
            return f"eager{count}: {self.detail or self.reason.text}"
        padding = 100 * (1 - self.rows / self.size) if self.size else 0.0
        change = f"{self.rows} -> {self.size} rows, {padding:.1f} % padding" if padding else f"{self.rows} rows"
        note = "" if self.reason.is_graph else f" ({self.detail or self.reason.text})"
        return f"{self.mode.name} graph, {change}{note}"


class SizeTable:
    """Decisions for every number of rows, for one dynamic dimension: one lookup each. Immutable and thread-safe.

    ``sizes`` are the capture sizes, in increasing order, and ``min_batches`` the smallest batch that each serves (none:
    all above the next smaller size); with ``pad_batches=False`` only exact sizes are served.
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
        self._min_batches = dict(zip(self.sizes, min_batches or [1 + size for size in (0, *self.sizes)], strict=False))
        spans = [(size, range(below + 1, size + 1)) for below, size in pairwise((0, *self.sizes))]
        decisions = [self._make(rows, size, pad_batches) for size, span in spans for rows in span]
        self._decisions = (Decision.eager(Reason.NO_ROWS), *decisions) if self.sizes else ()

    @classmethod
    def of(cls, resolved: ResolvedConfig, mode: CUDAGraphMode) -> "SizeTable":
        """The table of a configuration for one runtime mode; without sizes in mode NONE."""
        if not mode.has_graphs():
            return cls((), mode)
        return cls(resolved.sizes, mode, pad_batches=resolved.config.pad_batches, min_batches=resolved.min_batches)

    def checked(self, sizes: Sequence[int] | None) -> tuple[int, ...]:
        """``sizes``, or all. Raises ``ConfigError`` for one that is not captured here."""
        for size in sizes or ():
            if size not in self.sizes:
                raise ConfigError(f"sizes must be among the capture sizes {self.sizes}, got {size!r}")
        return self.sizes if sizes is None else tuple(sizes)

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
        table = cls((size,), mode)
        if not pads:
            table._decisions = table._decisions[:1]
        table.fixed = Decision(mode, descriptor or BatchDescriptor(size), size, Reason.EXACT, size)
        return table

    @property
    def largest(self) -> int:
        """The largest size, or 0 if there is none."""
        return self.sizes[-1] if self.sizes else 0

    def decide(self, rows: int) -> Decision:
        """The decision for ``rows`` rows."""
        if 0 <= rows < len(self._decisions):
            return self._decisions[rows]
        if not self.sizes:
            return Decision.eager(Reason.DISABLED, rows)
        reason = Reason.ABOVE_LARGEST_SIZE
        return Decision.eager(reason, rows, f"{reason.text} (largest: {self.largest})")

    def served_by(self, size: int) -> range:
        """The numbers of rows that the graph of ``size`` serves."""
        return range(self._min_batches[size], size + 1)

    def _make(self, rows: int, size: int, pad_batches: bool) -> Decision:
        if rows != size and not pad_batches:
            return Decision.eager(Reason.NOT_CAPTURED, rows)
        if rows < self._min_batches[size]:
            return Decision.eager(Reason.POLICY, rows, f"eager is expected to be faster than {size} padded rows")
        reason = Reason.EXACT if rows == size else Reason.PADDED
        return Decision(self.mode, BatchDescriptor(size), size, reason, rows)
