"""Makes an entry of a recording: which rows its outputs give, what it reads and writes, and what guards it."""

from collections.abc import Collection, Sequence
from itertools import repeat
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...backends.operators import storage_key, tensors_in
from ...errors import CaptureError
from ...reasons import Reason
from ...runtime.entry import CUDAGraphEntry, Workspaces
from ...runtime.flatten import is_tensor
from ...runtime.outputs import OutputRule, Outputs
from ...runtime.overlap import Spans
from ...sizes import Axis
from ..state.guards import StateGuard
from ..watch.operator_trace import OperatorTrace
from .attempt import CaptureAttempt
from .compare import check_aliases
from .eager_run import check_may_capture, roots_of
from .licence import Verification, kept, shown_of
from .outputs import check_rule, check_values, learn_output_rule, objects_in
from .piecewise import PiecewiseGraph
from .row_proof import RowsShown
from .run import Recording


def make_entry(
    attempt: CaptureAttempt, recording: Recording, operators: OperatorTrace, shown: RowsShown, started: float
) -> CUDAGraphEntry:
    """The entry around a recorded graph of these operators, whose capture was ``started`` then. Raises
    ``CaptureError`` if nobody could serve by it."""
    request, eager, warm_run, output = attempt.request, attempt.eager, attempt.warm_run, recording.outputs
    check_values(eager.opened, output)
    rule = _find_output_rule(attempt, output, shown)
    views = request.inputs.views(request.size)
    mutated = tuple(index for index, view in enumerate(views) if warm_run.writes_to(view))
    check_aliases(request, eager, mutated)
    if request.options.shares_outputs:
        output = tree_map_only(torch.Tensor, request.backend.weak_reference, output)
    buffers = request.buffer_storages()
    held = {key: tensor for key, tensor in warm_run.outside.items() if key not in buffers}
    arguments = {storage_key(value) for value in request.values if is_tensor(value)}
    like = eager.like
    guard = _make_guard(attempt, held.keys() | eager.effects.outside.keys()) if like is None else like.guard
    assert guard is not None
    workspaces = [held[key] for key in held.keys() - guard.storages - arguments]
    regions = [region for region in warm_run.regions if storage_key(region.target) not in buffers]
    written = [region.target for region in regions if not region.is_generator]  # its state is read as a copy
    policy = Verification.policies.get(request.options.verify, Verification)
    licence = policy(
        size=request.size,
        operators=operators,
        proof=shown.proof,
        traced={request.rows, request.size, *(rows for rows, _ in shown.answers)}
        if like is None
        else set(like.shown.traced),
        metadata=eager.find_metadata(request.values, guard) if like is None else like.shown.metadata,
        may_leave_effects=eager.effects.may_leave_effects
        or warm_run.may_leave_effects
        or (shown.proof is not None and shown.proof.is_word),
        bare=request.inputs.positions if guard.missing else (),
        batches=[kept(request.values) if like is not None or eager.recording is None else ()],
    )
    entry = CUDAGraphEntry(
        descriptor=request.descriptor,
        mode=request.mode,
        key=request.key,
        size=request.size,
        graph=recording.graph,
        pool=request.pool,
        backend=request.backend,
        inputs=request.inputs,
        outputs=Outputs(
            output,
            rule,
            recording.is_own,
            request.options.outputs,
            request.pool,
            _which_are_new(attempt, recording.is_own),
            recording.firsts,
            recording.given,
            objects_in(output),
        ),
        mutated=mutated,
        written=Spans(written) if regions else None,
        held=tuple(held.values()),
        licence=licence,
        workspaces=Workspaces(workspaces) if workspaces else None,
        guard=guard if request.options.guard_weights else None,
        uses_rng=warm_run.uses_rng,
        signature=request.signature,
        call=request.call,
        example=request.values_with(repeat(None)),
        capture_time_ms=(request.clock() - started) * 1e3,
    )
    _watch_breaks(attempt, entry)
    return entry


def grow_guard(attempt: CaptureAttempt, entry: CUDAGraphEntry) -> None:
    """Guard what code reads that ran for this batch, and that the entry's guard does not know."""
    eager, guard, shown = attempt.eager, entry.guard, shown_of(entry)
    if not isinstance(guard, StateGuard) or not (eager.trace.is_deaf or guard.notes.lacks(eager.trace)):
        return
    check_may_capture(attempt.request, eager)
    eager.trace.absorb(guard.notes)
    grown = _make_guard(attempt, {*map(storage_key, entry.held), *guard.storages, *eager.effects.outside})
    entry.guard_by(grown)
    if shown is not None:
        shown.metadata = eager.find_metadata(attempt.request.values, grown, shown.metadata)
    _watch_breaks(attempt, entry)


