"""Compares what a graph does with what eager does: outputs, written memory, and whose memory was written.

Values agree bit for bit where that is promised, and within a tolerance elsewhere. The tolerance is relative to each
element, and to what is typical in its row: padding may change the order of a sum, and so the last bits of every
element, also of one that is small because its terms cancel. What is typical must not follow a few outliers, nor
constants such as the value of masked logits, or they would hide errors in all other elements.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...backends.operators import bits_equal, storage_key
from ...errors import CaptureError, VerificationError
from ...reasons import Reason
from ...runtime.entry import CUDAGraphEntry
from ...runtime.overlap import may_overlap_itself, share_memory
from ...runtime.protocols import CaptureRequest
from ..watch.effects import Region, first_uncovered, first_uncovered_within
from .eager_run import EagerRun
from .licence import float_types_of


def check_replay(request: CaptureRequest, eager: EagerRun, entry: CUDAGraphEntry) -> None:
    """Raise ``VerificationError`` unless the replay just made gave eager's outputs and wrote what eager wrote.

    Memory that nothing wrote (``torch.empty``) is not compared, nor are rows that the caller said are padding. Reads
    values back to the host. A padded batch may be further off: see Note [kernels that round otherwise] in
    ``pipeline.py``.
    """
    unwritten = eager.effects.unwritten
    for index, (want, got) in enumerate(zip(eager.outputs, entry.outputs.peek(request.rows), strict=True)):
        want, got = request.real_rows_of(want), request.real_rows_of(got)
        _compare(entry, request, f"output {index}", want, got, unwritten(want))
    for index in sorted({*eager.written_inputs, *entry.mutated}):
        name, want = entry.inputs.specs[index].name, eager.written_inputs.get(index, eager.arguments[index])
        got = entry.inputs.real(index, request.rows, request.size)
        want, got = request.real_rows_of(want), request.real_rows_of(got)
        _compare(entry, request, f"argument {name!r}, which the call writes,", want, got)
    arguments = set(map(storage_key, eager.arguments))
    for region in eager.effects.regions:
        if storage_key(region.target) in arguments or (region.is_generator and request.is_padded):
            continue  # arguments are compared above; padding rows draw more random numbers
        assert region.after is not None
        name = f"state of shape {tuple(region.target.shape)}"
        ignored = None if region.is_generator else unwritten(region.after)
        _compare(entry, request, name, region.after, region.read(), ignored)
    is_comparable = request.backend.capture_executes and not request.is_padded  # padding rows draw more numbers
    if eager.draws and (is_comparable or torch.equal(eager.rng_before, eager.rng_after)):
        _compare(entry, request, "the state of the random generator", eager.rng_after, request.backend.rng_state())


def _compare(
    entry: CUDAGraphEntry,
    request: CaptureRequest,
    what: str,
    want: torch.Tensor,
    got: torch.Tensor,
    ignored: torch.Tensor | None = None,
) -> None:
    if ignored is not None and want.shape == got.shape:
        got = got.where(~ignored, want)
    is_like_eager = not request.is_padded and all(spec.is_dense for spec in request.inputs.specs)
    exact = request.backend.capture_executes and is_like_eager
    dtype = coarsest(want.dtype, float_types_of(entry))
    tolerance = tolerance_for(
        dtype, exact=exact, rtol=request.options.rtol, atol=request.options.atol, is_far=request.is_padded
    )
    gap = difference(want, got, tolerance)
    if gap is not None:
        text = f"{what} of {request.rows} rows in a graph of {request.size} is not what eager gives: {gap}"
        usual = tolerance_for(dtype, exact=False)
        if exact and difference(want, got, usual) is None:
            text += f", as rounding makes it; CUDAGraphOptions(rtol={usual.rtol:g}) serves it, unless {_BY_ITSELF}"
        raise VerificationError(text)


_BY_ITSELF = "eager itself gives another result for the same batch (it reads a clock, or draws as torch does not)"


def check_writes(request: CaptureRequest, eager: EagerRun, entry: CUDAGraphEntry, regions: list[Region]) -> None:
    """Raise ``VerificationError``, or ``CaptureError`` for padding, if the graph writes what the eager run does not.
    Code may read of an argument what a static input has otherwise. ``regions`` is what a run on these wrote."""
    if request.is_padded:
        check_padding_writes(request, eager, regions)
        return
    buffers = request.buffer_storages()
    outside = [region for region in regions if storage_key(region.target) not in buffers]
    if entry.mutated != tuple(eager.written_inputs) or first_uncovered(outside, eager.effects.regions) is not None:
        raise VerificationError(
            f"the graph of {request.size} and eager write to other arguments, or to other state: the code may read "
            "more of an argument than its values; pass a flag"
        )


def check_padding_writes(request: CaptureRequest, eager: EagerRun, padded: list[Region]) -> None:
    """Raise ``CaptureError`` if the padded run, which writes ``padded``, writes what the eager run leaves alone."""
    uncovered = find_padding_writes(request, eager.effects.regions, padded)
    if uncovered is not None:
        raise CaptureError(
            f"padding rows write to a tensor of shape {tuple(uncovered.target.shape)} where the real rows leave it "
            "alone; give a pad rule that points at scratch rows of what real rows write, and padding_writes='allow'",
            Reason.PADDING_WRITES_STATE,
        )


def find_padding_writes(request: CaptureRequest, real: list[Region], padded: list[Region]) -> Region | None:
    """What a padded run writes, of ``padded``, and a run on the ``real`` rows alone leaves as it is; None for nothing.

    Writes to arguments with rows do not count. What lies there may be in use later, even if today's padding happens to
    write the value that is there already. Where padding may write, it must write to a tensor that the real rows write
    to as well.
    """
    if not padded:
        return None
    buffers = request.buffer_storages()
    outside = [region for region in padded if storage_key(region.target) not in buffers]
    if request.options.padding_writes == "allow":
        written = {storage_key(region.target) for region in real}
        return next((one for one in outside if not one.is_generator and storage_key(one.target) not in written), None)
    uncovered = first_uncovered(outside, real)
    for spec, view, argument in zip(
        request.inputs.specs, request.inputs.views(request.size), request.arguments(), strict=True
    ):
        if uncovered is None and not spec.spans:
            uncovered = first_uncovered_within(view, padded, argument, real)
    return uncovered


def check_aliases(request: CaptureRequest, eager: EagerRun, mutated: tuple[int, ...]) -> None:
    """Raise ``CaptureError`` if the call writes to memory that two arguments, two elements of one, or an argument and
    its state share.

    ``mutated`` are the arguments (by index) whose buffers the graph writes to. The eager run must write to the memory
    of exactly these, and to no argument's memory by another way: a copy in a buffer would not see that write.
    """
    arguments = request.arguments()
    written = tuple(eager.written_inputs)
    is_shared = len(set(map(storage_key, arguments))) < len(arguments) or share_memory(arguments)
    is_shared = is_shared or any(may_overlap_itself(arguments[index]) for index in mutated)
    if written != mutated or (mutated and is_shared):
        names = [request.inputs.specs[i].name for i in sorted({*written, *mutated})]
        raise CaptureError(
            f"the call writes to memory that arguments share with each other or with its own state: {names}; "
            "pass copies",
            Reason.ALIASED_ARGUMENTS,
        )


class Tolerance(NamedTuple):
    """``|graph - eager| <= atol + rtol * (|eager| + typical)`` for every element; if both are zero, the same bits.

    ``typical`` is some multiple of a lower quartile of the magnitudes in the element's row, see ``_typical``.
    """

    rtol: float
    atol: float

    @property
    def is_exact(self) -> bool:
        """Whether the bits must be the same."""
        return self.rtol == 0.0 and self.atol == 0.0


# For the wide types about the square root of the type's resolution; for the narrow ones a few units of the resolution.
_BY_DTYPE = {
    torch.float64: Tolerance(1e-9, 1e-12),
    torch.float32: Tolerance(1e-4, 1e-6),
    torch.float16: Tolerance(1e-2, 1e-4),
}
_OF_NARROW, _FAR_OF_NARROW = Tolerance(2e-2, 1e-3), Tolerance(8e-2, 4e-3)
"""For bfloat16 and narrower types; the second as many units of bfloat16 as float16 is allowed of its own."""


def coarsest(dtype: torch.dtype, computed: Iterable[torch.dtype]) -> torch.dtype:
    """The type whose rounding a value of a type may show, if what it was made of was ``computed`` in others: logits
    of a model in bfloat16 are as inexact after ``.float()``."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    return max((dtype.to_real(), *computed), key=lambda each: tolerance_for(each, exact=False))


