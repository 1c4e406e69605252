"""The capturer of the proof: run eagerly, undo, warm up, capture, replay, compare, put back one execution's effects.

    eager run on the real rows (watched)            -> the caller's answer, and everything it writes
    undo; load the static inputs; warm up (watched) -> everything the padded run writes, and its operators
    undo; capture (undo, if recording executes)     -> the graph
    undo; run a few rows, and follow them           -> whether rows are independent (``row_proof.py``)
    replay; compare outputs and written state with eager's
    undo; do eager's writes again; put the generator where eager left it

Where a capture executes what it records, one watched run is the warm-up and the recording. Of compiled code they are
two: what compiles again may read on the host, which a recording refuses.

A check does the same without the capture, for another batch: a value that the capture froze agrees with eager on the
first batch only.

A graph of a further size is proven by the run that proved the first one. Python takes the same path for it, so its code
is not traced again: it is warmed up, recorded and compared.

Where nobody waits for eager's answer and a capture executes what it records, one watched run is the eager run, the
warm-up and the recording. Another one is made, and watched closely, where the code may do something else if nobody
records it, or is not what it was for another size (``_watched_enough``). A value that changes from run to run agrees
with itself then: so the first graph of a prewarm serves no batch, not even that of its capture, before it agreed with
another run. A value that changes with the size is among the numbers of the operators: where these are not those of a
graph that agreed with eager on two batches, a second batch is compared.

Note [kernels that round otherwise]
    Libraries choose a kernel by the number of rows, and each adds up in an order of its own. A deep model in bfloat16
    multiplies such differences until an element is further from eager than usual. That padding is harmless follows from
    the operators, and the comparison of a padded batch is an alarm only. So in such narrow types a padded batch may be
    four times as far from eager. Where the user gave a tolerance, that alone counts.

While torch's profiler is on, each capture and each comparison is a range of it: ``capture`` or ``verify``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...backends.operators import copy_with_gaps
from ...backends.tracing import profiler_range
from ...errors import CaptureError, VerificationError, error_of_signal
from ...modes import CUDAGraphMode, EntryState
from ...reasons import Reason
from ...runtime.entry import CUDAGraphEntry
from ...runtime.protocols import Capturer, CaptureRequest, CaptureResult, Guard
from ...runtime.rules import graph_name
from ...runtime.windows import WINDOWS, paused_collector
from ..state.guards import StateGuard
from ..watch.effects import EffectRecorder, Region
from ..watch.operator_trace import OperatorTrace
from .attempt import CaptureAttempt, seconds_of
from .compare import check_replay, check_writes
from .eager_run import WatchedTooLittleError, check_may_capture, queries_capture, run_eagerly, runs_compiled
from .failures import advice, failed_result
from .lengths import replay_other_padding
from .licence import ArgumentMetadata, LikeGraph, Verification, shown_of
from .make_entry import grow_guard, make_entry
from .outputs import check_values
from .row_proof import RowsShown, proof_of, prove_rows, speak_for_batch

_UNLIKE = "the call did not do what calls of other sizes did; the next one is watched closely"


class ProvingCapturer(Capturer):
    """Watches the call, proves its rows and its path, records it, and compares each graph with eager. Has no state."""

    may_pad_otherwise = True

    def reach(self, fn: Callable[..., Any], *, by_names: bool = False) -> Guard:
        """As ``Capturer.reach``."""
        return StateGuard([fn], by_names=by_names)

    def capture(self, request: CaptureRequest) -> CaptureResult:
        """As ``Capturer.capture``; see the module's text. Holds the pool's lock throughout.

        An error of the callable on the real rows passes through unchanged. Besides it only these are raised:
        ``KeyboardInterrupt`` and its like, and what a handler of a signal raises, after everything was put back;
        ``DeviceLostError`` if nothing can be served any more; ``CaptureError`` if what was written cannot be put back.
        """
        return _in_window(request, None)

    def check(self, request: CaptureRequest, entry: CUDAGraphEntry) -> CaptureResult:
        """As ``Capturer.check``. Raises as ``capture`` does.

        Afterwards ``entry.state`` is ``VERIFIED`` or ``FAILED``; or still ``CAPTURED``, if this was the batch of the
        capture once more, or if its padding alone was looked at.
        """
        is_other = entry.state is not EntryState.CAPTURED or entry.licence.differs(request.values)
        was_failed = entry.state is EntryState.FAILED
        result = _in_window(request, entry)
        if result.entry is None:
            entry.failed()
        elif is_other and result.reason is Reason.VERIFIED_NOW and (request.counts_as_second or was_failed):
            entry.licence.agreed(entry, request.values)
        return result


def _in_window(request: CaptureRequest, entry: CUDAGraphEntry | None) -> CaptureResult:
    """Verify ``entry``, or capture one if there is none, while nobody else writes what the call reaches."""
    with WINDOWS.capturing(request.reach, request.pool) as is_alone:
        if is_alone:
            span = profiler_range("capture" if entry is None else "verify", graph_name(request.call.fn, request.key))
            # The walks over Python state make many objects, for which the collector would look at all memory.
            pause = paused_collector(request.options.gc_disable)
            with pause, request.pool.lock, request.backend.watched(), span:
                request.pool.order_after_last_use()
                return _watched_enough(request, entry)
    answer = None
    if request.keep_effects:
        run = object()
        try:
            WINDOWS.begin(run, lambda: request.reach)
            answer = request.call(request.values)
        finally:
            WINDOWS.end(run)
    return CaptureResult(answer, None, Reason.STATE_SHARED, Reason.STATE_SHARED.text)


def _watched_enough(request: CaptureRequest, entry: CUDAGraphEntry | None) -> CaptureResult:
    """The capture or comparison. The code of a run that is like a graph's is not traced, and a run that is made for the
    graph's sake is recorded at once, where that is enough. If the run shows that it was not, it is made again and
    watched closely; or, if it was the caller's own, the next one is."""
    like = _like(request, entry)
    records = _records_warm_ups(request) and (like is None or not queries_capture(like.guard.notes))
    result = _run(request, entry, like, records=records)
    if result.reason is not Reason.CAPTURE_WAITS:
        return result
    if like is not None and like.shown.proof is not None:
        like.shown.proof.is_doubted = True
    return result if request.keep_effects else _run(request, entry, None, records=False)


