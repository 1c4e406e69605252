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

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..backends.base import Backend
from ..backends.operators import is_expanded, is_strided, map_leaves, storage_key, tensors_in
from ..call.signature import PLAIN_TENSORS
from ..call.spec import is_tensor
from ..errors import error_of_signal
from ..memory.entry import CUDAGraphEntry
from ..memory.outputs import first_rows
from ..sizes import Axis, lengths_of, pack
from .attempt import CaptureAttempt
from .compare import coarsest, difference, find_padding_writes, tolerance_for
from .effects import EffectRecorder, Region, first_uncovered
from .probes import BY_RULE, Padding, may_replace
from .request import CaptureRequest

_MOST_BYTES = 64 << 20
_UNLIKELY = 77  # what nobody writes into integers
_SMALL = 16
_FEWEST_OFFSETS = 2  # the ends of one segment
_MOST_TOLD = 3  # tensors that a message names


def difference_apart(
    attempt: CaptureAttempt,
    entry: CUDAGraphEntry,
    tensors: Iterable[torch.Tensor],
    state: Sequence[Region],
    rows: int,
    paddings: Sequence[Padding],
    along: Sequence[Axis],
) -> str | None:
    """How real rows, or the parts ``state`` of memory, differ between paddings when those of ``tensors`` that are
    written, or hold nothing but zeros, or one truth value, or offsets, hold other values; None if they do not, or
    nothing can be told. Without padding means without that ``along`` some axes (empty: all).

    Costs an eager run for each padding, one for offsets or pad rules, and up to two where integers cannot change. Reads
    values back to the host. Raises what ends a capture: no memory left, or an error of the device itself.
    """
    request, specs, types = attempt.request, attempt.request.inputs.specs, entry.program.float_types
    kept = (
        i for i, spec in enumerate(specs) if spec.spans and not may_replace(specs, i, request.options.padding_writes)
    )
    keeps = next(kept, None) is not None and not _has_scratch(attempt)
    found = _hiding(attempt, entry, tensors, takes_integers=len(request.inputs.axes) == 1)
    names = [f"output {index}" for index in range(len(attempt.eager.outputs))]
    names += [f"state of shape {tuple(region.target.shape)}" for region in state]
    zeros = [tensor for tensor in found if not _is_offsets(tensor)]
    fewer = (found, zeros, [tensor for tensor in zeros if not _is_integer(tensor)])
    for chosen in {len(each): each for each in fewer}.values():
        base = _run(attempt, entry, chosen, state, rows, paddings[0]) if chosen else None
        if base is None:
            continue
        others: list[Padding | None] = [*paddings[1:]]
        if (keeps or any(map(_is_offsets, chosen))) and not attempt.eager.draws:
            others.append(None)
        for padding in others:
            got = _run(attempt, entry, chosen, state, rows, padding, along)
            for name, a, b in zip(names, base, got or (), strict=False):
                gap = difference(a, b, tolerance_for(coarsest(a.dtype, types), exact=False))
                if gap is not None:
                    told = ", ".join(_name(request, tensor) for tensor in chosen[:_MOST_TOLD])
                    return f"{name} changes as soon as {told} holds other values: {gap}"
        return None
    return None


def _has_scratch(attempt: CaptureAttempt) -> bool:
    """Whether padding writes state that real rows leave alone: without padding, a copy would keep numbers there that no
    run leaves, such as a flag by which others read that place."""
    buffers = attempt.request.buffer_storages()
    outside = [region for region in attempt.warm_run.regions if storage_key(region.target) not in buffers]
    return first_uncovered(outside, attempt.eager.effects.regions) is not None


def _name(request: CaptureRequest, tensor: torch.Tensor) -> str:
    for spec, view in zip(request.inputs.specs, request.inputs.views(request.size), strict=True):
        if storage_key(view) == storage_key(tensor):
            return f"argument {spec.name!r}"
    return f"a tensor of shape {tuple(tensor.shape)}"