def tolerance_for(
    dtype: torch.dtype, *, exact: bool, rtol: float | None = None, atol: float | None = None, is_far: bool = False
) -> Tolerance:
    """The tolerance for a type: the same bits for integers and for bool; else as given, and where nothing is given by
    type, or the same bits if ``exact``. ``is_far`` is for kernels that round otherwise, where nothing is given."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return Tolerance(0.0, 0.0)
    if exact:
        return Tolerance(rtol or 0.0, atol or 0.0)
    is_far = is_far and rtol is None and atol is None
    default = _BY_DTYPE.get(dtype.to_real(), _FAR_OF_NARROW if is_far else _OF_NARROW)
    return Tolerance(default.rtol if rtol is None else rtol, default.atol if atol is None else atol)


def difference(eager: torch.Tensor, graph: torch.Tensor, tolerance: Tolerance) -> str | None:
    """How two tensors disagree, in words, or None if they agree. Reads values back to the host."""
    if eager.shape != graph.shape or eager.dtype != graph.dtype:
        return f"{tuple(graph.shape)} {graph.dtype} instead of {tuple(eager.shape)} {eager.dtype}"
    if eager.numel() == 0 or bits_equal(eager, graph):
        return None
    if not (eager.dtype.is_floating_point or eager.dtype.is_complex):
        return f"{int((eager != graph).sum())} of {eager.numel()} elements differ"
    wide = torch.promote_types(eager.dtype, torch.float32)
    a, b = (torch.view_as_real(t) if wide.is_complex else t for t in (eager.to(wide), graph.to(wide)))
    finite = a.isfinite() & b.isfinite()
    if not bool((finite | (a == b) | (a.isnan() & b.isnan())).all()):
        return "elements that are not finite differ"
    a, gaps = a.where(finite, 0.0), (a - b).where(finite, 0.0).abs()
    if float(gaps.max()) == 0.0:
        return None if not tolerance.is_exact else "bits differ (sign of zero or NaN payload)"
    if not tolerance.is_exact:
        is_wide = tolerance.rtol <= _BY_DTYPE[torch.float32].rtol
        usual = _of_columns(a) if is_wide else torch.full_like(a, math.inf)
        a, gaps, usual = _in_rows(a), _in_rows(gaps), _in_rows(usual)
        allowed = tolerance.atol + tolerance.rtol * a.abs()
        rows = (gaps > allowed).any(1)
        typical = _typical(a[rows]).minimum(usual[rows])
        if not bool((gaps[rows] > allowed[rows] + tolerance.rtol * typical).any()):
            return None
    return f"largest difference {float(gaps.max()):.3g} where eager's largest value is {float(a.abs().max()):.3g}"


_ROW = 64  # elements that a row has at least, if the tensor has as many
_MOST_SORTED = 4096  # elements of a row
_FEW = 8


def _in_rows(values: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix, whose rows are as many of the trailing dimensions as make ``_ROW`` elements."""
    length, dim = 1, values.dim()
    while dim and length < _ROW:
        dim -= 1
        length *= values.shape[dim]
    return values.reshape(-1, length)