def _run(
    request: CaptureRequest, entry: CUDAGraphEntry | None, like: LikeGraph | None, *, records: bool
) -> CaptureResult:
    """The eager run; then the capture or the comparison, after which one execution's effects are put back."""
    is_for_graph = entry is None and not (request.keep_effects or request.has_gaps or request.is_padded)
    eager = run_eagerly(
        request,
        like,
        on_static_inputs=is_for_graph and (records or not _records_warm_ups(request)),
        records=is_for_graph and records,
        may_refuse=request.keep_effects and entry is None and like is None,
    )
    if isinstance(eager, CaptureResult):
        return eager
    attempt = CaptureAttempt(request, eager)
    try:
        if entry is None:
            return CaptureResult(eager.answer, _capture(attempt), Reason.CAPTURED_NOW)
        if (against := _verify(attempt, entry) or entry.licence.against_padding(request.rows)) is not None:
            return CaptureResult(eager.answer, entry, *against)
        return CaptureResult(eager.answer, entry, Reason.VERIFIED_NOW)
    except Exception as error:
        if (raised := error_of_signal(error)) is not None:
            raise raised from raised.__cause__
        if entry is not None:
            entry.failed()
        return failed_result(request, eager.answer, error, attempt.stage)
    finally:
        attempt.restore()


def _like(request: CaptureRequest, entry: CUDAGraphEntry | None) -> LikeGraph | None:
    """A graph that the call's run is like, by what is proven of its rows: so the run's code need not be traced
    again."""
    for one in request.peers if entry is None else [entry]:
        shown, guard = shown_of(one), one.guard
        if shown is None or shown.proof is None or not isinstance(guard, StateGuard):
            continue
        proof, is_plain = shown.proof, one.mode is CUDAGraphMode.FULL and not shown.operators.has_regions
        if not is_plain or proof.is_doubted or one.outputs.objects is not None:
            continue
        if one.state is EntryState.FAILED or shown.misfit(request.values):
            continue
        is_shown = request.rows == one.size or (
            proof.speaks_for(request.rows, request.size) and proof.speaks_for(request.size, request.size)
        )
        if is_shown and shown.has_path(request.rows) and shown.has_path(request.size):
            return LikeGraph(shown, guard)
    return None


