"""Times an eager run beside a replay, and gives up a graph that gains nothing."""

from collections.abc import Callable
from contextvars import copy_context

from ...errors import CaptureError
from ...modes import CUDAGraphMode
from ...reasons import Reason
from ...runtime.entry import CUDAGraphEntry
from ...runtime.request import CaptureRequest
from ...stats import Gain
from .attempt import CaptureAttempt
from .eager_run import EagerRun

_PAIRS = 5
_LONG_PAIRS = 2
_LONG_PAIR_S = 0.2


def measure_gain(attempt: CaptureAttempt, entry: CUDAGraphEntry) -> None:
    """Time an eager run of a full batch beside the replay that was compared, where it can be timed, and note it.

    If the request judges gains and the replay seems slower, up to five eager runs and replays are timed in turns, or
    two pairs of more than 0.2 s. It is slower if each replay takes clearly longer than all eager runs but one.

    Raises ``CaptureError`` (``NO_GAIN``) for a graph that is judged slower.
    """
    request = attempt.request
    if not _may_be_timed(request, attempt.eager, entry):
        return
    attempt.start_over("timing an eager run beside a replay")
    attempt.runs_code = True
    attempt.load()
    values = request.static_values()

    def eager_run() -> None:
        copy_context().run(request.call, values)  # nobody could unset a context variable

    def replay() -> None:
        attempt.load()
        attempt.replay(entry)

    eager, graph = [seconds_of(request, eager_run)], [attempt.replay_s]
    most = _LONG_PAIRS if eager[0] + graph[0] > _LONG_PAIR_S else _PAIRS
    while request.judges_gain and _is_slower(eager, graph) and len(graph) < most:
        eager.append(seconds_of(request, eager_run))
        graph.append(seconds_of(request, replay))
    gain = Gain(min(eager) * 1e3, min(graph) * 1e3)
    entry.note_gain(gain)
    if request.judges_gain and _is_slower(eager, graph):
        times = f"a replay took {gain.replay_ms * 1e3:.0f} us and an eager run {gain.eager_ms * 1e3:.0f} us"
        raise CaptureError(f"{times}, {len(eager)} of each; {Reason.NO_GAIN.text}", Reason.NO_GAIN)


def _may_be_timed(request: CaptureRequest, eager: EagerRun, entry: CUDAGraphEntry) -> bool:
    """Whether the call can be run once more for its time alone: it writes nothing of others and draws no numbers."""
    leaves_effects = eager.effects.regions or eager.draws or entry.writes_outside
    return request.backend.is_settled and entry.mode is CUDAGraphMode.FULL and not leaves_effects


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


def _is_slower(eager: list[float], graph: list[float]) -> bool:
    return Gain(1e3 * sorted(eager)[-2:][0], 1e3 * min(graph)).is_loss