def _watch_breaks(attempt: CaptureAttempt, entry: CUDAGraphEntry) -> None:
    if not isinstance(entry.graph, PiecewiseGraph):
        return
    views = attempt.request.inputs.views(attempt.request.size)
    unwritten = [view for index, view in enumerate(views) if index not in entry.mutated]
    entry.graph.watch(unwritten)
    if attempt.eager.trace.shares_with_breaks():
        entry.graph.is_unchanged = entry.is_current


def _make_guard(attempt: CaptureAttempt, used: Collection[int]) -> StateGuard:
    """What of the callable's state the runs have read. Raises ``CaptureError`` if nobody can compare it."""
    request = attempt.request
    guard = StateGuard(roots_of(request), attempt.eager.trace, used)
    if guard.unguarded and request.options.guard_weights:
        raise CaptureError(f"the call reads state that no guard can compare: {guard.unguarded}", Reason.STATE_UNSEEN)
    return guard


def _which_are_new(attempt: CaptureAttempt, is_own: Sequence[bool]) -> Sequence[bool]:
    """For each output tensor that is not the graph's, whether the call makes it; what a peer says where the call's run
    is like one that was walked."""
    request, walk = attempt.request, attempt.eager.trace.walk
    if attempt.eager.like is not None:
        peer = next((peer for peer in request.peers if not peer.is_released), None)
        return peer.outputs.is_new if peer is not None else [not own for own in is_own]
    outputs = tensors_in(attempt.eager.opened)
    return [not own and not walk.has_met(output) for own, output in zip(is_own, outputs, strict=True)]


def _find_output_rule(attempt: CaptureAttempt, output: Any, shown: RowsShown) -> OutputRule:
    """Which dimensions of ``output``, which a run of ``size`` rows gave, follow the batch: what is known of other
    graphs with the proof; else what the run shows whose rows were followed, by its labels or by its shapes. Where there
    is no run of another batch, none is padded.

    Raises ``CaptureError`` if the outputs cannot be cut to the real rows, or follow the batch differently than in
    other sizes.
    """
    request, eager, proof = attempt.request, attempt.eager.opened, shown.proof
    axes, rows = request.inputs.axes, request.rows
    rule = proof.output_rule if proof is not None else None
    if rule is None and shown.verdict is not None:
        rule = _rule_of(attempt, shown)
    if rule is None:
        others = [(request.size, output), *shown.answers]
        rule = learn_output_rule(axes, eager, rows, others)
        alike = (axis for axis in axes if all(axis.of(other) == axis.of(rows) for other, _ in others))
        if proof is not None and any(axis.of(rows) > 1 for axis in alike):
            text = "no run of another batch shows which dimensions of the outputs follow it; have a size for it"
            unknown = Reason.OUTPUT_ROWS_UNKNOWN, text
            proof.against_rows = proof.against_rows or unknown
            proof.along = dict.fromkeys(axes[1:], unknown) | proof.along
    check_rule(rule, axes, eager, rows, output, request.size)
    if proof is not None:
        proof.output_rule = rule
    return rule


def _rule_of(attempt: CaptureAttempt, shown: RowsShown) -> OutputRule | None:
    """The rule that the labels of the outputs tell of the run whose rows were followed; None if they do not tell it."""
    axes, follows = attempt.request.inputs.axes, list[tuple[tuple[int, int, Axis], ...]]()
    assert shown.verdict is not None
    rows, outputs = shown.answers[-1]
    for tensor, dims in zip(tensors_in(outputs), shown.verdict.outputs, strict=True):
        if dims is None or any(len(followed) > 1 for followed in dims):
            return None
        along = [(dim, axes[followed[0]]) for dim, followed in enumerate(dims) if followed]
        follows.append(tuple((dim, tensor.shape[dim] // axis.of(rows), axis) for dim, axis in along))
    rule = OutputRule(tuple(follows))
    try:
        check_rule(rule, axes, attempt.eager.opened, attempt.request.rows, outputs, rows)
    except CaptureError:
        return None
    return rule
