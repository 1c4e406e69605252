"""Times an eager run beside a replay: the runtime judges by both which batches a graph serves (``runtime/gain.py``)."""

from collections.abc import Callable
from contextvars import copy_context

from ...modes import CUDAGraphMode
from ...runtime.entry import CUDAGraphEntry
from ...runtime.protocols import CaptureRequest
from ...stats import Gain
from .attempt import CaptureAttempt


def measure_gain(attempt: CaptureAttempt, entry: CUDAGraphEntry) -> None:
    """Time an eager run of a full batch, and note it with the time of the replay that was compared.

    Nothing is timed where nobody judges by it, or if the call writes what is not its own or draws numbers, since it is
    run once more for its time alone.
    """
    request, eager = attempt.request, attempt.eager
    leaves_effects = eager.effects.regions or eager.draws or entry.writes_outside
    if not (request.is_timed and request.backend.is_settled) or entry.mode is not CUDAGraphMode.FULL or leaves_effects:
        return
    attempt.start_over("timing an eager run beside a replay")
    attempt.runs_code = True
    attempt.load()
    values, within = request.static_values(), copy_context().run  # nobody could unset a context variable
    eager_s = seconds_of(request, lambda: within(request.call, values))
    entry.note_gain(Gain(eager_s * 1e3, attempt.replay_s * 1e3))


def seconds_of(request: CaptureRequest, run: Callable[[], object]) -> float:
    """How long a run takes until the current stream has done its work.

    To wait for the whole device is invalid while any stream is being captured, which another thread may do.
    """
    stream = request.backend.current_stream()
    stream.synchronize()
    started = request.clock()
    run()
    stream.synchronize()
    return request.clock() - started
