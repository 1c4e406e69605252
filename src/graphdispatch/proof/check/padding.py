"""What padding holds in the replays that look at a length or at the user's word, in place of what its rule says.

Note [what padding may hold]
    Only values that cannot break the callable. Floating-point arguments get large finite numbers; where the callable
    checks its data, or makes indices of it, the largest and the smallest of the batch, since a GPU that meets an index
    out of range is lost to the process. So do integers, where no operator takes any for places. Else they may be
    indices: they get what one place of the batch holds, all of them of the same place, since they may belong together
    (the begin and the end of a range). An argument with a pad rule of the user's keeps to it: what padding holds there
    is what the user promised.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...runtime.signature import InputSpec
from ...sizes import Axis
from ..watch.operator_trace import OperatorTrace

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


def takes_any_value(spec: InputSpec, operators: OperatorTrace) -> bool:
    """Whether padding rows may hold values that occur nowhere in the batch, in a graph of these operators."""
    return not (spec.is_pad_given or (spec.is_integer and (operators.names_places or operators.has_regions)))


def may_replace(specs: Sequence[InputSpec], index: int, operators: OperatorTrace, padding_writes: str) -> bool:
    """Whether padding of an argument may hold something else than what its rule says: values of the batch at least."""
    spec = specs[index]
    if not spec.spans or spec.is_pad_given:
        return False
    is_allowed = padding_writes == "refuse" or any(other.is_pad_given for other in specs)
    return is_allowed or takes_any_value(spec, operators)


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
    generator = torch.Generator()  # of its own, so that it draws the same numbers each time
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")  # whatever the default device is
    numbers = (drawn + 1).to(value.device) * (sign * (4 * largest + 4))
    finite = _as_finite(numbers, value.dtype)
    return torch.complex(finite.real, finite.real) if value.is_complex() else finite


def edge(sign: int, spec: InputSpec, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows that are all alike: at each place the largest number that a row has there, or the smallest."""
    one, dims = value.detach(), [dim for dim, _ in spec.spans]
    if dims and value.numel() and not value.is_complex():
        numbers = one.to(torch.float64)  # narrow types have no largest
        one = (numbers.amax(dims, keepdim=True) if sign > 0 else numbers.amin(dims, keepdim=True)).to(one.dtype)
    return spec.repeated(one, rows)


def _as_finite(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Wide numbers as finite numbers of a narrower type; of a complex one, the real part alone."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return numbers.clamp(torch.iinfo(dtype).min / 2, torch.iinfo(dtype).max / 2).to(dtype)  # which float64 holds
    return numbers.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
