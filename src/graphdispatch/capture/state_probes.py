"""Runs a callable with other values, or fewer rows, where the first batches may hide what padding does.

Note [tensors of zeros]
    A proof replays one state of the callable, and one value of each argument that has no rows. A gate of zeros hides
    that rows mix (``x + gate * x.mean(0)``), and so does a flag. A later write to the gate would let them mix, and no
    guard sees writes to values. So where a tensor holds nothing but zeros, or one truth value, the first proof of a
    size asks once more: the callable runs eagerly on other paddings, and its operators get copies that hold other
    numbers. Real rows that then follow the padding will follow it later. An error of such a run tells nothing.
    Numbers that the call itself writes will be others later, too, and may hide it now (``torch.tanh(x + counter)``): so
    they get small ones. Where padding keeps to a pad rule, no other padding can show that, and one run more is of the
    real rows alone; unless padding writes scratch memory, which that run would leave with numbers of no other run.
    Offsets or lengths of segments, of which the last one may be empty now or later (``[0, 2, 3, 3]``, ``[2, 1, 0]``),
    hide that padding falls into that segment, as in the mean of an embedding bag. They get copies of zeros that end in
    a one: whether they are ends, starts or lengths, the last segment then holds a real row. One run more is of the real
    rows alone, since what such padding holds may not matter where how much there is does.
    Not tested: other tensors that hold something else already; written integers, but for single numbers; integers that
    may be indices which nobody checks; all of it, where several processes work together, of which another may hold
    other values and would run once less.

Note [slots from zero on]
    Padding of zeros writes to slot 0. Nobody sees that while some real row writes there, too, as in early batches. So
    where a call writes by indices, the batch without its first row is run, alone and padded: padding must not write
    more. A rule that repeats a real row follows the batch. A batch of one row cannot tell, and a later one is tested.
    Where an operator of somebody else's writes, or a kernel, both runs get the same copies of what it writes, with
    other numbers in them: what changed there was written.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..backends.operators import is_expanded, is_strided, map_leaves, storage_key, tensors_in
from ..call.signature import PLAIN_TENSORS
from ..call.spec import is_tensor
from ..memory.entry import CUDAGraphEntry
from ..memory.outputs import first_rows
from ..sizes import Axis, lengths_of, pack
from .attempt import CaptureAttempt
from .compare import coarsest, difference, find_padding_writes, tolerance_for
from .effects import EffectRecorder, Region, first_uncovered
from .probes import BY_RULE, Padding, may_replace

_MOST_BYTES = 64 << 20
_UNLIKELY = 77  # what nobody writes into integers
_SMALL = 16
_FEWEST_OFFSETS = 2  # the ends of one segment
_MOST_TOLD = 3  # tensors that a message names


class StateProber:
    """Asks what padding does once state, or an argument without rows, holds something else; all is put back.

    Raises what ends a capture: no memory left, or an error of the device itself.
    """

    def __init__(self, attempt: CaptureAttempt, entry: CUDAGraphEntry) -> None:
        self._attempt, self._entry, self._request = attempt, entry, attempt.request
        self._specs, self._views = attempt.request.inputs.specs, attempt.request.inputs.views(attempt.request.size)
        self._limit = attempt.request.options.state_limit_bytes

    def difference(
        self, state: Sequence[Region], rows: int, paddings: Iterable[Padding], along: Sequence[Axis]
    ) -> str | None:
        """How real rows, or the parts ``state`` of memory, differ between paddings when tensors that are written, or
        hold nothing but zeros, or one truth value, or offsets, hold other values; None if they do not, or nothing can
        be told. Without padding means without that ``along`` some axes (empty: all).

        Costs an eager run for each padding, one for offsets or pad rules, and up to two where integers cannot change.
        Reads values back to the host.
        """
        found, types = self._hiding(), self._entry.program.float_types
        if not found:
            return None
        first, *others = paddings
        names = [f"output {index}" for index in range(len(self._attempt.eager.outputs))]
        names += [f"state of shape {tuple(region.target.shape)}" for region in state]
        zeros = [tensor for tensor in found if not _is_offsets(tensor)]
        fewer = (found, zeros, [tensor for tensor in zeros if not _is_integer(tensor)])
        for chosen in {len(each): each for each in fewer if each}.values():
            base = self._run(chosen, state, rows, first)
            if base is None:
                continue
            is_asked = self._keeps_rules or any(map(_is_offsets, chosen))
            alone = [None] if is_asked and not self._attempt.eager.draws else []
            for padding in (*others, *alone):
                got = self._run(chosen, state, rows, padding, along)
                for name, a, b in zip(names, base, got or (), strict=False):
                    gap = difference(a, b, tolerance_for(coarsest(a.dtype, types), exact=False))
                    if gap is not None:
                        told = ", ".join(map(self._name, chosen[:_MOST_TOLD]))
                        return f"{name} changes as soon as {told} holds other values: {gap}"
            return None
        return None

    @property
    def _keeps_rules(self) -> bool:
        """Whether some padding keeps to its rule, and none writes state that real rows leave alone: without padding, a
        copy would keep numbers there that no run leaves, such as a flag by which others read that place."""
        writes = self._request.options.padding_writes
        if all(not spec.spans or may_replace(self._specs, i, writes) for i, spec in enumerate(self._specs)):
            return False
        buffers = self._request.buffer_storages()
        outside = [region for region in self._attempt.warm_run.regions if storage_key(region.target) not in buffers]
        return first_uncovered(outside, self._attempt.eager.effects.regions) is None

    def _name(self, tensor: torch.Tensor) -> str:
        for spec, view in zip(self._specs, self._views, strict=True):
            if storage_key(view) == storage_key(tensor):
                return f"argument {spec.name!r}"
        return f"a tensor of shape {tuple(tensor.shape)}"

    def _hiding(self) -> list[torch.Tensor]:
        """The tensors that are written, or hold nothing but zeros, or one truth value, or offsets; 64 MiB of them at
        most.

        An index out of range ends a process's use of a GPU: integers change there where no operator could fail, and
        numbers of which the call makes any integers on the host alone; integers never for operators of somebody else's.
        Offsets are given none that is larger than theirs. A tensor that begins with another number is looked at no
        further.
        """
        found, room, program = list[torch.Tensor](), _MOST_BYTES, self._entry.program
        written = {storage_key(one.target) for one in self._attempt.warm_run.regions if not one.is_generator}
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            return []
        whole = [view for spec, view in zip(self._specs, self._views, strict=True) if not spec.spans]
        for tensor in filter(_takes_other_values, (*self._entry.held, *whole)):
            size, is_flag, has_offsets = tensor.untyped_storage().nbytes(), tensor.dtype is torch.bool, False
            is_safe = is_flag or tensor.is_cpu or not program.limits_values
            is_state = storage_key(tensor) in written
            if _is_integer(tensor):
                has_offsets, is_state = _is_offsets(tensor), is_state and not tensor.dim()
                is_safe = len(self._request.inputs.axes) == 1 and not self._attempt.eager.effects.runs_custom
                is_safe = is_safe and (tensor.is_cpu or program.takes_any or has_offsets)
            if size > room or not is_safe:
                continue
            is_zero = not bool(tensor[(0,) * tensor.dim()]) and not bool(tensor.any())
            if is_state or is_zero or (is_flag and bool(tensor.all())) or has_offsets:
                found.append(tensor)
                room -= size
        return found

    def _run(
        self,
        tensors: Sequence[torch.Tensor],
        state: Sequence[Region],
        rows: int,
        padding: Padding | None,
        along: Sequence[Axis] = (),
    ) -> list[torch.Tensor] | None:
        """The real rows of the outputs, and ``state``, after an eager run on the static inputs in which ``tensors``
        hold other values, or without padding ``along`` some axes (empty: all); None if it failed."""
        request, attempt = self._request, self._attempt
        attempt.start_over("asking whether padding matters for other values of what holds zeros")
        attempt.load(rows, padding or BY_RULE)
        effects = _StandIns(self._limit, tensors)

        def read(output: Any) -> list[torch.Tensor]:
            pairs = zip(tensors_in(output), self._entry.outputs.rule.follows, strict=True)
            found = [first_rows(effects.swap(one.detach()), dims, rows).clone() for one, dims in pairs]
            return found + [effects.read(region).clone() for region in state]

        values = request.static_values()
        if padding is None:
            pairs = zip(self._specs, self._views, strict=True)
            values = request.values_with([spec.cut(effects.swap(view), rows, along).clone() for spec, view in pairs])
        return attempt.try_apart(effects, values, read)

    def writes_more_with_fewer_rows(self, rows: int) -> tuple[bool, str | None]:
        """Whether more than these ``rows`` rows are needed to tell; and, in words, that padding writes what real rows
        leave alone if the first row is missing: see Note [slots from zero on].

        Costs two eager runs, and two more for what operators of somebody else's write.
        """
        request, attempt, run = self._request, self._attempt, self._attempt.warm_run
        own = {storage_key(view) for spec, view in zip(self._specs, self._views, strict=True) if spec.spans}
        indexed = [region.target for region in run.regions if region.indices]
        pads = [pad for spec in self._specs if spec.spans for pad in spec.pads]
        if own.issuperset(map(storage_key, (*indexed, *run.opaque.values()))):
            return False, None
        if request.options.padding_writes == "allow" or all(pad.follows_data for pad in pads):
            return False, None
        axes = request.inputs.axes
        fewer = pack(axes, [max(extent - 1, 1) for extent in lengths_of(axes, rows)])
        if fewer == rows:
            return True, None
        pairs = zip(self._specs, request.arguments(), strict=True)
        values = request.values_with([spec.repeated(value, fewer, 1) for spec, value in pairs])
        attempt.start_over("asking where fewer rows write")
        alone, padded = EffectRecorder(self._limit, strict=True), EffectRecorder(self._limit, strict=True)
        if attempt.try_apart(alone, values, tensors_in) is None:
            return False, None
        attempt.start_over("asking where fewer rows write with padding")
        request.inputs.load(values, fewer, request.size)
        if attempt.try_apart(padded, request.static_values(), tensors_in) is None:
            return False, None
        writes = find_padding_writes(request, alone.regions, padded.regions) is not None
        writes = writes or self.writes_more_of_others(values, fewer)
        return False, "padding writes where the rows behind the first one leave memory alone" if writes else None

    def writes_more_of_others(self, values: Sequence[Any], rows: int) -> bool:
        """Whether padding of these ``rows`` rows has operators of somebody else's write what the rows alone leave, by
        the numbers that change in copies. Costs two eager runs, if there are such operators."""
        request, attempt = self._request, self._attempt
        given = {*map(storage_key, self._views), *map(storage_key, request.arguments())}
        every = attempt.warm_run.opaque.values()
        found = [one for one in every if storage_key(one) not in given and _takes_numbers(one)]
        sizes = {storage_key(one): one.untyped_storage().nbytes() for one in found}
        if not found or sum(sizes.values()) > self._limit:
            return False
        attempt.start_over("asking what operators of others write for fewer rows")
        alone = self._changes(found, values)
        attempt.start_over("asking what operators of others write for fewer rows, with padding")
        request.inputs.load(values, rows, request.size)
        padded = None if alone is None else self._changes(found, request.static_values())
        return any(bool((more & ~fewer).any()) for fewer, more in zip(alone or (), padded or (), strict=False))

    def _changes(self, tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> list[torch.Tensor] | None:
        """Where a run on these values changes copies of the tensors, which hold other numbers; None if it failed."""
        effects = _StandIns(self._limit, tensors, integer=_UNLIKELY)
        before = [effects.swap(one).clone() for one in tensors]
        return self._attempt.try_apart(
            effects, values, lambda _: [effects.swap(one) != was for one, was in zip(tensors, before, strict=True)]
        )


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _is_offsets(tensor: torch.Tensor) -> bool:
    """Whether a tensor may hold offsets or lengths of segments along its last dimension: integers, none of which is
    negative, and not all of them zero. Reads values back to the host."""
    if not _is_integer(tensor) or not tensor.dim() or tensor.shape[-1] < _FEWEST_OFFSETS:
        return False
    return bool((tensor >= 0).all()) and bool(tensor.any())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether each element lies in memory of its own, as it is."""
    return not (is_expanded(tensor) or tensor.is_conj() or tensor.is_neg())