def _records_warm_ups(request: CaptureRequest) -> bool:
    """Whether one run is the warm-up and the recording, unless it runs compiled code: see the module's text."""
    is_plain = not request.is_piecewise and request.options.warmup_iterations <= 1
    return request.backend.capture_executes and is_plain


def _capture(attempt: CaptureAttempt) -> CUDAGraphEntry:
    """Warm up, prove, record and compare; returns a complete entry.

    Raises ``CaptureError``, ``VerificationError`` or ``ReplayError`` if there can be no graph, and whatever the
    callable raises in one of these runs. ``WatchedTooLittleError``: the code of the call's run was to be like that of
    another graph, and is not, or it may do something else where nobody records it.
    """
    request, eager = attempt.request, attempt.eager
    recording, entry = eager.recording, None
    try:
        check_may_capture(request, eager)
        if recording is not None and eager.may_do_otherwise:
            raise WatchedTooLittleError("the call may do something else where nobody records it")
        started = request.clock() if recording is None else eager.started
        if recording is None and _records_warm_ups(request) and not runs_compiled(eager.trace):
            recording = attempt.record_at_once()
        elif recording is None:
            for _ in range(request.options.warmup_iterations - eager.warms_up):
                attempt.warm_up()
        operators = attempt.warm_run.dispatched
        if request.has_gaps:
            _check_gaps(attempt, operators)
        proof = proof_of(request, operators)
        if eager.like is not None and proof is not eager.like.shown.proof:
            raise WatchedTooLittleError(_UNLIKE)
        recording = recording or attempt.record()
        shown = RowsShown(proof) if proof is not None else prove_rows(attempt, operators)
        entry = make_entry(attempt, recording, operators, shown, started)
        if request.options.verify:
            if entry.licence.against_padding(request.rows) is None:  # else a full batch is compared when one comes
                _compare_or_refuse(attempt, entry)
            policy = shown_of(entry)
            is_enough = policy is not None and policy.wanted < 2 and policy.against_padding(request.rows) is None
            if is_enough or _has_agreed_before(request, operators):
                entry.licence.agreed(entry)
            attempt.measure_gain(entry)
        else:
            entry.trust()
    except BaseException:
        if entry is not None:
            entry.release()
        elif recording is not None:
            recording.graph.reset()
        raise
    return entry


def _has_agreed_before(request: CaptureRequest, operators: OperatorTrace) -> bool:
    """Whether a graph of the same operators, which compute with the same numbers, has agreed on two batches: a value
    that was frozen would be among the numbers. Nobody sees the operators of compiled code."""
    peers = (shown_of(peer) for peer in request.peers if peer.state is EntryState.VERIFIED)
    return not operators.has_regions and any(operators.is_like(one.operators) for one in peers if one is not None)


def _verify(attempt: CaptureAttempt, entry: CUDAGraphEntry) -> tuple[Reason, str] | None:
    """Compare the entry's replay on this batch with the eager run; or why it cannot serve such a call. Raises as
    ``_capture`` does."""
    request, eager, shown = attempt.request, attempt.eager, shown_of(entry)
    eager.draws |= entry.uses_rng  # as the replay will, whatever branch eager took
    check_may_capture(request, eager)
    attempt.lent = [Region(tensor, tensor.clone()) for tensor in entry.outputs.lent(request.size)]
    writes = entry.written is not None or any(not entry.inputs.specs[i].spans for i in entry.mutated)
    writes = writes or bool(eager.effects.opaque)
    if writes or entry.mode is not CUDAGraphMode.FULL:  # else it writes its rows at most
        attempt.warm_up()
    _compare_or_refuse(attempt, entry)
    metadata = shown.metadata if shown is not None else None
    if metadata is None or metadata.has_compared(request.values) or not metadata.refuses(request.values):
        return None
    return Reason.STATE_UNSEEN, metadata.text


