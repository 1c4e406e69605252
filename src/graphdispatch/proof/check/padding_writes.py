"""Finds padding that writes state which real rows leave alone, where the rows of a batch hide it.

Note [slots that rows name]
    Padding of zeros writes to slot 0. Nobody sees that while some real row writes there, too, as in early batches. So
    where a call writes by indices, it runs with all rows like one row of the batch, alone and padded: padding must
    not write more. A rule that repeats real rows writes where they do. One that makes rows of its own may not,
    whatever it reads. A batch of equal rows shows nothing, and a later one is tried.
    Where an operator of somebody else's writes, or a kernel, both runs get the same copies of what it writes, with
    other numbers in them: what changed there was written.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...backends.operators import is_expanded, is_strided, map_leaves, storage_key, tensors_in
from ...runtime.flatten import is_tensor
from ...runtime.signature import PLAIN_TENSORS
from ..watch.effects import EffectRecorder
from .attempt import CaptureAttempt
from .compare import find_padding_writes
from .padding import uniform

_UNLIKELY = 77  # what nobody writes into integers


class EqualRows:
    """Runs of batches whose rows are all one row of the batch, alone and padded; all is put back.

    Raises what ends a capture: no memory left, or an error of the device itself.
    """

    def __init__(self, attempt: CaptureAttempt) -> None:
        self._attempt, self._request = attempt, attempt.request
        self._specs, self._views = attempt.request.inputs.specs, attempt.request.inputs.views(attempt.request.size)
        self._limit = attempt.request.options.state_limit_bytes

    def objection(self) -> tuple[bool, str]:
        """Whether this batch has rows that differ, as it takes to see anything; and, in words, that padding writes what
        real rows leave alone if all of them are one row of the batch, else empty: see Note [slots that rows name].

        Costs up to four eager runs, and as many for what operators of somebody else's write.
        """
        request, run = self._request, self._attempt.warm_run
        own = {storage_key(view) for spec, view in zip(self._specs, self._views, strict=True) if spec.spans}
        indexed = [region.target for region in run.regions if region.indices]
        pads = [pad for spec in self._specs if spec.spans for pad in spec.pads]
        if own.issuperset(map(storage_key, (*indexed, *run.opaque.values()))):
            return True, ""
        if request.options.padding_writes == "allow" or all(pad.repeats_rows for pad in pads):
            return True, ""
        places = self._places()
        writes = any(self._writes_more(place) for place in places)
        text = (
            "padding writes where real rows leave memory alone as soon as they are all like one of them"
            if writes
            else ""
        )
        return len(places) > 1, text

    def _places(self) -> list[int]:
        """The rows with the largest and the smallest integer, or the first and the last. Reads results back to the
        host."""
        rows = self._request.inputs.axes[0]
        found = [0, rows.of(self._request.rows) - 1]
        for spec, value in zip(self._specs, self._request.arguments(), strict=True):
            dim = next((dim for dim, axis in spec.spans if axis is rows), None)
            if dim is not None and _is_integer(value) and value.numel():
                wide = (
                    value.to(torch.int64).movedim(dim, 0).flatten(1)
                    if value.dim() > 1
                    else value.to(torch.int64)[:, None]
                )
                found = [int(wide.amax(1).argmax()), int(wide.amin(1).argmin())]
                break
        return list(dict.fromkeys(found))

    def _writes_more(self, place: int) -> bool:
        """Whether padding writes more than the real rows if these are all the one at this place; False if it failed."""
        request, attempt, axes = self._request, self._attempt, self._request.inputs.axes
        pairs = zip(self._specs, request.arguments(), strict=True)
        values = request.values_with([uniform({axes[0]: place}, spec, value, request.rows) for spec, value in pairs])
        alone, padded = EffectRecorder(self._limit, strict=True), EffectRecorder(self._limit, strict=True)
        attempt.start_over("finding where a single row writes")
        if attempt.try_and_undo(alone, values, tensors_in) is None:
            return False
        attempt.start_over("finding where a single row writes with padding")
        request.inputs.load(values, request.rows, request.size)
        if attempt.try_and_undo(padded, request.static_values(), tensors_in) is None:
            return False
        if find_padding_writes(request, alone.regions, padded.regions) is not None:
            return True
        return self._writes_more_of_others(values, request.rows)

    def _writes_more_of_others(self, values: Sequence[Any], rows: int) -> bool:
        """Whether padding of these ``rows`` rows has operators of somebody else's write what the rows alone leave, by
        the numbers that change in copies. Costs two eager runs, if there are such operators."""
        request, attempt = self._request, self._attempt
        given = {*map(storage_key, self._views), *map(storage_key, request.arguments())}
        every = attempt.warm_run.opaque.values()
        found = [one for one in every if storage_key(one) not in given and _takes_numbers(one)]
        sizes = {storage_key(one): one.untyped_storage().nbytes() for one in found}
        if not found or sum(sizes.values()) > self._limit:
            return False
        attempt.start_over("finding what operators of others write for fewer rows")
        alone = self._changes(found, values)
        attempt.start_over("finding what operators of others write for fewer rows, with padding")
        request.inputs.load(values, rows, request.size)
        padded = None if alone is None else self._changes(found, request.static_values())
        return any(bool((more & ~fewer).any()) for fewer, more in zip(alone or (), padded or (), strict=False))

    def _changes(self, tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> list[torch.Tensor] | None:
        """Where a run on these values changes copies of the tensors, which hold other numbers; None if it failed."""
        effects = _StandIns(self._limit, tensors)
        before = [effects.swap(one).clone() for one in tensors]
        return self._attempt.try_and_undo(
            effects, values, lambda _: [effects.swap(one) != was for one, was in zip(tensors, before, strict=True)]
        )


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _takes_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor may hold any numbers: not integers that may be indices, or memory that is written twice."""
    if not tensor.numel() or tensor.is_quantized or tensor.is_meta or type(tensor) not in PLAIN_TENSORS:
        return False
    is_plain = is_strided(tensor) and not (is_expanded(tensor) or tensor.is_conj() or tensor.is_neg())
    return is_plain and (tensor.dtype.itemsize == 1 or not _is_integer(tensor))


class _StandIns(EffectRecorder):
    """Gives operators copies of some tensors' memory, in which these hold other values; saves all other writes."""

    def __init__(self, limit_bytes: int, tensors: Iterable[torch.Tensor], integer: int | None = None) -> None:
        super().__init__(limit_bytes, strict=True)
        generator = torch.Generator().manual_seed(0)
        self._copies = {storage_key(tensor): tensor.untyped_storage().clone() for tensor in tensors}
        for tensor in tensors:
            stand_in = self.swap(tensor)
            if tensor.dtype is torch.bool:
                stand_in.logical_not_()
            elif _is_integer(tensor):
                stand_in.fill_(_UNLIKELY)
            else:
                stand_in.copy_(torch.rand(tensor.shape, generator=generator, device="cpu") + 0.5)

    def swap(self, leaf: Any) -> Any:
        """The same view of the copy, if there is one; else what came."""
        if not is_tensor(leaf) or not is_strided(leaf) or storage_key(leaf) not in self._copies:
            return leaf
        place = (leaf.storage_offset(), leaf.size(), leaf.stride())
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(self._copies[storage_key(leaf)], *place)

    def look_inside(self, func: Any, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator's Python kernel on the copies."""
        return super().look_inside(func, key, map_leaves(self.swap, args), map_leaves(self.swap, kwargs))

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator on the copies."""
        return super().watch(func, map_leaves(self.swap, args), map_leaves(self.swap, kwargs))
