"""Static inputs of batches with several dynamic dimensions, and which of their extents were compared with eager."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch

from ..axes import Axis
from ..call.dims import rules_of
from ..call.inputs import InputSpec
from ..extents import Extents
from .inputs import StaticInputs
from .proof import MOST_COMPARED, Compared

__all__ = ["GridCompared", "GridInputs"]

_MOST_SHAPES = 4096  # combinations of extents and size whose copies are kept prepared


class GridInputs(StaticInputs):
    """The static buffers of one signature. A size lies at the beginning of each buffer, without gaps; so sizes with
    another length lay other elements at an address, and padding is put anew on each call."""

    def __init__(self, specs: Sequence[InputSpec], capacity: int) -> None:
        super().__init__(specs, capacity)
        assert isinstance(capacity, Extents)
        self.axes = capacity.axes
        self._one = Extents.pack(self.axes, [1] * len(self.axes))
        self._one_layout = False

    def free(self) -> None:
        """Let go of the buffers, and of all that leads to them."""
        super().free()
        self._copies: dict[tuple[int, int], tuple[list[torch.Tensor], list[Callable[[], Any]]]] = {}

    def cells(self, rows: int) -> int:
        """The product of the extents."""
        return Extents.of(self.axes, rows).cells

    def new_compared(self, others: Sequence[Compared]) -> Compared:
        """What was compared of all sizes."""
        known = next((other for other in others if isinstance(other, GridCompared)), None)
        return GridCompared(self.axes, known.extents if known is not None else {})

    def load(self, values: Sequence[Any], rows: int, size: int) -> None:
        """Copy the batch into the first part of the views of ``size``, and pad the rest."""
        targets, fills = self._copies.get((rows, size)) or self._prepare(rows, size)
        if len(targets) == 1:
            targets[0].copy_(values[self.positions[0]])
        else:
            torch._foreach_copy_(targets, [values[position] for position in self.positions])
        for fill in fills:
            fill()

    def put(self, padding: Sequence[torch.Tensor | None], rows: int, size: int, axes: Sequence[Axis] = ()) -> None:
        """Put other padding: for each argument the whole of it, of which the padding along ``axes`` (empty: all) is
        taken, or None to leave that of its pad rules."""
        for index, given in enumerate(padding):
            for dim, axis in self.specs[index].axes if given is not None else ():
                extent = axis.of(rows)
                if given is not None and (not axes or axis in axes):
                    rest = axis.of(size) - extent
                    self.views(size)[index].narrow(dim, extent, rest).copy_(given.narrow(dim, extent, rest))
        self.mark_dirty()

    def _prepare(self, rows: int, size: int) -> tuple[list[torch.Tensor], list[Callable[[], Any]]]:
        """Where a batch of such extents goes, and what fills the rest."""
        if len(self._copies) >= _MOST_SHAPES:
            self._copies.clear()
        with torch.inference_mode(False), torch.no_grad():
            targets = [self.real(index, rows, size) for index in range(len(self.specs))]
            fills = [fill for index in range(len(self.specs)) for fill in self._fills_of(index, rows, size)]
        made = self._copies[rows, size] = targets, fills
        return made

    def _fills_of(self, index: int, rows: int, size: int) -> list[Callable[[], Any]]:
        """What fills the padding of one argument: that along the last dimension first, beside real elements alone; so
        that padding along the first one is put behind whole rows."""
        view = self.views(size)[index]
        fills = []
        spans = rules_of(self.specs[index])
        for place in reversed(range(len(spans))):
            dim, axis, pad = spans[place]
            part = view
            for other, before, _ in spans[:place]:
                part = part.narrow(other, 0, before.of(rows))
            extent = axis.of(rows)
            if extent < axis.of(size) and pad.kind != "leave":
                padding = part.narrow(dim, extent, axis.of(size) - extent)
                fills.append(pad.filler(padding, part.narrow(dim, 0, extent), dim))
        return fills


class GridCompared(Compared):
    """Which extents were compared with eager, in ``extents`` by axis and size. They count for all graphs as long
    along the axis, as long as the same code runs for each.

    A batch is covered if each of its extents was compared, and if it lies between two batches of as many rows that were
    compared: none of its other extents is shorter than in the one, or longer than in the other. So code is found that
    branches on several extents at once, by their product or by which of them is larger.
    """

    def __init__(self, axes: Sequence[Axis], extents: dict[tuple[Axis, int], set[int]]) -> None:
        super().__init__()
        self.axes = tuple(axes)
        self.extents = extents
        self._others: dict[int, list[tuple[int, ...]]] = {}
        """By number of rows, the other extents of the batches that were compared with this graph."""
        self._is_trusted = False

    def trust(self, size: int) -> None:
        """Take all extents for compared."""
        self._is_trusted = True

    def note(self, rows: int, size: int) -> None:
        """Note that a batch was compared with the graph of ``size``."""
        for axis in self.axes:
            self.known(axis, size).add(axis.of(rows))
        first, *others = Extents.of(self.axes, rows).lengths
        same = self._others.setdefault(first, [])
        if tuple(others) not in same:
            same.append(tuple(others))

    def _is_between(self, rows: int, size: int) -> bool:
        """Whether a batch lies between two that were compared. The graph's own extents need no comparison."""
        (first, *now), (most, *full) = (Extents.of(self.axes, number).lengths for number in (rows, size))
        if most > MOST_COMPARED and first not in self._others and first > min(self._others, default=first):
            first = min(self._others)
        same = [*self._others.get(first, ()), *([tuple(full)] if first == most else [])]
        has_less = any(all(a <= b for a, b in zip(other, now, strict=True)) for other in same)
        return has_less and any(all(a >= b for a, b in zip(other, now, strict=True)) for other in same)

    def part(self) -> None:
        """Share what is noted from here on with no other graph."""
        self.extents = {key: set(known) for key, known in self.extents.items()}

    def known(self, axis: Axis, size: int) -> set[int]:
        """The extents along an axis that were compared with graphs as long as this one."""
        return self.extents.setdefault((axis, axis.of(size)), set())

    def covers(self, rows: int, size: int) -> bool:
        """Whether each extent was compared, or is the one of the graph, and so were batches around this one. Of an axis
        that is longer than ``MOST_COMPARED`` it is enough that a shorter extent was compared."""
        return self._is_trusted or (
            all(self._has(self.known(axis, size), axis.of(rows), axis.of(size)) for axis in self.axes)
            and self._is_between(rows, size)
        )

    def _has(self, known: set[int], extent: int, size: int) -> bool:
        return extent == size or extent in known or (size > MOST_COMPARED and extent > min(known, default=extent))

    def missing(self, rows: int, size: int) -> Iterable[int]:
        """For each number of rows from that of ``rows`` on the shortest and the longest batches; then a full one with
        each other extent in turn."""
        least, full = (Extents.of(self.axes, number).lengths for number in (rows, size))
        ends = ((low, high) for low, high in zip(least[1:], full[1:], strict=True))
        for lengths in product(range(least[0], full[0] + 1), *ends):
            yield Extents.pack(self.axes, lengths)
        for place in range(1, len(full)):
            for extent in range(least[place], full[place]):
                yield Extents.pack(self.axes, [*full[:place], extent, *full[place + 1 :]])
