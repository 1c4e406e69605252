"""Static inputs: the buffers at fixed addresses that graphs read, how a batch gets into them, and batches made of one.

One buffer for each argument, as large as the largest size needs; every size is a contiguous view of its beginning.
All graphs of one signature share them, which is why a pool's lock is held from the copy to the replay.

Note [one layout]
    Where rows are the only dynamic dimension, and the slowest of every argument, a row lies at one address for all
    sizes: padding that was put there stays, and is put anew only where a longer batch has been. In any other layout
    another size lays other elements at an address, and padding is put anew unless the latest batch was as long.
"""

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any
from weakref import WeakSet

import torch

from ..copying import renew_in_child
from ..sizes import ROWS, Axis, lengths_of
from .signature import InputSpec

_MOST_PREPARED = 4096  # batches and sizes whose copies and padding are kept prepared


class StaticInputs:
    """The static buffers of one signature, with room for ``capacity`` rows. Not thread-safe: the caller holds the
    lock of the pool whose graphs read them."""

    __slots__ = ("__dict__", "__weakref__", "_clean_from")

    def __init__(self, specs: Sequence[InputSpec], capacity: int, axes: Sequence[Axis] = (ROWS,)) -> None:
        self.specs = tuple(specs)
        self.capacity = capacity
        self.axes = tuple(axes)
        self.positions = tuple(spec.position for spec in self.specs)
        """The place of each argument among a call's values."""
        self.readers: WeakSet[Any] = WeakSet()
        """The graphs that read the buffers, and the group for which one is being captured."""
        self.has_rows = any(spec.spans for spec in self.specs)
        """Whether any argument follows the batch, so that missing rows are filled up."""
        self._follows_data = any(pad.follows_data for spec in self.specs for pad in spec.pads)
        starts = [[dim for dim, _ in spec.spans] == [spec.order[0]] for spec in self.specs if spec.spans]
        self._one_layout = len(self.axes) == 1 and all(starts)
        self.free()
        renew_in_child(self)

    def after_fork(self) -> None:
        """A thread may have been filling them: see Note [after a fork] in ``copying.py``."""
        self.mark_dirty()

    def leave(self, reader: Any) -> None:
        """Note that a graph was released, or a capture has ended. Without readers the buffers go; the next capture gets
        new ones."""
        self.readers.discard(reader)
        if not self.readers:
            self.free()

    def free(self) -> None:
        """Let go of the buffers."""
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._targets: dict[tuple[int, int], list[tuple[list[torch.Tensor], tuple[int, ...]]]] = {}
        self._fills: dict[tuple[int, int, int], list[Callable[[], Any]]] = {}
        self._clean_from = self.capacity
        """Rows from here on hold padding already, in one layout."""
        self._held: tuple[int, int] | None = None
        """The batch and the size that the buffers hold, padding included, in any other layout."""
        self.buffers: list[torch.Tensor] = []
        """The memory of all arguments, as far as it was allocated."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(flat.nbytes for flat in self.buffers)

    def cells(self, rows: int) -> int:
        """What statistics count for a batch: its rows, or the product of its extents."""
        return prod(lengths_of(self.axes, rows))

    def missing_entries(self, rows: int) -> str:
        """Which tensors of a batch of ``rows`` rows seem to follow it though ``dynamic`` does not name them, in words;
        empty if there are none."""
        found: dict[str, dict[int, str]] = {}
        for axis, extent in zip(self.axes, lengths_of(self.axes, rows), strict=True):
            for spec in self.specs:
                if not spec.spans and extent > 1 and extent in spec.shape:
                    found.setdefault(spec.name, {})[spec.shape.index(extent)] = axis.name
        if not found or not self.has_rows:
            return ""
        named = {name: places if self.axes != (ROWS,) else min(places) for name, places in found.items()}
        entries = ", ".join(f"{name!r}: {places}" for name, places in named.items())
        return f"; dynamic= may lack {entries}, since {', '.join(found)} had as many rows as the batch, {rows}"

    def views(self, size: int) -> tuple[torch.Tensor, ...]:
        """The arguments of a graph of ``size`` rows, in the order of ``specs``: always the same tensors, which are no
        views to code that asks.

        The buffers are allocated at their first use.
        """
        if size not in self._views:
            with torch.inference_mode(False), torch.no_grad():
                self.buffers = self.buffers or [
                    s.like(torch.zeros(prod(s.sized(self.capacity)), dtype=s.dtype, device=s.device))
                    for s in self.specs
                ]
                self._views[size] = tuple(
                    _ordered_view(flat, spec.sized(size), spec.order).detach()
                    for flat, spec in zip(self.buffers, self.specs, strict=True)
                )
        return self._views[size]

    def load(self, values: Sequence[Any], rows: int, size: int) -> None:
        """Copy the batch into the first ``rows`` rows of the ``size``-row views, and pad the rest.

        Shapes, dtypes and devices have been compared before: ``copy_`` would broadcast and cast in silence.
        """
        if not self.specs:
            return
        targets = self._targets.get((rows, size)) or self._make_targets(rows, size)
        if self._one_layout:
            is_clean = rows >= self._clean_from
            # Noted before the copy: of one that stops half-way, nothing shall be taken for padding.
            self._clean_from = max(self._clean_from, rows)
        else:
            is_clean, self._held = self._held == (rows, size), None
        for parts, positions in targets:
            if len(parts) == 1:
                parts[0].copy_(values[positions[0]])
            else:
                torch._foreach_copy_(parts, [values[position] for position in positions])
        if rows != size and (self._follows_data or not is_clean):
            self.pad(rows, size)
        self._held = rows, size

    def pad(self, rows: int, size: int) -> None:
        """Fill what a batch leaves of the buffers, but for what holds padding already that does not follow the data."""
        end = self._clean_from if self._one_layout else size
        key = rows, end, size
        for fill in self._fills.get(key) or self._make_fills(*key):
            fill()
        if self._one_layout:
            self._clean_from = rows

    def layout_for(self, rows: int, size: int) -> tuple[list[tuple[list[torch.Tensor], tuple[int, ...]]], bool, bool]:
        """What the core needs to load a batch: where its rows go, with the places of the arguments, those of one dtype
        together; whether rows lie at one address for all sizes; and whether any padding follows the data."""
        targets = self._targets.get((rows, size)) or self._make_targets(rows, size)
        return targets, self._one_layout, self._follows_data

    def paddings_on(self, device: torch.device) -> dict[int, bytes | None] | None:
        """What a kernel of the device is to put behind the rows of each argument, in one layout, by its place: sixteen
        bytes again and again, or None for copies of the last row. An argument that is not padded is left out; there is
        none for any if a kernel cannot pad them all, or some are elsewhere."""
        paddings: dict[int, bytes | None] = {}
        for spec in self.specs:
            for pad in (pad for pad in spec.pads if not pad.is_left):
                if pad.runs_code or not (pad.repeats_rows or pad.fill is not None):
                    return None
                paddings[spec.position] = None if pad.fill is None else _sixteen_bytes(pad.fill, spec.dtype)
        return paddings if all(spec.device == device for spec in self.specs) else None

    def real(self, index: int, rows: int, size: int) -> torch.Tensor:
        """The real rows of argument ``index`` (in ``specs``) as they lie in the buffer."""
        return self.specs[index].cut(self.views(size)[index], rows)

    def put(self, padding: Sequence[torch.Tensor | None], rows: int, size: int, axes: Sequence[Axis] = ()) -> None:
        """Put other padding behind the batch that was loaded: for each argument the whole of it, of which the padding
        along ``axes`` (empty: all) is taken, or None to leave that of its pad rules."""
        for index, given in enumerate(padding):
            for dim, axis in self.specs[index].spans if given is not None else ():
                extent = axis.of(rows)
                if given is not None and (not axes or axis in axes):
                    rest = axis.of(size) - extent
                    self.views(size)[index].narrow(dim, extent, rest).copy_(given.narrow(dim, extent, rest))
        self.mark_dirty()

    def mark_dirty(self) -> None:
        """Forget that any row holds padding: a graph wrote to its own inputs."""
        self._clean_from, self._held = self.capacity, None

    def _make_targets(self, rows: int, size: int) -> list[tuple[list[torch.Tensor], tuple[int, ...]]]:
        """Where the rows of a batch go, and the places of the arguments among a call's values. Each dtype has a group,
        since torch copies tensors of different ones one by one (``_foreach_copy_``, pytorch#173531)."""
        if len(self._targets) >= _MOST_PREPARED:
            self._targets.clear()
        with torch.inference_mode(False), torch.no_grad():
            by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[int]]] = {}
            for index, spec in enumerate(self.specs):
                parts, positions = by_dtype.setdefault(spec.dtype, ([], []))
                parts.append(self.real(index, rows, size))
                positions.append(spec.position)
        groups = self._targets[rows, size] = [(parts, tuple(positions)) for parts, positions in by_dtype.values()]
        return groups

    def _make_fills(self, rows: int, end: int, size: int) -> list[Callable[[], Any]]:
        """What fills the padding of a batch: up to ``end`` in one layout, but all of what follows the data."""
        if len(self._fills) >= _MOST_PREPARED:
            self._fills.clear()
        with torch.inference_mode(False), torch.no_grad():
            places = range(len(self.specs))
            fills = [fill for index in places for fill in self._fills_of(index, rows, end, size)]
        self._fills[rows, end, size] = fills
        return fills

    def _fills_of(self, index: int, rows: int, end: int, size: int) -> list[Callable[[], Any]]:
        """What fills the padding of one argument: that along the last dimension first, beside real elements alone; so
        that padding along the first one is put behind whole rows."""
        spec, fills = self.specs[index], []
        spans = [(dim, axis, pad) for (dim, axis), pad in zip(spec.spans, spec.pads, strict=True)]
        for place in reversed(range(len(spans))):
            dim, axis, pad = spans[place]
            part = self.views(self.capacity if self._one_layout else size)[index]
            for other, before, _ in spans[:place]:
                part = part.narrow(other, 0, before.of(rows))
            extent, stop = axis.of(rows), axis.of(size if pad.follows_data else end)
            if extent < stop:
                fills.append(pad.filler(part.narrow(dim, extent, stop - extent), part.narrow(dim, 0, extent), dim))
        return [fill for fill in fills if fill is not None]