def _hiding(
    attempt: CaptureAttempt, entry: CUDAGraphEntry, tensors: Iterable[torch.Tensor], *, takes_integers: bool
) -> list[torch.Tensor]:
    """Those that are written, or hold nothing but zeros, or one truth value, or offsets; 64 MiB of them at most.

    An index out of range ends a process's use of a GPU: integers change there where no operator could fail, and numbers
    of which the call makes any integers on the host alone; integers never for operators of somebody else's. Offsets
    are given none that is larger than theirs.
    """
    found, room, effects = [], _MOST_BYTES, attempt.eager.effects
    written = {storage_key(region.target) for region in attempt.warm_run.regions if not region.is_generator}
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return []
    for tensor in tensors:
        size, is_flag = tensor.untyped_storage().nbytes(), tensor.dtype is torch.bool
        is_safe = is_flag or tensor.is_cpu or not entry.program.limits_values
        has_offsets = may_be_offsets(tensor) and _is_offsets(tensor)
        if _is_integer(tensor):
            takes_any = tensor.is_cpu or entry.program.takes_any or has_offsets
            is_safe = takes_integers and not effects.runs_custom and takes_any
        if size > room or not is_safe or is_expanded(tensor) or tensor.is_conj() or tensor.is_neg():
            continue
        is_state = storage_key(tensor) in written and not (_is_integer(tensor) and tensor.dim())
        if is_state or not bool(tensor.any()) or (is_flag and bool(tensor.all())) or has_offsets:
            found.append(tensor)
            room -= size
    return found


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def may_be_offsets(tensor: torch.Tensor) -> bool:
    """Whether a tensor may hold offsets or lengths of segments along its last dimension: integers, none of which is
    negative. Reads values back to the host."""
    if not _is_integer(tensor) or not tensor.dim() or tensor.shape[-1] < _FEWEST_OFFSETS:
        return False
    return tensor.numel() > 0 and bool((tensor >= 0).all())


def _is_offsets(tensor: torch.Tensor) -> bool:
    """Whether one of the tensors that were chosen was so for its offsets: other integers hold zeros, or one number."""
    return _is_integer(tensor) and tensor.dim() > 0 and bool(tensor.any())


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


