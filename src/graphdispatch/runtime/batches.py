"""Batches that are made of another one, and what padding holds in the replays that look at a length or at the user's
word, in place of what its rule says.

Note [what padding may hold]
    Only values that cannot break the callable. Floating-point arguments get large finite numbers; where the callable
    checks its data, or makes indices of it, the largest and the smallest of the batch, since a GPU that meets an index
    out of range is lost to the process. Integers may be indices: they get what one place of the batch holds, all of
    them of the same place, since they may belong together (the begin and the end of a range). An argument with a pad
    rule of the user's keeps to it: what padding holds there is what the user promised.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..sizes import Axis
from .signature import InputSpec
from .static_inputs import StaticInputs

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


def resized(inputs: StaticInputs, values: Sequence[Any], rows: int, *, shift: int = 0) -> list[Any]:
    """The example's rows repeated, from row ``shift`` on, until there are ``rows`` of them.

    Along lengths masks begin where they did: else they would hide all of a row that has one real element.
    """
    sized = list(values)
    for spec in inputs.specs:
        if spec.spans:
            value = values[spec.position]
            keeps = inputs.axes[1:] if spec.is_pad_given or holds_flags(value) else ()
            sized[spec.position] = _with_order(spec.repeated(value, rows, shift, keeps), spec.order)
    return sized


def varied(inputs: StaticInputs, leaves: Sequence[Any], rows: int, number: int = 0) -> list[Any]:
    """Another batch, made of an example: its rows in turn, from the second one on, with other floating numbers.
    Each ``number`` makes another one.

    Each number is up to a quarter larger or smaller, so that zeros and what is not finite stay; but a tensor of
    zeros alone gets other numbers.
    """
    generator = torch.Generator().manual_seed(rows + number)
    batch = resized(inputs, leaves, rows, shift=1 + number)
    for spec in inputs.specs:
        if spec.dtype.is_floating_point and spec.dtype.itemsize > 1:
            factor = 0.75 + torch.rand(spec.sized(rows), generator=generator, device="cpu") / 2
            value = batch[spec.position] if spec.spans else batch[spec.position].clone()
            factor = factor.to(spec.device, spec.dtype)
            batch[spec.position] = value.mul_(factor) if bool(value.any()) else factor - 1
    return batch


def takes_any_value(spec: InputSpec) -> bool:
    """Whether padding rows may hold values that occur nowhere in the batch."""
    return not (spec.is_pad_given or spec.is_integer)


def may_replace(specs: Sequence[InputSpec], index: int, padding_writes: str) -> bool:
    """Whether padding of an argument may hold something else than what its rule says: values of the batch at least."""
    spec = specs[index]
    if not spec.spans or spec.is_pad_given:
        return False
    is_allowed = padding_writes == "refuse" or any(other.is_pad_given for other in specs)
    return is_allowed or takes_any_value(spec)


def uniform(place: Mapping[Axis, int], spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Elements that are all the one at a place."""
    one = value.detach()
    for dim, axis in spec.spans:
        one = one.narrow(dim, place.get(axis, 0), 1)
    return spec.repeated(one, rows)


def far(sign: int, spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Numbers of one sign that are several times as large as those of the batch."""
    shape = torch.Size(spec.sized(rows))
    if value.dtype is torch.bool:
        return torch.full(shape, sign > 0, device=value.device)
    magnitude = (value if value.is_complex() else value.to(torch.float64)).detach().abs()
    largest = magnitude.where(magnitude.isfinite(), 0.0).amax() if value.numel() else 0.0
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")  # whatever the default device is
    numbers = (drawn + 1).to(value.device) * (sign * (4 * largest + 4))
    return _as_finite(numbers, value.dtype) * (1 + 1j if value.is_complex() else 1)


def edge(sign: int, spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows that are all alike: at each place the largest number that a row has there, or the smallest."""
    one, dims = value.detach(), [dim for dim, _ in spec.spans]
    if dims and value.numel() and not value.is_complex():
        numbers = one.to(torch.float64)  # narrow types have no largest
        one = (numbers.amax(dims, keepdim=True) if sign > 0 else numbers.amin(dims, keepdim=True)).to(one.dtype)
    return spec.repeated(one, rows)


def largest_within(specs: Sequence[InputSpec], rows: int, cut: Collection[Axis]) -> dict[str, int]:
    """The largest number that arguments may hold, by name, so that they name no element beyond a batch of ``rows`` that
    was cut along these axes: integers, such as lengths, that are not cut along all of them themselves."""
    most = min((axis.of(rows) for axis in cut), default=0) - 1
    whole = ((spec, {axis for _, axis in spec.spans}) for spec in specs if spec.spans and spec.is_integer)
    return {spec.name: most for spec, axes in whole if not axes.issuperset(cut)}


def holds_flags(value: torch.Tensor) -> bool:
    """Whether a tensor holds nothing but zeros and ones, as masks do. Reads the result back to the host."""
    return bool(value.numel()) and bool(((value == 0) | (value == 1)).all())


def _as_finite(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Wide numbers as finite numbers of a narrower type; of a complex one, the real part alone."""
    return numbers.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def _with_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same values, with dimensions lying in memory from slowest to fastest as ``order`` says."""
    back = sorted(range(len(order)), key=lambda d: order[d])
    return tensor.permute(order).contiguous().permute(back)
