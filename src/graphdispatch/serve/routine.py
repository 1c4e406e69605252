"""A routine: one runtime mode of a callable, with its table of sizes and the spellings of calls that it has seen."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..config import ResolvedConfig
from ..decide.decision import Decision, SizeTable
from ..descriptors import BatchDescriptor
from ..errors import ConfigError
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode
from ..reasons import Reason
from .group import Form, GraphGroup

__all__ = ["Found", "Plan", "Routine"]


class Found(NamedTuple):
    """What a call turned out to be: its group (None if it can have none), leaves, rows, and the table's decision."""

    group: GraphGroup | None
    leaves: list[Any]
    rows: int
    decision: Decision


class Plan(NamedTuple):
    """What to do with a call: serve or check this entry, or, without one, what the decision says."""

    entry: CUDAGraphEntry | None
    decision: Decision

    def explain(self) -> str:
        """One line for a person: the decision, and what the graph consists of where that is more than one launch."""
        pieces = self.entry.graph.describe() if self.entry is not None and self.decision.mode.has_graphs() else ""
        return f"{self.decision.explain()}; {pieces}" if pieces else self.decision.explain()


class Routine:
    """One runtime mode; a callable that tells uniform decode from other batches has two.

    Changed under its owner's lock.
    """

    def __init__(self, mode: CUDAGraphMode, resolved: ResolvedConfig) -> None:
        self.table = SizeTable((), (), mode)
        if mode.has_graphs():
            self.resize(resolved)
        self.forms: dict[tuple[Any, ...], Form] = {}
        self.fixed = Decision(mode, BatchDescriptor(1), 1, Reason.EXACT, 1)
        """The decision for calls without a batch dimension."""

    def resize(self, resolved: ResolvedConfig) -> None:
        """Decide by other sizes, from one call to the next."""
        sizes, table, config, min_batches = resolved
        self.table = SizeTable(sizes, table, self.table.mode, pad_batches=config.pad_batches, min_batches=min_batches)

    def decisions_of(self, size: int) -> list[Decision]:
        """The decisions for every number of rows that the graph of ``size`` serves; none if it is no size here."""
        return [self.table.decide(rows) for rows in self.table.served_by(size)] if size in self.table.sizes else []

    def checked_sizes(self, sizes: Sequence[int] | None) -> tuple[int, ...]:
        """``sizes``, or all; raises ``ConfigError`` for one that is not captured here."""
        for size in sizes or ():
            if size not in self.table.sizes:
                raise ConfigError(f"sizes must be among the capture sizes {self.table.sizes}, got {size!r}")
        return self.table.sizes if sizes is None else tuple(sizes)