def _note_call(attempt: CaptureAttempt, shown: Verification, metadata: ArgumentMetadata) -> None:
    """Note a call of whose arguments the code reads more than values: whether it dispatches the operators of the graph
    for them. That one batch agrees does not tell: zeros do whatever they are multiplied by."""
    request = attempt.request
    if metadata.has_compared(request.values) or shown.operators.has_regions:
        metadata.note(request.values)
        return
    stage, values, arguments = "running on the call's own arguments", request.values, request.arguments()
    found = _run_of(attempt, stage, values, arguments)
    # Runs that use other memory each time, as that of new arrays, are like no other.
    is_shown = found.is_like(shown.operators) or not found.is_like(_run_of(attempt, stage, values, arguments))
    (metadata.note if is_shown else metadata.note_unlike)(request.values)


def _run_of(
    attempt: CaptureAttempt, stage: str, values: Sequence[Any], arguments: Sequence[torch.Tensor]
) -> OperatorTrace:
    """The operators of a run on these values, of which nothing stays."""

    def read(effects: EffectRecorder, output: Any) -> OperatorTrace:
        effects.note_outputs(output)
        return effects.dispatched

    attempt.start_over(stage)
    return attempt.run_and_undo(attempt.request.call.in_new_containers(values), read, arguments)


def _check_gaps(attempt: CaptureAttempt, operators: OperatorTrace) -> None:
    """Raise ``CaptureError`` if the call dispatches other operators for its own arguments, which leave gaps in
    memory, than for the static inputs. The eager run cannot tell: code may look whether a stream is captured."""
    request = attempt.request
    arguments = [copy_with_gaps(argument) for argument in request.arguments()]  # each in memory of its own
    stage = "running on arguments with gaps in memory"
    if not _run_of(attempt, stage, request.values_with(arguments), arguments).is_like(operators):
        raise CaptureError(
            "the call does something else for an argument with gaps in memory than for one without; "
            "pass a contiguous one",
            Reason.CAPTURE_UNSAFE,
        )


def _compare_or_refuse(attempt: CaptureAttempt, entry: CUDAGraphEntry) -> None:
    """Compare a replay of this batch with eager, unless Python takes another path for it. What shows that padding
    alone is at fault is noted in the proof: a graph of full batches is not wrong for that."""
    request, shown, was_verified = attempt.request, shown_of(entry), entry.state is EntryState.VERIFIED
    proof = shown.proof if shown is not None else None
    if request.is_padded and shown and proof and not proof.speaks_for(request.rows, request.size):
        speak_for_batch(attempt, proof, shown.operators)
        if request.rows in proof.unlike:
            return
    check_values(attempt.eager.opened, entry.output)
    try:
        _compare(attempt, entry)
    except (CaptureError, VerificationError) as error:
        is_write = isinstance(error, CaptureError) and error.reason is Reason.PADDING_WRITES_STATE
        if not request.is_padded or proof is None:
            raise
        if isinstance(error, VerificationError):
            replay_other_padding(attempt, entry, proof)  # a length without a mask is no fault of the graph's
            if proof.objection(request.rows, request.size) is not None:
                return
        if not (is_write or was_verified):
            raise
        reason = Reason.PADDING_WRITES_STATE if is_write else Reason.VERIFICATION_FAILED
        proof.refused = reason, f"{error}{advice(request, error, reason)}"


def _compare(attempt: CaptureAttempt, entry: CUDAGraphEntry) -> None:
    """Replay this batch from where the eager run began, compare, and note in the entry what the batch has shown."""
    request, eager = attempt.request, attempt.eager
    attempt.start_over(f"comparing the replay of {request.rows} rows with eager")
    load_s = seconds_of(request, attempt.load)
    attempt.replay_s = load_s + seconds_of(request, lambda: attempt.replay(entry))
    if eager.effects.uses_rng is not entry.uses_rng and not request.is_piecewise:
        what = "draw no random numbers" if entry.uses_rng else "draw random numbers"
        raise VerificationError(f"{request.rows} rows {what}, unlike the graph of {request.size}")
    check_replay(request, eager, entry)
    check_writes(request, eager, entry, attempt.warm_run.regions)
    shown = shown_of(entry)
    if request.is_padded and shown is not None and shown.proof is not None and shown.wants_look(request.rows):
        replay_other_padding(attempt, entry, shown.proof)
        shown.proof.note_compared(request.rows, request.size)
    if eager.like is None:
        grow_guard(attempt, entry)
        if shown is not None:
            shown.traced.add(request.rows)
    if shown is not None and shown.metadata is not None:
        _note_call(attempt, shown, shown.metadata)
