"""What padding rows, and real ones, hold in the replays of a proof.

Note [what padding rows may hold]
    Only values that cannot break the callable. Floating-point arguments get large, small and random numbers, finite
    ones. Integers may be indices, so they get rows that occur in the batch, or the padding of their rule. All integer
    arguments of a padding row come from one real row, since they may belong together (the begin and end of a range).
    An argument with a pad rule of the user's keeps its rule: what padding rows hold there is what the user promised.
    With ``padding_writes="allow"`` and no pad rule of the user's all integers keep zero, which may be a scratch slot.
    A callable may take no such numbers: it checks its data, or makes indices or probabilities of them. A GPU that meets
    an index out of range is lost to the process. So if the eager run did anything of the kind, or a replay with such
    numbers fails (which says nothing about rows), padding gets the largest and the smallest numbers of the batch.
    Last, the real rows are replaced, since they may hide what padding does. Small numbers show a maximum that is
    bounded, ``x.amax(0).clamp(max=1)``; large ones of each sign, ``(x.abs() < 1).any()``. A mask of integers shows
    large ones in padding, too, or it would hide them there. Integers are never made up: all rows become one row of the
    batch, with its largest number. A padding of zeros does not show in ``ids.amin()`` as long as some row holds a zero.
    Of a mask, or where numbers are limited, it is the largest number at each place.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..call.signature import InputSpec
from ..sizes import Axis

_WIDEST = 20  # powers of two


Rows = Sequence[torch.Tensor | None]
"""What arguments (by index) hold; None for what they hold otherwise."""


class Padding(NamedTuple):
    """Other padding: what it is, in words, and for each argument (by index) the whole of it, of which the padding along
    ``axes`` (empty: all) is taken; or None for the padding of its rule.

    ``real``: what the arguments hold instead of their values; empty for their values.
    """

    name: str
    rows: Rows
    real: Sequence[torch.Tensor] = ()
    axes: Sequence[Axis] = ()


BY_RULE = Padding("the padding of the pad rules", [])


def takes_any_value(spec: InputSpec) -> bool:
    """Whether padding rows may hold values that occur nowhere in the batch."""
    return not spec.is_pad_given and (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype is torch.bool)


def may_replace(specs: Sequence[InputSpec], index: int, padding_writes: str) -> bool:
    """Whether padding of an argument may hold something else than what its rule says: values of the batch at least."""
    spec = specs[index]
    if not spec.spans or spec.is_pad_given:
        return False
    is_told = padding_writes == "refuse" or any(other.is_pad_given for other in specs)
    return is_told or takes_any_value(spec)


def telling_places(
    specs: Sequence[InputSpec],
    arguments: Sequence[torch.Tensor],
    rows: int,
    indices: Sequence[int],
    *,
    takes_smallest: bool = False,
) -> list[dict[Axis, int]]:
    """Some places of a batch of ``rows`` rows, by axis: where the arguments ``indices`` have their largest number, and
    the smallest if it is negative or ``takes_smallest``, then the first and the last. Reads results back to the
    host."""
    places: list[dict[Axis, int]] = []
    for index in indices:
        spec, value = specs[index], specs[index].cut(arguments[index], rows).to(torch.float64)
        if value.numel():
            extremes = [value.argmax(), *([value.argmin()] if takes_smallest or bool((value < 0).any()) else [])]
            # Not torch's `unravel_index`, which imports sympy: that takes longer than a small model's capture.
            at = [np.unravel_index(int(extreme), value.shape) for extreme in extremes]
            places += ({axis: int(one[dim]) for dim, axis in spec.spans} for one in at)
    if places:
        axes = {axis for index in indices for _, axis in specs[index].spans}
        places += [dict.fromkeys(axes, 0), {axis: axis.of(rows) - 1 for axis in axes}]
    return [place for n, place in enumerate(places) if place not in places[:n]][:_MOST_PLACES]


_MOST_PLACES = 3


def holds_padding(
    specs: Sequence[InputSpec], arguments: Sequence[torch.Tensor], rows: Axis, place: Mapping[Axis, int]
) -> bool:
    """Whether an argument has its own pad value at a place along another dimension than the rows: all of a row of such
    would be hidden. Reads results back to the host."""
    for spec, value in zip(specs, arguments, strict=True):
        if spec.is_pad_given and any(axis is not rows for _, axis in spec.spans):
            for dim, axis in spec.spans:
                value = value.narrow(dim, place.get(axis, 0), 1)
            if any(pad.kind == "value" and bool((value == pad.fill).all()) for pad in spec.pads):
                return True
    return False


Kind = Callable[[InputSpec, torch.Tensor, int], torch.Tensor]
"""Makes an argument of so many rows, by its spec and its value."""


def uniform(place: Mapping[Axis, int], spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows that are all the one at a place; of a mask, one that hides what all rows hide."""
    if holds_flags(value):
        return edge(-1 if spec.pads and spec.pads[-1].fill == 1 else 1, spec, value, rows)
    one = value.detach()
    for dim, axis in spec.spans:
        one = one.narrow(dim, place.get(axis, 0), 1)
    return spec.repeated(one, rows)


