"""What to do with a batch, and why: mode, descriptor, padded size and reason."""

from typing import NamedTuple

from ..descriptors import BatchDescriptor
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..sizes import cells_of

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
