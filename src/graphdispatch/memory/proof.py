"""``RowProof``: what replays with other padding have shown of one graph's rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from ..reasons import Reason
from ..sizes import ROWS, Axis, lengths_of, pack

MOST_COMPARED = 64
"""The largest size of which each number of rows, or each length, is compared with eager by itself."""

_BATCHES, _BATCHES_IF_LIMITED = 2, 3
"""How many batches a proof is made with, where it takes numbers from them, and where it may try no others."""


@dataclass(frozen=True)
class RowProof:
    """Whether a graph's real rows are the same whatever its padding rows hold; ``capture/prover.py`` finds out."""

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

    batches: int = 0
    """How many batches it was made with, if it takes numbers from them, as of integers: what one of them hides, another
    may show. Else 0."""

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
    def needs_batches(self) -> bool:
        """Whether it takes numbers from batches, and from too few of them yet."""
        return 0 < self.batches < (_BATCHES_IF_LIMITED if self.limited else _BATCHES)

    @property
    def is_whole(self) -> bool:
        """Whether rows are independent whatever an argument holds, as far as the batches could show."""
        return self.independent and not (self.untested or self.assumed)

    @property
    def is_complete(self) -> bool:
        """Whether no further batch needs to be tested."""
        return not self.independent or (self.is_whole and not self.needs_batches)

    def after(self, earlier: "RowProof | None") -> "RowProof":
        """This proof as one of a further batch: what an earlier one has shown stays known."""
        if earlier is None or not self.independent:
            return self
        batches = max(earlier.batches, self.batches) + 1 if earlier.batches or self.batches else 0
        if earlier.is_whole:
            return replace(self, untested=(), assumed=(), batches=batches)
        return replace(self, batches=batches)

    @property
    def text(self) -> str:
        """What was found, as a sentence."""
        if not self.independent:
            return f"real rows depend on padding: with {self.perturbation} in the padding rows, {self.what}"
        if not self.deterministic:
            return "bits are not the same in all replays, so that rows were compared within the tolerance"
        if self.untested:
            return f"padding was not tested for {', '.join(self.untested)}"
        return "padding was tested with too few batches" if self.needs_batches else "rows are independent"


class Compared:
    """Which batches were compared with eager: another one may take another branch of the Python code.

    Kept are their extents along each axis. They count for all graphs as long along the axis, as long as the same
    code runs for each. Where there are several axes, a batch is covered if each of its extents was
    compared, and if it lies between two batches of as many rows that were compared: none of its other extents is
    shorter than in the one, or longer than in the other. So code is found that branches on several extents at once, by
    their product or by which of them is larger.

    Above ``MOST_COMPARED`` along an axis it is enough that a shorter extent was compared: code that takes another
    branch below some number is found so.
    """

    def __init__(self, axes: Sequence[Axis] = (ROWS,), others: Sequence["Compared"] = ()) -> None:
        """``others`` are those of graphs of other sizes, in the same state of the callable."""
        self.axes = tuple(axes)
        self._extents: dict[tuple[Axis, int], set[int]] = others[0]._extents if others else {}
        """By axis and the graph's extent along it, the extents that were compared."""
        self._others: dict[int, list[tuple[int, ...]]] = {}
        """By number of rows, the other extents of the batches that were compared with this graph."""
        self._is_trusted = False

    def part(self) -> None:
        """Share what is noted from here on with no other graph, since other code ran."""
        self._extents = {key: set(known) for key, known in self._extents.items()}

    def trust(self) -> None:
        """Take all batches for compared."""
        self._is_trusted = True

    def note(self, rows: int, size: int) -> None:
        """Note that a batch was compared with the graph of ``size``."""
        for axis in self.axes:
            self._known(axis, size).add(axis.of(rows))
        first, *others = lengths_of(self.axes, rows)
        same = self._others.setdefault(first, [])
        if tuple(others) not in same:
            same.append(tuple(others))

    def covers(self, rows: int, size: int) -> bool:
        """Whether a batch may be padded to ``size``, as far as comparisons go."""
        return self._is_trusted or (
            all(self._has(axis, axis.of(rows), size) for axis in self.axes) and self._is_between(rows, size)
        )

    def missing(self, rows: int, size: int) -> Iterable[int]:
        """What may have to be compared: for each number of rows from that of ``rows`` on the shortest and the longest
        batches; then a full one with each other extent in turn."""
        least, full = lengths_of(self.axes, rows), lengths_of(self.axes, size)
        ends = ((low, high) for low, high in zip(least[1:], full[1:], strict=True))
        for lengths in product(range(least[0], full[0] + 1), *ends):
            yield pack(self.axes, lengths)
        for place in range(1, len(full)):
            for extent in range(least[place], full[place]):
                yield pack(self.axes, [*full[:place], extent, *full[place + 1 :]])

    def _known(self, axis: Axis, size: int) -> set[int]:
        """The extents along an axis that were compared with graphs as long as this one."""
        return self._extents.setdefault((axis, axis.of(size)), set())

    def _has(self, axis: Axis, extent: int, size: int) -> bool:
        known, full = self._known(axis, size), axis.of(size)
        return extent == full or extent in known or (full > MOST_COMPARED and extent > min(known, default=extent))

    def _is_between(self, rows: int, size: int) -> bool:
        """Whether a batch lies between two that were compared. The graph's own extents need no comparison."""
        (first, *now), (most, *full) = lengths_of(self.axes, rows), lengths_of(self.axes, size)
        if most > MOST_COMPARED and first not in self._others and first > min(self._others, default=first):
            first = min(self._others)
        same = [*self._others.get(first, ()), *([tuple(full)] if first == most else [])]
        has_less = any(all(a <= b for a, b in zip(other, now, strict=True)) for other in same)
        return has_less and any(all(a >= b for a, b in zip(other, now, strict=True)) for other in same)
