"""``RowProof``: what replays with other padding have shown of one graph's rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..axes import Axis
from ..reasons import Reason

__all__ = ["MOST_COMPARED", "Compared", "RowProof"]

MOST_COMPARED = 64
"""The largest size of which each number of rows is compared with eager by itself."""


@dataclass(frozen=True)
class RowProof:
    """Whether a graph's real rows are the same whatever its padding rows hold; ``capture/proof.py`` finds out."""

    independent: bool
    deterministic: bool = True
    """Whether equal replays give equal bits, and no kernel multiplies groups of rows whose sizes are data. If not, rows
    were compared within the tolerance."""
    perturbation: str = ""
    """What the padding rows held when a real row changed; empty if none did."""
    what: str = ""
    """What changed, and by how much."""
    reason: Reason = Reason.VERIFICATION_FAILED
    """Why padded batches run eagerly, if a real row changed."""
    untested: tuple[str, ...] = ()
    """The arguments (and ``"state"``) of which the batch could not tell; padded batches are compared until one can."""

    limited: bool = False
    """Whether the callable checks its data, or makes indices of it, so that no numbers of another kind may be tried."""

    kept: tuple[int, ...] = ()
    """The arguments (by index) whose padding was left as their rule says, as masks of zeros and ones."""

    bound: tuple[Axis, ...] = ()
    """Where there are several dynamic dimensions, those along which real ones changed."""

    assumed: tuple[tuple[int, torch.Tensor], ...] = ()
    """Values of a call, by place, with the row that all of theirs were in many batches. No padding could test them, so
    that padded batches are served while they stay so, and compared as soon as they do not."""

    def holds_for(self, values: Sequence[Any]) -> bool:
        """Whether the rows of a call are as the proof assumes. Reads values back to the host, if it assumes any."""
        return all(torch.equal(values[place], row.expand_as(values[place])) for place, row in self.assumed)

    def allows(self, rows: int, size: int) -> bool:
        """Whether a batch of ``rows`` rows has padding in a graph of ``size`` only where that changes no real row."""
        if self.independent or rows == size:
            return True
        return bool(self.bound) and all(axis.of(rows) == axis.of(size) for axis in self.bound)

    @property
    def is_complete(self) -> bool:
        """Whether no further batch needs to be tested."""
        return not (self.independent and (self.untested or self.assumed))

    def after(self, earlier: "RowProof | None") -> "RowProof":
        """This proof as one of a further batch: what an earlier one has shown stays known."""
        if earlier is None or not (self.independent and earlier.is_complete):
            return self
        return replace(self, untested=(), assumed=())

    @property
    def text(self) -> str:
        """What was found, as a sentence."""
        if not self.independent:
            return f"real rows depend on padding: with {self.perturbation} in the padding rows, {self.what}"
        if not self.deterministic:
            return "bits are not the same in all replays, so that rows were compared within the tolerance"
        return f"padding was not tested for {', '.join(self.untested)}" if self.untested else "rows are independent"


class Compared(set[int]):
    """The numbers of rows that were compared with eager: another one may take another branch of the Python code."""

    def note(self, rows: int, size: int) -> None:
        """Note that a batch of ``rows`` rows was compared with a graph of ``size``."""
        self.add(rows)

    def part(self) -> None:
        """Share what is noted from here on with no other graph, since other code ran."""

    def covers(self, rows: int, size: int) -> bool:
        """Whether a batch of ``rows`` rows may be padded to ``size``, as far as comparisons go. Above ``MOST_COMPARED``
        rows it is enough that fewer were compared: code that takes another branch below some number is found so."""
        return rows in self or (size > MOST_COMPARED and rows > min(self, default=rows))

    def trust(self, size: int) -> None:
        """Take all numbers for compared."""
        self.update(range(min(size, MOST_COMPARED + 1)))

    def missing(self, rows: int, size: int) -> Iterable[int]:
        """Which numbers between ``rows`` and ``size`` may have to be compared."""
        return range(rows + 1, size)