def _of_columns(values: torch.Tensor) -> torch.Tensor:
    """For each element some multiple of what is typical of its place in the last dimension: columns of another kind, as
    scores beside coordinates, are not excused by the others."""
    columns = values.reshape(-1, values.shape[-1] if values.dim() else 1)
    typical = _typical(columns.t()).t() if len(columns) > 1 else torch.full_like(columns, math.inf)
    return (64 * typical.where(typical > 0, math.inf)).expand_as(columns).reshape(values.shape)


def _typical(rows: torch.Tensor) -> torch.Tensor:
    """For each row of a matrix the magnitude that the rounding of its sums may follow, as a column.

    It is 8 times the lower quartile of the magnitudes, which for normally distributed numbers is between two and three
    standard deviations; or the lower median of less than 8 numbers. Zeros do not count, nor does what a sixteenth of
    the row has in common (a mask). Of long rows a part is looked at.
    """
    step = -(-rows.shape[1] // _MOST_SORTED)
    sizes = rows[:, ::step].abs()
    missing = float("inf")
    ordered = sizes.where(sizes > 0, missing).sort(1).values
    distance = max(ordered.shape[1] // 16, 3)
    if ordered.shape[1] > distance:
        same = ordered[:, distance:] == ordered[:, :-distance]
        common = torch.zeros_like(ordered, dtype=torch.bool)
        common[:, distance:] |= same
        common[:, :-distance] |= same
        ordered = ordered.where(~common, missing).sort(1).values
    counts = ordered.isfinite().sum(1, keepdim=True)
    is_few = counts < _FEW
    place = torch.where(is_few, (counts - 1) // 2, (counts - 1) // 4).clamp(min=0)
    found = ordered.gather(1, place) * torch.where(is_few, 1.0, 8.0)
    return found.where(counts > 0, 0.0)
