"""The one capture path: run eagerly, undo, warm up, capture, replay, compare, put back one execution's effects.

    eager run on the real rows (watched)            -> the caller's answer, and everything it writes
    undo; load the static inputs; warm up (watched) -> everything the padded run writes
    undo; capture (undo, if recording executes)     -> the graph
    replay; compare outputs and written state with eager's
    undo; do eager's writes again; put the generator where eager left it

``verify_entry`` does the same without the capture, for the next, different batch: a value that the capture froze agrees
with eager on the first batch only. If anything fails after the eager run, the caller still has eager's answer.

While torch's profiler is on, each capture and each comparison is a range of it: ``capture`` or ``verify``.
"""

from ..backends.modes import profiler_range
from ..call.rules import graph_name
from ..memory.entry import CUDAGraphEntry
from ..memory.windows import WINDOWS
from ..modes import EntryState
from ..reasons import Reason
from .attempt import CaptureAttempt
from .collector import paused_collector
from .eager_run import EagerRun, load_static_inputs, run_eagerly
from .known_run import is_known, run_known
from .request import CaptureRequest, CaptureResult, failed_result

__all__ = ["capture_entry", "verify_entry"]


_UNLIKE = "the call did something that calls of other sizes did not do; the next one is watched"


def capture_entry(request: CaptureRequest) -> CaptureResult:
    """Run the call eagerly and capture it; see the module's text. Holds the pool's lock throughout.

    An error of the callable on the real rows passes through unchanged. Apart from that only these are raised:
    ``KeyboardInterrupt`` and its like, after everything was put back; ``DeviceLostError`` if nothing can be served any
    more; ``CaptureError`` if what was written cannot be put back.
    """
    return _attempt(request, None)


def verify_entry(request: CaptureRequest, entry: CUDAGraphEntry) -> CaptureResult:
    """Run the call eagerly and compare the entry's replay with it. Raises as ``capture_entry`` does.

    Afterwards ``entry.state`` is ``VERIFIED`` or ``FAILED``; or still ``CAPTURED``, if this was the batch of the
    capture once more.
    """
    is_other = entry.state is not EntryState.CAPTURED or entry.differs(request.values)
    result = _attempt(request, entry)
    if result.entry is None:
        entry.state = EntryState.FAILED
    elif is_other and not entry.depends_on_padding(request.rows):  # else only the padding was looked at
        entry.state, entry.warm_batch = EntryState.VERIFIED, ()
    return result


def _attempt(request: CaptureRequest, known: CUDAGraphEntry | None) -> CaptureResult:
    """Run the call eagerly, then verify the entry ``known``, or capture one if there is none."""
    with WINDOWS.capturing(request.reach, request.pool) as is_alone:
        if is_alone:
            return _attempt_alone(request, known)
    answer = None
    if request.keep_effects:
        run = WINDOWS.begin(lambda: request.reach)
        try:
            answer = request.call(request.values)
        finally:
            WINDOWS.end(run)
    return CaptureResult(answer, None, Reason.STATE_SHARED, Reason.STATE_SHARED.text)


def _attempt_alone(request: CaptureRequest, known: CUDAGraphEntry | None) -> CaptureResult:
    span = profiler_range("capture" if known is None else "verify", graph_name(request.call.fn, request.key))
    # The walks over Python state make many short-lived objects, which would have the collector look at all memory.
    pause = paused_collector(request.options.gc_disable)
    with pause, request.pool.lock, request.backend.watched(), span:
        request.pool.order_after_last_use()
        candidates = request.peers if known is None else [known]
        alike = next((entry for entry in candidates if is_known(request, entry)), None)
        eager: EagerRun | CaptureResult
        seconds = 0.0
        if alike is not None:
            answer, seconds, run = run_known(request, alike, captures=known is None)
            alike.is_known = run is not None
            done = (Reason.CAPTURE_WAITS, _UNLIKE) if known is None else (Reason.VERIFIED_NOW, "")
            eager = run or CaptureResult(answer, known, *done, answer_s=seconds)
        else:
            in_place = known is None and not request.keep_effects and not request.is_padded
            failed = load_static_inputs(request) if in_place else None
            eager = failed or run_eagerly(request, on_static_inputs=in_place)
            if known is not None:
                known.is_known = True
        if isinstance(eager, CaptureResult):
            return eager
        attempt = CaptureAttempt(request, eager)
        try:
            if known is None:
                return CaptureResult(eager.answer, attempt.capture(), Reason.CAPTURED_NOW, answer_s=seconds)
            eager.draws |= known.uses_rng  # as the replay will, whatever branch eager took
            attempt.verify(known)
            if known.proof is not None and known.depends_on_padding(request.rows):
                return CaptureResult(eager.answer, known, known.proof.reason, known.proof.text)
            return CaptureResult(eager.answer, known, Reason.VERIFIED_NOW, answer_s=seconds)
        except Exception as error:
            if known is not None:
                known.state = EntryState.FAILED
            return failed_result(request, eager.answer, error, attempt.stage)
        finally:
            attempt.restore()
