"""What a graph gains: the times of its replays beside those of plain eager runs, on the batch at hand."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from ..axes import cells_of
from ..errors import CaptureError
from ..memory.entry import CUDAGraphEntry
from ..memory.gain import Gain
from ..modes import CUDAGraphMode
from ..native.tape import TAPE
from ..reasons import Reason
from .eager_run import EagerRun
from .request import CaptureRequest

__all__ = ["check_gain", "may_be_timed"]

_PAIRS = 5
_LONG_PAIRS = 2
_LONG_PAIR_S = 0.2
_LONG_S = 100e-6
_LEAST_LOSS_S = 25e-6
_LEAST_RATIO = 1.05


def may_be_timed(request: CaptureRequest, eager: EagerRun, entry: CUDAGraphEntry) -> bool:
    """Whether calls can be run a few more times for nothing but their time, and the time says what callers wait for:
    on the host, of a callable that writes nothing of others and draws no numbers, beside a call of the caller's. While
    the CPU tape is being compiled, replays take longer than they will."""
    return (
        request.keep_effects
        and request.backend.device_type == "cpu"
        and TAPE.is_settled
        and entry.mode is CUDAGraphMode.FULL
        and not (eager.effects.regions or eager.draws or entry.writes_outside or entry.outputs.buffers)
    )


def check_gain(request: CaptureRequest, entry: CUDAGraphEntry, gain: Gain, values: Sequence[Any], rows: int) -> None:
    """Time eager runs and replays of a batch in turns, unless ``gain`` tells how it fares; and note it there.

    A replay is slower if each of 5 takes longer than at least 4 of 5 eager runs, by 5 % and 25 us, or by 100 us where
    eager runs are shorter than that. A pair before them warms up. Pairs of more than 0.2 s vary less: two of them
    decide, the first among them. The first pair that tells otherwise is the last, so that a graph that gains costs two
    runs of each, or one. One that seemed not to gain is timed once more with the next full batch that is compared.

    Raises ``CaptureError`` (``NO_GAIN``) if replays of a full batch are slower: then all are.
    """
    cells, is_full = cells_of(rows), rows == entry.size
    if (gain.full_ms is not None and gain.full_ms >= 0) if is_full else gain.tells(cells):
        return
    eager, graph, is_slower = _times(request, entry, values, rows)
    gain.note(cells, median(eager), median(graph), is_slower=is_slower)
    if not is_full:
        return
    gain.full_ms = (median(eager) - median(graph)) * 1e3
    if is_slower:
        raise CaptureError(
            f"a replay took {median(graph) * 1e6:.0f} us and an eager run {median(eager) * 1e6:.0f} us, {len(eager)} "
            f"times of each; {Reason.NO_GAIN.text}",
            Reason.NO_GAIN,
        )


def _times(
    request: CaptureRequest, entry: CUDAGraphEntry, values: Sequence[Any], rows: int
) -> tuple[list[float], list[float], bool]:
    """The times of eager runs and of replays, in seconds, and whether the replays are slower."""
    plan, replays = entry.plan(rows), entry.replay_count
    eager: list[float] = []
    graph: list[float] = []
    most, is_slower = 0, True
    try:
        while is_slower and (not most or len(graph) < most):
            times = [_time(request.clock, run, values) for run in (request.call, plan.run)]
            if not most:
                is_long = sum(times) > _LONG_PAIR_S
                most = _LONG_PAIRS if is_long else _PAIRS
                if not is_long:
                    continue
            eager.append(times[0])
            graph.append(times[1])
            usual = sorted(eager)[-2:][0]
            least = _LEAST_LOSS_S if usual >= _LONG_S else _LONG_S
            is_slower = min(graph) >= max(usual + least, usual * _LEAST_RATIO)
    finally:
        entry.replay_count = replays
    return eager, graph, is_slower


def _time(clock: Callable[[], float], run: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> float:
    started = clock()
    run(values)
    return clock() - started
