"""The one capture path: run eagerly, undo, warm up, capture, replay, compare, put back one execution's effects.

    eager run on the real rows (watched)            -> the caller's answer, and everything it writes
    undo; load the static inputs; warm up (watched) -> everything the padded run writes
    undo; capture (undo, if recording executes)     -> the graph
    replay; compare outputs and written state with eager's
    undo; do eager's writes again; put the generator where eager left it

``verify_entry`` does the same without the capture, for the next, different batch: a value that the capture froze agrees
with eager on the first batch only. If anything fails after the eager run, the caller still has eager's answer.

Note [kernels that round otherwise]
    Libraries choose a kernel by the number of rows, and each adds up in an order of its own. A deep model in bfloat16
    multiplies such differences until an element is further from eager than usual. A graph gives what eager gives for a
    batch of the graph's size, as the comparison of a full batch and the proof of the rows have shown. So in such narrow
    types a padded batch may be four times as far from eager, if eager dispatches the same operators for it, at the same
    places of the same memory and with the same constants: then no branch of the callable makes the difference. Where
    the user gave a tolerance, that alone counts.

While torch's profiler is on, each capture and each comparison is a range of it: ``capture`` or ``verify``.
"""

from functools import partial

from ..backends.tracing import profiler_range
from ..call.rules import graph_name
from ..errors import CaptureError, GraphDispatchError, VerificationError, error_of_signal
from ..memory.entry import CUDAGraphEntry
from ..memory.labels import Labels
from ..memory.outputs import check_values
from ..memory.proof import RowProof
from ..memory.windows import WINDOWS
from ..modes import CUDAGraphMode, EntryState
from ..reasons import Reason
from .attempt import CaptureAttempt
from .collector import paused_collector
from .compare import check_padding_writes, check_replay
from .eager_run import EagerRun, check_may_capture, is_known, run_eagerly, run_known
from .effects import EffectRecorder, Region
from .gain import measure_gain, seconds_of
from .make_entry import find_program, grow_guard, make_entry, runs_program
from .probes import BY_RULE
from .prover import RowProver
from .recording import record
from .request import CaptureRequest, CaptureResult, failed_result

_UNLIKE = "the call did something that calls of other sizes did not do; the next one is watched"


def capture_entry(request: CaptureRequest) -> CaptureResult:
    """Run the call eagerly and capture it; see the module's text. Holds the pool's lock throughout.

    An error of the callable on the real rows passes through unchanged. Apart from that only these are raised:
    ``KeyboardInterrupt`` and its like, and what a handler of a signal raises, after everything was put back;
    ``DeviceLostError`` if nothing can be served any more; ``CaptureError`` if what was written cannot be put back.
    """
    return _in_window(request, None)


def verify_entry(request: CaptureRequest, entry: CUDAGraphEntry) -> CaptureResult:
    """Run the call eagerly and compare the entry's replay with it. Raises as ``capture_entry`` does.

    Afterwards ``entry.state`` is ``VERIFIED`` or ``FAILED``; or still ``CAPTURED``, if this was the batch of the
    capture once more.
    """
    is_other = entry.state is not EntryState.CAPTURED or entry.differs(request.values)
    result = _in_window(request, entry)
    if result.entry is None:
        entry.failed()
    elif is_other and entry.is_known and not entry.depends_on_padding(request.rows):
        # Otherwise only the padding was looked at, or the call did something new, and nothing was compared.
        entry.passed()
    return result


def _in_window(request: CaptureRequest, known: CUDAGraphEntry | None) -> CaptureResult:
    """Verify the entry ``known``, or capture one if there is none, while nobody else writes what the call reaches."""
    with WINDOWS.capturing(request.reach, request.pool) as is_alone:
        if is_alone:
            span = profiler_range("capture" if known is None else "verify", graph_name(request.call.fn, request.key))
            # The walks over Python state make many objects, for which the collector would look at all memory.
            pause = paused_collector(request.options.gc_disable)
            with pause, request.pool.lock, request.backend.watched(), span:
                request.pool.order_after_last_use()
                return _run(request, known)
    answer = None
    if request.keep_effects:
        run = WINDOWS.begin(lambda: request.reach)
        try:
            answer = request.call(request.values)
        finally:
            WINDOWS.end(run)
    return CaptureResult(answer, None, Reason.STATE_SHARED, Reason.STATE_SHARED.text)


