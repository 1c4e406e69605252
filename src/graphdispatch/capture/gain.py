"""What a graph gains: the times of its replays beside those of plain eager runs, on the batch at hand."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from ..errors import CaptureError
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode
from ..reasons import Reason
from .eager_run import EagerRun
from .request import CaptureRequest

__all__ = ["check_gain", "may_be_timed"]

_PAIRS = 5
_LONG_S = 100e-6
_LEAST_LOSS_S = 25e-6
_LEAST_RATIO = 1.05


def may_be_timed(request: CaptureRequest, eager: EagerRun, entry: CUDAGraphEntry) -> bool:
    """Whether the call can be run a few more times for nothing but its time, and the time says what callers wait for.

    That is a full batch on the host, of a call that writes nothing of others and draws no numbers. A graph that gains
    is not timed again; one that seemed not to is timed once more, when the second batch is compared.
    """
    return (
        request.judges_gain
        and (entry.gain_ms is None or entry.gain_ms < 0)
        and request.rows == entry.size
        and request.backend.device_type == "cpu"
        and entry.mode is CUDAGraphMode.FULL
        and not (eager.effects.regions or eager.draws or entry.writes_outside or entry.outputs.buffers)
    )


def check_gain(request: CaptureRequest, entry: CUDAGraphEntry) -> None:
    """Time eager runs and replays in turns, and note in ``entry.gain_ms`` what a replay gains.

    Raises ``CaptureError`` (``NO_GAIN``) if each of 5 replays takes longer than at least 4 of 5 eager runs, by 5 % and
    25 us, or by 100 us where eager runs are shorter than that. A pair before them warms up. The first pair that tells
    otherwise is the last, so that a graph that gains costs two runs of each.
    """
    plan, replays = entry.plan(request.rows), entry.replay_count
    eager: list[float] = []
    graph: list[float] = []
    is_slower = False
    try:
        for number in range(_PAIRS + 1):
            times = [_time(request.clock, run, request.values) for run in (request.call, plan.run)]
            if number:
                eager.append(times[0])
                graph.append(times[1])
                usual = sorted(eager)[-2:][0]
                least = _LEAST_LOSS_S if usual >= _LONG_S else _LONG_S
                is_slower = min(graph) >= max(usual + least, usual * _LEAST_RATIO)
                if not is_slower:
                    break
    finally:
        entry.replay_count = replays
    entry.gain_ms = (median(eager) - median(graph)) * 1e3
    if is_slower:
        raise CaptureError(
            f"a replay took {median(graph) * 1e6:.0f} us and an eager run {median(eager) * 1e6:.0f} us, {_PAIRS} times "
            f"of each; {Reason.NO_GAIN.text}",
            Reason.NO_GAIN,
        )


def _time(clock: Callable[[], float], run: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> float:
    started = clock()
    run(values)
    return clock() - started
