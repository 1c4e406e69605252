"""Static inputs: the buffers at fixed addresses that graphs read, and how a batch gets into them.

One buffer for each argument, as large as the largest size needs; every size is a contiguous view of its beginning.
All graphs of one signature share them, which is why a pool's lock is held from the copy to the replay.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from ..axes import Axis
from ..backends.operators import bits_equal
from ..call.inputs import InputSpec
from ..forking import renew_in_child
from .proof import Compared

__all__ = ["StaticInputs", "inputs_for"]

_CONSTANT_AFTER = 16
_MOST_FILLS = 4096


class StaticInputs:
    """The static buffers of one signature, with room for ``capacity`` rows. Not thread-safe: the caller holds the
    lock of the pool whose graphs read them."""

    __slots__ = ("__dict__", "__weakref__", "_clean_from")

    _one = 1
    """The batch of one row."""

    def __init__(self, specs: Sequence[InputSpec], capacity: int) -> None:
        self.specs = tuple(specs)
        self.capacity = capacity
        self.positions = tuple(spec.position for spec in self.specs)
        """The place of each argument among a call's values."""
        self._padded = [i for i, spec in enumerate(self.specs) if spec.dim is not None and spec.pad.kind != "leave"]
        self.has_rows = any(spec.dim is not None for spec in self.specs)
        """Whether any argument follows the batch, so that missing rows are filled up."""
        self._follows_data = any(self.specs[i].pad.follows_data for i in self._padded)
        self._one_layout = all(spec.dim is None or spec.order[0] == spec.dim for spec in self.specs)
        self.free()
        renew_in_child(self)

    def after_fork(self) -> None:
        """A thread may have been filling them: see Note [after a fork] in ``forking.py``."""
        self.mark_dirty()

    def free(self) -> None:
        """Let go of the buffers, when no graph reads them any more; the next capture gets new ones."""
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._targets: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._fills: dict[tuple[int, int, int], list[Callable[[], Any]]] = {}
        # Rows from here on hold padding already, for graphs of _layout_size rows (or of any size, when the batch
        # is the slowest dimension of every argument and so lies at one address for all sizes).
        self._clean_from = self.capacity
        self._layout_size = 0
        self._flat: list[torch.Tensor] = []
        self._constants: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(flat.nbytes for flat in self._flat)

    def cells(self, rows: int) -> int:
        """What statistics count for a batch of ``rows`` rows: these."""
        return rows

    def new_compared(self, others: Sequence[Compared]) -> Compared:
        """What a new graph begins with of the numbers that were compared with eager; ``others`` are of graphs of the
        same state of the callable."""
        return Compared()

    def views(self, size: int) -> tuple[torch.Tensor, ...]:
        """The arguments of a graph of ``size`` rows, in the order of ``specs``: always the same tensors.

        The buffers are allocated at their first use.
        """
        if size not in self._views:
            with torch.inference_mode(False), torch.no_grad():
                self._flat = self._flat or [
                    torch.zeros(prod(s.sized(self.capacity)), dtype=s.dtype, device=s.device) for s in self.specs
                ]
                self._views[size] = tuple(
                    _ordered_view(flat, spec.sized(size), spec.order)
                    for flat, spec in zip(self._flat, self.specs, strict=True)
                )
        return self._views[size]

    def load(self, values: Sequence[Any], rows: int, size: int) -> None:
        """Copy the batch into the first ``rows`` rows of the ``size``-row views, and pad the rest.

        Shapes, dtypes and devices have been compared before: ``copy_`` would broadcast and cast in silence.
        """
        if not self.specs:
            return
        targets = self._targets.get((rows, size)) or self._make_targets(rows, size)
        # Noted before the copy: of one that stops half-way, nothing shall be taken for padding.
        if not self._one_layout and self._layout_size != size:
            self._layout_size = size
            self._clean_from = size
        if rows > self._clean_from:
            self._clean_from = rows
        if len(targets) == 1:
            targets[0].copy_(values[self.positions[0]])
        else:
            torch._foreach_copy_(targets, [values[position] for position in self.positions])
        if rows < size and (self._follows_data or rows < self._clean_from):
            self.pad(rows, size)

    def pad(self, rows: int, size: int) -> None:
        """Fill the rows behind ``rows`` that hold anything but padding, and those that follow the batch's own rows."""
        for fill in self._fills.get((rows, self._clean_from, size)) or self._make_fills(rows, size):
            fill()
        self._clean_from = rows

    def layout_for(self, rows: int, size: int) -> tuple[list[torch.Tensor], tuple[int, ...], bool, bool]:
        """What the core needs to load a batch: where its rows go, the places of the arguments, whether rows lie at one
        address for all sizes, and whether any padding follows the data."""
        targets = self._targets.get((rows, size)) or self._make_targets(rows, size)
        return targets, self.positions, self._one_layout, self._follows_data

    def real(self, index: int, rows: int, size: int) -> torch.Tensor:
        """The real rows of argument ``index`` (in ``specs``) as they lie in the buffer."""
        return self.specs[index].cut(self.views(size)[index], rows)

    def alike(self, size: int) -> dict[int, torch.Tensor]:
        """The arguments (by index in ``specs``) whose rows, as they lie in the buffers, are all alike, with that row.

        Reads values back to the host.
        """
        alike: dict[int, torch.Tensor] = {}
        for index, (spec, view) in enumerate(zip(self.specs, self.views(size), strict=True)):
            if spec.dim is not None:
                first = spec.cut(view, self._one)
                every = first.expand_as(view)
                if bits_equal(view, every) or torch.equal(view, every):  # by value too: 0.0 is no other row than -0.0
                    alike[index] = first.clone()
        return alike

    def constants(self, alike: Mapping[int, torch.Tensor]) -> set[int]:
        """Note a batch in which these arguments were ``alike``; those that were alike, and the same, in the latest 16
        such batches. Nothing says that they stay so."""
        before, self._constants = self._constants, {}
        for index, row in alike.items():
            value, times = before.get(index, (row, 0))
            self._constants[index] = (row, times + 1 if bits_equal(value, row) else 1)
        return {index for index, (_, times) in self._constants.items() if times >= _CONSTANT_AFTER}

    def put(self, padding: Sequence[torch.Tensor | None], rows: int, size: int, axes: Sequence[Axis] = ()) -> None:
        """Put other padding behind the ``rows`` rows that were loaded: for each argument its rows, or None to leave
        those of its pad rule. ``axes`` are for inputs with several dynamic dimensions."""
        for index, given in enumerate(padding):
            dim = self.specs[index].dim
            if given is not None and dim is not None:
                self.views(size)[index].narrow(dim, rows, size - rows).copy_(given)
        self.mark_dirty()

    def mark_dirty(self) -> None:
        """Forget that any row holds padding: a graph wrote to its own inputs."""
        self._clean_from = self.capacity
        self._layout_size = 0

    def _make_targets(self, rows: int, size: int) -> list[torch.Tensor]:
        """Where the rows of a batch go."""
        with torch.inference_mode(False), torch.no_grad():
            targets = self._targets[rows, size] = [self.real(i, rows, size) for i in range(len(self.specs))]
        return targets

    def _make_fills(self, rows: int, size: int) -> list[Callable[[], Any]]:
        """What fills the rows after a batch. What depends on its rows is filled for this call alone; a fixed value
        once, for all rows that hold anything else."""
        fills = []
        with torch.inference_mode(False), torch.no_grad():
            for index in self._padded:
                spec = self.specs[index]
                assert spec.dim is not None
                end = size if spec.pad.follows_data else self._clean_from
                if end > rows:
                    view = self.views(self.capacity if self._one_layout else size)[index]
                    padding, real = view.narrow(spec.dim, rows, end - rows), view.narrow(spec.dim, 0, rows)
                    fills.append(spec.pad.filler(padding, real, spec.dim))
        if len(self._fills) >= _MOST_FILLS:
            self._fills.clear()
        self._fills[rows, self._clean_from, size] = fills
        return fills


def inputs_for(specs: Sequence[InputSpec], capacity: int) -> StaticInputs:
    """The static buffers of a signature with these inputs, with room for ``capacity`` rows."""
    if not any(spec.axes for spec in specs):
        return StaticInputs(specs, capacity)
    from .grid import GridInputs  # here, since most callables have one dynamic dimension

    return GridInputs(specs, capacity)


def _ordered_view(flat: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return flat.as_strided(shape, stride)