def _run(request: CaptureRequest, known: CUDAGraphEntry | None) -> CaptureResult:
    """The eager run; then the capture or the comparison, after which one execution's effects are put back."""
    eager, seconds = _run_eagerly(request, known)
    if isinstance(eager, CaptureResult):
        return eager
    attempt = CaptureAttempt(request, eager)
    try:
        if known is None:
            return CaptureResult(eager.answer, _capture(attempt), Reason.CAPTURED_NOW, answer_s=seconds)
        _verify(attempt, known)
        if known.proof is not None and known.depends_on_padding(request.rows):
            return CaptureResult(eager.answer, known, known.proof.reason, known.proof.text)
        return CaptureResult(eager.answer, known, Reason.VERIFIED_NOW, answer_s=seconds)
    except Exception as error:
        if (raised := error_of_signal(error)) is not None:
            raise raised from raised.__cause__
        if known is not None:
            known.failed()
        return failed_result(request, eager.answer, error, attempt.stage)
    finally:
        attempt.restore()


def _run_eagerly(request: CaptureRequest, known: CUDAGraphEntry | None) -> tuple[EagerRun | CaptureResult, float]:
    """The eager run of the call, or what comes of the call if no graph can follow; and the seconds of a plain run.

    It is not watched again where that of a graph of the callable only computed. In a prewarm it is the warm-up, too.
    """
    alike = next((one for one in (request.peers if known is None else [known]) if is_known(request, one)), None)
    plain = run_known(request, alike) if alike is not None else None
    if alike is not None and plain is not None:
        answer, seconds, run = plain
        alike.is_known = run is not None
        if run is not None:
            return run, seconds
        reason, detail = (Reason.CAPTURE_WAITS, _UNLIKE) if known is None else (Reason.VERIFIED_NOW, "")
        return CaptureResult(answer, known, reason, detail, answer_s=seconds), seconds
    is_for_graph = known is None and not request.keep_effects
    eager = run_eagerly(request, on_static_inputs=is_for_graph and not request.is_padded)
    if known is not None:
        known.is_known = True
    return eager, 0.0


def _capture(attempt: CaptureAttempt) -> CUDAGraphEntry:
    """Warm up, record and compare; returns a complete entry.

    Raises ``CaptureError``, ``VerificationError`` or ``ReplayError`` if there can be no graph, and whatever the
    callable raises in one of these runs.
    """
    request, eager = attempt.request, attempt.eager
    check_may_capture(request, eager)
    started = request.clock()
    for _ in range(request.options.warmup_iterations - eager.warms_up):
        attempt.warm_up(keeps_operators=True)
    program = find_program(attempt)
    recording = record(attempt, is_known=any(peer.program is program for peer in request.peers))
    entry = None
    try:
        entry = make_entry(attempt, recording, program)
        entry.capture_time_ms = (request.clock() - started) * 1e3
        if request.options.verify:
            # A caller's call leaves the proof to the first padded one behind it.
            _compare(attempt, entry, proves=not request.keep_effects)
            measure_gain(attempt, entry)
        else:
            entry.trust()
    except BaseException:
        (recording.graph.reset if entry is None else entry.release)()
        raise
    return entry