def _run(
    attempt: CaptureAttempt,
    entry: CUDAGraphEntry,
    tensors: Sequence[torch.Tensor],
    state: Sequence[Region],
    rows: int,
    padding: Padding | None,
    along: Sequence[Axis] = (),
) -> list[torch.Tensor] | None:
    """The real rows of the outputs, and ``state``, after an eager run on the static inputs in which ``tensors`` hold
    other values, or without padding ``along`` some axes (empty: all); None if it failed. All is put back."""
    request = attempt.request
    attempt.start_over("asking whether padding matters for other values of what holds zeros")
    attempt.load(rows, padding or BY_RULE)
    effects = _StandIns(request.options.state_limit_bytes, tensors)

    def read(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(outputs, entry.outputs.rule.follows, strict=True)
        found = [first_rows(effects.swap(one.detach()), dims, rows).clone() for one, dims in pairs]
        return found + [effects.read(region).clone() for region in state]

    values = request.static_values()
    if padding is None:
        pairs = zip(request.inputs.specs, request.inputs.views(request.size), strict=True)
        values = request.values_with([spec.cut(effects.swap(view), rows, along).clone() for spec, view in pairs])
    return run_apart(attempt, effects, values, read)


def writes_more_with_fewer_rows(attempt: CaptureAttempt, rows: int) -> tuple[bool, str | None]:
    """Whether more than these ``rows`` rows are needed to tell; and, in words, that padding writes what real rows leave
    alone if the first row is missing: see Note [slots from zero on].

    Costs two eager runs, and two more for what operators of somebody else's write. Raises as ``difference_apart`` does.
    """
    request = attempt.request
    pads = [pad for spec in request.inputs.specs if spec.spans for pad in spec.pads]
    if request.options.padding_writes == "allow" or all(pad.follows_data for pad in pads):
        return False, None
    axes = request.inputs.axes
    fewer = pack(axes, [max(extent - 1, 1) for extent in lengths_of(axes, rows)])
    if fewer == rows:
        return True, None
    specs, limit = request.inputs.specs, request.options.state_limit_bytes
    cut = [spec.repeated(value, fewer, 1) for spec, value in zip(specs, request.arguments(), strict=True)]
    values = request.values_with(cut)
    attempt.start_over("asking where fewer rows write")
    alone, padded = EffectRecorder(limit, strict=True), EffectRecorder(limit, strict=True)
    if run_apart(attempt, alone, values, list) is None:
        return False, None
    attempt.start_over("asking where fewer rows write with padding")
    request.inputs.load(values, fewer, request.size)
    if run_apart(attempt, padded, request.static_values(), list) is None:
        return False, None
    writes = find_padding_writes(request, alone.regions, padded.regions) is not None
    writes = writes or writes_more_of_others(attempt, values, fewer)
    return False, "padding writes where the rows behind the first one leave memory alone" if writes else None


def writes_more_of_others(attempt: CaptureAttempt, values: Sequence[Any], rows: int) -> bool:
    """Whether padding of these ``rows`` rows has operators of somebody else's write what the rows alone leave, by the
    numbers that change in copies. Costs two eager runs, if there are such operators."""
    request, views = attempt.request, attempt.request.inputs.views(attempt.request.size)
    given = {*map(storage_key, views), *map(storage_key, request.arguments())}
    every = attempt.warm_run.opaque.values()
    found = [one for one in every if storage_key(one) not in given and _takes_numbers(one)]
    sizes = {storage_key(one): one.untyped_storage().nbytes() for one in found}
    changed = list[list[torch.Tensor]]()
    for what in ("alone", "with padding") if found and sum(sizes.values()) <= request.options.state_limit_bytes else ():
        attempt.start_over(f"asking what operators of others write for fewer rows, {what}")
        if what != "alone":
            request.inputs.load(values, rows, request.size)
        effects = _StandIns(request.options.state_limit_bytes, found, integer=_UNLIKELY)
        before = [effects.swap(one).clone() for one in found]
        after = run_apart(
            attempt,
            effects,
            request.static_values() if changed else values,
            lambda _, effects=effects: [effects.swap(one).clone() for one in found],  # type: ignore[misc]
        )
        if after is None:
            return False
        changed.append([a != b for a, b in zip(after, before, strict=True)])
    return any(bool((more & ~fewer).any()) for fewer, more in zip(*changed, strict=True))


def _takes_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor may hold any numbers: not integers that may be indices, or memory that is written twice."""
    is_plain = not (is_expanded(tensor) or tensor.is_conj() or tensor.is_neg())
    return is_plain and is_strided(tensor) and (not _is_integer(tensor) or tensor.dtype.itemsize == 1)


def run_apart(
    attempt: CaptureAttempt,
    effects: EffectRecorder,
    values: Sequence[Any],
    read: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor] | None:
    """What ``read`` gives of the output tensors of a run on ``values``; None if that failed."""
    try:
        return attempt.run_apart(effects, values, lambda output: read(tensors_in(output)))
    except Exception as error:
        if ends_capture(attempt.request.backend, error):
            raise
        return None


def ends_capture(backend: Backend, error: Exception) -> bool:
    """Whether an error is not one of the callable for such numbers: no memory is left, or a signal's handler raised it.
    Raises ``DeviceLostError``."""
    if backend.is_out_of_memory(error) or error_of_signal(error) is not None:
        return True
    backend.raise_if_lost(error)
    return False


def may_hide(tensor: torch.Tensor, *, is_written: bool) -> bool:
    """Whether a tensor begins with a zero, is written by the call, holds truth values, or may hold offsets. Reads
    values back to the host."""
    if not tensor.numel() or tensor.is_quantized or tensor.is_meta or type(tensor) not in PLAIN_TENSORS:
        return False
    is_narrow = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    if tensor.dtype is torch.bool or (not is_narrow and (is_written or not bool(tensor[(0,) * tensor.dim()]))):
        return True
    return may_be_offsets(tensor)