def _sixteen_bytes(fill: Any, dtype: torch.dtype) -> bytes:
    """A value again and again, as a tensor has it in memory."""
    tensor = torch.zeros(16 // dtype.itemsize, dtype=dtype, device="cpu").fill_(fill)
    return bytes(tensor.view(torch.uint8).tolist())


def _ordered_view(flat: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    back = sorted(range(len(order)), key=order.__getitem__)
    return flat[: prod(shape)].view([shape[dim] for dim in order]).permute(back)


def resized(inputs: StaticInputs, values: Sequence[Any], rows: int, *, shift: int = 0) -> list[Any]:
    """The example's rows repeated, from row ``shift`` on, until there are ``rows`` of them. They leave gaps in memory
    where the example does.

    Along lengths masks begin where they did: else they would hide all of a row that has one real element.
    """
    sized = list(values)
    for spec in inputs.specs:
        if spec.spans:
            value = values[spec.position]
            keeps = inputs.axes[1:] if spec.is_pad_given or holds_flags(value) else ()
            sized[spec.position] = spec.repeated(value, rows, shift, keeps, gaps=not spec.is_dense)
    return sized


def pointing_within(inputs: StaticInputs, values: Sequence[Any], left: int, given: int) -> list[Any]:
    """A batch of ``left`` rows that was cut from ``given``: integers that may point at rows, since none is larger,
    point at those that are left. What differs does so still, and what is no zero stays so, where that can be."""
    found = list(values)
    for spec in inputs.specs:
        value = values[spec.position]
        if not spec.is_integer or not value.numel() or value.amin() < 0 or not left <= value.amax() < given:
            continue
        numbers, order = value.unique(return_inverse=True)
        places = (order + max(min(int(numbers[0]), left - len(numbers)), 0)) % left
        found[spec.position] = spec.like(value.clone()).copy_(places)
    return found


def varied(inputs: StaticInputs, leaves: Sequence[Any], rows: int, number: int = 0) -> list[Any]:
    """Another batch, made of an example: its rows in turn, from the second one on, with other floating numbers.
    Each ``number`` makes another one.

    Each number is up to a quarter larger or smaller, so that zeros and what is not finite stay; but a tensor of
    zeros alone gets other numbers. A mask, zeros and ones for the elements of a sequence of integers or of several
    numbers, stays one.
    """
    along = [spec for spec in inputs.specs if any(axis is not inputs.axes[0] for _, axis in spec.spans)]
    plain = [spec for spec in along if len(spec.spans) == len(spec.shape) and not spec.is_integer]
    may_be_masks = plain if len(plain) < len(along) else []
    generator = torch.Generator().manual_seed(rows + number)
    batch = resized(inputs, leaves, rows, shift=1 + number)
    for spec in inputs.specs:
        if spec.dtype.is_floating_point and spec.dtype.itemsize > 1:
            factor = 0.75 + torch.rand(spec.sized(rows), generator=generator, device="cpu") / 2
            value = batch[spec.position] if spec.spans else spec.like(batch[spec.position].clone())
            factor = factor.to(spec.device, spec.dtype)
            if not bool(value.any()):
                value.copy_(factor - 1)
            elif spec not in may_be_masks or not holds_flags(value):
                value.mul_(factor)
            batch[spec.position] = value
    return batch


def largest_within(specs: Sequence[InputSpec], rows: int, cut: Collection[Axis]) -> dict[str, int]:
    """The largest number that arguments may hold, by name, so that they name no element beyond a batch of ``rows`` that
    was cut along these axes: integers, such as lengths, that are not cut along all of them themselves."""
    most = min((axis.of(rows) for axis in cut), default=0) - 1
    whole = ((spec, {axis for _, axis in spec.spans}) for spec in specs if spec.spans and spec.is_integer)
    return {spec.name: most for spec, axes in whole if not axes.issuperset(cut)}


def holds_flags(value: torch.Tensor) -> bool:
    """Whether a tensor holds nothing but zeros and ones, as masks do. Reads the result back to the host."""
    return bool(value.numel()) and bool(((value == 0) | (value == 1)).all())