def _verify(attempt: CaptureAttempt, entry: CUDAGraphEntry) -> None:
    """Compare the entry's replay on this batch with the eager run. Raises as ``_capture`` does."""
    request, eager = attempt.request, attempt.eager
    eager.draws |= entry.uses_rng  # as the replay will, whatever branch eager took
    check_may_capture(request, eager)
    attempt.lent = [Region(tensor, tensor.clone()) for tensor in entry.outputs.lent(request.size)]
    writes = entry.written is not None or any(not entry.inputs.specs[i].spans for i in entry.mutated)
    writes = writes or bool(eager.effects.opaque)
    if writes or entry.mode is not CUDAGraphMode.FULL:  # else it writes its rows at most
        attempt.warm_up()
    check_values(eager.opened, entry.output)
    try:
        _compare(attempt, entry, proves=request.is_padded)
    except (CaptureError, VerificationError) as error:
        # A graph of full batches is not wrong because padding changes the real rows of this one.
        found = _find_dependence(attempt, entry, error) if request.is_padded and entry.proof is None else None
        if found is None:
            raise
        entry.program.proof = found


def _compare(attempt: CaptureAttempt, entry: CUDAGraphEntry, *, proves: bool) -> None:
    """Replay this batch from where the eager run began, compare, and note in the entry what the batch tested. With
    ``proves`` find out whether rows are independent, if that is not known."""
    request, eager = attempt.request, attempt.eager
    attempt.start_over(f"comparing the replay of {request.rows} rows with eager")
    prover = RowProver(attempt, entry)
    proves = proves and prover.is_wanted
    padding = BY_RULE if proves else prover.further_padding()
    load_s = seconds_of(request, lambda: attempt.load(request.rows, padding))
    alike = request.inputs.alike(request.size) if proves else {}
    attempt.replay_s = load_s + seconds_of(request, lambda: attempt.replay(entry))
    if eager.effects.uses_rng is not entry.uses_rng and not request.is_piecewise:
        what = "draw no random numbers" if entry.uses_rng else "draw random numbers"
        raise VerificationError(f"{request.rows} rows {what}, unlike the graph of {request.size}")
    check = partial(check_replay, request, eager, entry, partial(_runs_program, attempt, entry))
    try:
        check()
    except VerificationError as error:
        if padding is BY_RULE:
            raise
        attempt.replay_again(entry, f"comparing the replay of {request.rows} rows with eager once more")
        check()
        entry.program.proof = RowProof(False, True, padding.name, str(error))
    if request.is_padded:
        check_padding_writes(request, eager, attempt.warm_run.regions)
    if proves:
        if not prover.is_ample:
            entry.program = entry.program.apart()
        entry.program.proof = prover.prove(alike).after(entry.proof)
    if request.tells_numbers():
        grow_guard(attempt, entry)
        entry.compared.note(request.rows, request.size)
    if entry.metadata is not None:
        entry.metadata.note(request.values)


def _runs_program(attempt: CaptureAttempt, entry: CUDAGraphEntry) -> bool:
    """Whether eager dispatches the graph's operators, on the same memory, for the real rows alone. Then what a replay
    gives lies there again."""
    request = attempt.request
    arguments = request.arguments()
    labels = Labels.of_arguments(arguments, request.inputs.specs)
    effects = EffectRecorder(request.options.state_limit_bytes, strict=True, labels=labels)
    attempt.start_over(f"asking which operators {request.rows} rows run")
    attempt.run_apart(effects, request.values_with(arguments), effects.note_outputs)
    is_same = runs_program(entry, effects, arguments, request.rows)
    if is_same:
        attempt.replay_again(entry, f"comparing the replay of {request.rows} rows with eager once more")
    return is_same


def _find_dependence(attempt: CaptureAttempt, entry: CUDAGraphEntry, error: GraphDispatchError) -> RowProof | None:
    """What shows that real rows depend on padding, after a comparison of the first padded batch failed; or None."""
    request = attempt.request
    if isinstance(error, CaptureError):
        is_cause = error.reason is Reason.PADDING_WRITES_STATE
        return RowProof(False, True, BY_RULE.name, str(error), error.reason) if is_cause else None
    attempt.start_over(f"asking whether {request.rows} rows depend on padding")
    attempt.load()
    alike = request.inputs.alike(request.size)
    attempt.replay(entry)
    proof = RowProver(attempt, entry).prove(alike)
    return None if proof.independent else proof
