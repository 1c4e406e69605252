"""Batches that are made of another one, where a prewarm or a comparison needs more than calls have brought."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..sizes import Axis
from .signature import InputSpec
from .static_inputs import StaticInputs


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


def varied(inputs: StaticInputs, leaves: Sequence[Any], rows: int, number: int = 0) -> list[Any]:
    """Another batch, made of an example: its rows in turn, from the second one on, with other floating numbers.
    Each ``number`` makes another one.

    Each number is up to a quarter larger or smaller, so that zeros and what is not finite stay; but a tensor of
    zeros alone gets other numbers. A mask of a sequence of integers, zeros and ones for its elements, stays one.
    """
    along = [spec for spec in inputs.specs if any(axis is not inputs.axes[0] for _, axis in spec.spans)]
    has_integers = any(spec.is_integer for spec in along)
    may_be_masks = [spec for spec in along if has_integers and len(spec.spans) == len(spec.shape)]
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