def small(spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """The same numbers, a thousand times smaller."""
    wide = value.detach() if value.is_complex() else value.detach().to(torch.float64)
    return spec.repeated((wide * 2.0**-10).to(value.dtype), rows)


def of_sign(sign: int, spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """The same numbers, all of one sign."""
    return spec.repeated(value.detach().abs() * sign, rows)


def far(sign: int, spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Numbers of one sign that are several times as large as those of the batch.

    They are the same for all arguments of one shape but for a factor, so that all of one argument lies above another.
    """
    return _large(torch.tensor([sign], device="cpu"), spec, value, rows, torch.Generator().manual_seed(0))


def signed(first: int, spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Such numbers of both signs in turns along the last dynamic dimension, the ``first`` one before the other."""
    return _large(first * torch.tensor([1, -1], device="cpu"), spec, value, rows, _generator(spec))


def checkered(spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Such numbers of both signs in turns along the last dimension of each kind: one that follows the batch, and one
    that does not."""
    numbers, dims = signed(1, spec, value, rows), [dim for dim, _ in spec.spans]
    fixed = [dim for dim in range(numbers.dim()) if dim not in dims]
    if not fixed or value.dtype is torch.bool:
        return numbers
    turns = 1 - 2 * (torch.arange(numbers.shape[fixed[-1]], device=numbers.device) % 2)
    return numbers * turns.view([-1 if dim == fixed[-1] else 1 for dim in range(numbers.dim())]).to(numbers.dtype)


def edge(sign: int, spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows that are all alike: at each place the largest number that a row has there, or the smallest."""
    one, dims = value.detach(), [dim for dim, _ in spec.spans]
    if dims and value.numel() and not value.is_complex():
        numbers = one.to(torch.float64)  # narrow types have no largest
        one = (numbers.amax(dims, keepdim=True) if sign > 0 else numbers.amin(dims, keepdim=True)).to(one.dtype)
    return spec.repeated(one, rows)


def largest(spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """The largest number of the batch at all places."""
    return spec.repeated(torch.full_like(value, value.amax().item() if value.numel() else 0), rows)


def points_beyond(specs: Sequence[InputSpec], cut: Collection[Axis]) -> tuple[str, ...]:
    """The arguments that may name elements beyond a batch that is cut along these axes: integers, such as lengths, that
    are not cut along all of them themselves."""
    whole = ((spec, {axis for _, axis in spec.spans}) for spec in specs if spec.spans and spec.dtype is not torch.bool)
    return tuple(
        spec.name
        for spec, axes in whole
        if not (spec.dtype.is_floating_point or spec.dtype.is_complex or axes.issuperset(cut))
    )


def is_discrete(spec: InputSpec, value: torch.Tensor) -> bool:
    """Whether an argument holds integers, or zeros and ones of any type."""
    return not (spec.dtype.is_floating_point or spec.dtype.is_complex) or holds_flags(value)


def holds_flags(value: torch.Tensor) -> bool:
    """Whether a tensor holds nothing but zeros and ones, as masks do. Reads the result back to the host."""
    return bool(value.numel()) and bool(((value == 0) | (value == 1)).all())


def _large(
    signs: torch.Tensor, spec: InputSpec, value: torch.Tensor, rows: int, generator: torch.Generator
) -> torch.Tensor:
    """Numbers several times as large as those of the real rows, with these signs in turns."""
    shape, dim = torch.Size(spec.sized(rows)), spec.spans[-1][0]
    turns = signs[torch.arange(shape[dim], device="cpu") % len(signs)]
    turns = turns.view([-1 if d == dim else 1 for d in range(len(shape))]).to(value.device)
    if value.dtype is torch.bool:
        return (turns > 0).expand(shape)
    magnitude = (value if value.is_complex() else value.to(torch.float64)).detach().abs()
    largest = magnitude.where(magnitude.isfinite(), 0.0).amax() if value.numel() else 0.0
    numbers = (_drawn(shape, generator) + 1).to(value.device)
    numbers = numbers * turns * (4 * largest + 4)
    return _as_finite(numbers, value.dtype) * (1 + 1j if value.is_complex() else 1)


def wide(spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Numbers of both signs from tiny to large, such that squares of them are finite."""
    shape, generator = torch.Size(spec.sized(rows)), _generator(spec)
    signs = torch.randint(2, shape, generator=generator, device="cpu") * 2 - 1
    if value.dtype is torch.bool:
        return (signs > 0).to(value.device)
    exponent = min(_WIDEST, math.log2(torch.finfo(value.dtype).max) / 2)
    numbers = _drawn(shape, generator)
    return _as_finite((signs * 2 ** ((2 * numbers - 1) * exponent)).to(value.device), value.dtype)


def _drawn(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Numbers below one, on the host: whatever new tensors are made on by default, they are the generator's."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")


def _generator(spec: InputSpec) -> torch.Generator:
    """The same numbers in each proof, and others for each argument."""
    return torch.Generator().manual_seed(spec.position)


def _as_finite(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Wide numbers as finite numbers of a narrower type; of a complex one, the real part alone."""
    return numbers.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