def _takes_other_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a kind that can be looked at, and be given other values."""
    if not tensor.numel() or tensor.is_quantized or tensor.is_meta or type(tensor) not in PLAIN_TENSORS:
        return False
    return _is_plain(tensor) and not (tensor.is_floating_point() and tensor.dtype.itemsize == 1)


def _takes_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor may hold any numbers: not integers that may be indices, or memory that is written twice."""
    return is_strided(tensor) and _is_plain(tensor) and (not _is_integer(tensor) or tensor.dtype.itemsize == 1)


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
                stand_in.fill_(1 if integer is None else integer)
                if integer is None and _is_offsets(tensor):
                    stand_in[..., :-1] = 0
            else:  # where state is not zero, the proof itself has shown what large numbers do
                numbers = torch.rand(tensor.shape, generator=generator, device="cpu")
                stand_in.copy_(numbers / _SMALL if bool(tensor.any()) else numbers + 0.5)

    def swap(self, leaf: Any) -> Any:
        """The same view of the copy, if there is one; else what came."""
        if not is_tensor(leaf) or not is_strided(leaf) or storage_key(leaf) not in self._copies:
            return leaf
        place = (leaf.storage_offset(), leaf.size(), leaf.stride())
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(self._copies[storage_key(leaf)], *place)

    def read(self, region: Region) -> torch.Tensor:
        """What a written part of memory, or its copy, holds."""
        target: torch.Tensor = self.swap(region.target)
        return torch.ops.aten.index.Tensor(target, list(region.indices)) if region.indices else target

    def look_inside(self, func: Any, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator's Python kernel on the copies."""
        return super().look_inside(func, key, map_leaves(self.swap, args), map_leaves(self.swap, kwargs))

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator on the copies."""
        return super().watch(func, map_leaves(self.swap, args), map_leaves(self.swap, kwargs))
