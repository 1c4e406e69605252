"""Runs a call again after its watched eager run, each time from where that began: warm-ups, recordings, probes,
replays, and a run that is timed."""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from ...backends.base import Backend
from ...backends.operators import is_strided, storage_key, tensors_in
from ...errors import CaptureError, DeviceLostError, ReplayError, error_of_signal
from ...modes import CUDAGraphMode
from ...runtime.entry import CUDAGraphEntry
from ...runtime.flatten import is_tensor
from ...runtime.protocols import CaptureRequest
from ...stats import Gain
from ..watch.effects import EffectRecorder, Region, redo, retry_once, undo
from ..watch.memory import MemoryWatch, Runner
from ..watch.trace import CodeTrace
from .break_watch import BreakWatch
from .compare import check_padding_writes
from .eager_run import EagerRun, existing_storages, pads_by_code, queries_capture, recorder_of, undo_run
from .padding import Padding
from .run import CallRun, Recording

_T = TypeVar("_T")


@dataclass
class CaptureAttempt:
    """The runs and replays of one capture, or of one comparison, behind its eager run.

    Call ``restore`` on every way out. The pool's lock is held throughout.
    """

    request: CaptureRequest
    eager: EagerRun
    lent: list[Region] = field(default_factory=list)
    """The outputs in the graph's memory that callers hold, as the eager run left them: replays overwrite them, and
    arguments may lie there, as where each step is given what the last one gave."""
    stage: str = ""
    """What the attempt is doing, in words; empty before it runs anything."""
    warm_run: EffectRecorder = field(init=False)
    """The latest run on the static inputs: what it reads from outside and what it writes, padding rows included."""
    replay_s: float = 0.0
    """How long the replay took that was compared, in seconds."""
    runs_code: bool = field(init=False)
    """Whether the user's Python may have run since the eager run."""
    traced: set[int] = field(default_factory=set)
    """The batches whose code was traced, by their rows."""
    _ran_again: bool = False

    def __post_init__(self) -> None:
        self.warm_run = self.eager.effects if self.eager.warms_up else EffectRecorder(0)
        self.runs_code = self.request.is_piecewise or pads_by_code(self.request)
        self.traced.update([self.request.rows] if self.eager.like is None else [])

    def start_over(self, stage: str) -> None:
        """Put memory and the random generator back to where the eager run began, and begin ``stage``. Raises
        ``CaptureError`` if another rank makes no such run."""
        if self.request.ranks is not None:
            self.request.ranks.begin_run(stage)
        self._rewind()
        self.stage = stage

    def _rewind(self) -> None:
        self._ran_again = True
        undo(self.lent)
        undo(self.warm_run.regions)
        undo(self.eager.effects.regions)
        self.request.inputs.mark_dirty()
        self._reset_generator()

    def _reset_generator(self) -> None:
        """Put the device's generator to where the eager run began, if that drew; else other threads may use it."""
        if self.eager.draws:
            self.request.backend.set_rng_state(self.eager.rng_before)

    def load(self, rows: int = 0, padding: Padding | None = None) -> None:
        """Load the first ``rows`` rows (0: all). Where ``padding`` has no rows, padding is that of the pad rules."""
        request, values = self.request, self.request.values
        if rows not in (0, request.rows) or (padding and padding.real):
            parts = zip(request.inputs.specs, (padding and padding.real) or request.arguments(), strict=True)
            values = request.values_with(spec.cut(value, rows) for spec, value in parts)
        request.inputs.load(values, rows or request.rows, request.size)
        if padding and padding.rows:
            request.inputs.put(padding.rows, rows, request.size, padding.axes)

    def warm_up(self) -> None:
        """Run the call on the static inputs, from where the eager run began. Raises what the call raises."""
        self.start_over(f"warming up with {self.request.size} rows")
        self.load()
        self._warming().make()

    def record_at_once(self) -> Recording:
        """``warm_up`` and ``record`` in one run, on a backend whose capture executes. Raises ``CaptureError``."""
        request, eager = self.request, self.eager
        self.start_over(f"capturing {request.size} rows")
        self.load()
        existed: Callable[[int], bool] | None = None
        if eager.like is None:
            before = map(storage_key, filter(is_strided, (*tensors_in(request.static_values()), *request.tensors)))
            existed = existing_storages(eager.trace.walk, eager.effects.outside, eager.effects.made_storages(), before)
        reads = queries_capture(eager.trace) or eager.metadata_read(compares=bool(eager.effects.equated))
        is_traced = bool(request.is_padded or request.has_gaps or reads)
        return self._warming(existed, is_traced=is_traced).record()

    def record(self) -> Recording:
        """Record the call, from where the eager run began. Raises ``CaptureError``.

        Nothing is watched where the eager run on the same inputs was the warm-up and did what the run of a graph did:
        then the outputs lie where eager's did.
        """
        request, eager, warm_run = self.request, self.eager, self.warm_run
        self.start_over(f"capturing {request.size} rows")
        values = request.static_values()
        existing = set(warm_run.outside) | warm_run.made_storages() | set(map(storage_key, filter(is_tensor, values)))
        watch: MemoryWatch | None = None
        if request.is_piecewise:
            watch = BreakWatch(request, existing, eager.trace.walk)
        elif eager.like is None or not eager.warms_up:
            watch = MemoryWatch(existing.__contains__)
        alike = (eager.effects, eager.opened) if watch is None else None
        return self._run(values, watch, lambda _: None).record(alike)

    def _warming(self, existed: Callable[[int], bool] | None = None, *, is_traced: bool = True) -> CallRun[None]:
        """A run on what the static inputs hold, which notes what it writes."""
        request = self.request
        self.warm_run = recorder_of(request, request.inputs.views(request.size), existed)
        return self._run(request.static_values(), self.warm_run, self._note_warm_run, is_traced=is_traced)

    def _note_warm_run(self, output: Any) -> None:
        self.warm_run.note_outputs(output)
        self.eager.draws |= self.warm_run.uses_rng
        if self.eager.like is None:
            self.traced.add(self.request.size)

    def _run(
        self,
        values: Sequence[Any],
        watch: MemoryWatch | None,
        read: Callable[[Any], _T],
        *,
        runner: Runner | None = None,
        is_traced: bool = True,
    ) -> CallRun[_T]:
        """A further run, whose code is traced unless that of the eager run was not."""
        self.runs_code, eager = True, self.eager
        trace = eager.trace if is_traced and eager.like is None else None
        return CallRun(self.request, values, watch, eager.open_outputs, read, trace, runner, eager.check_state)

    def run_alike(self, values: Sequence[Any], read: Callable[[Any], _T]) -> _T:
        """What ``read`` gives of the output of a run that takes the path of runs which left nothing but their answer:
        so nothing of it is watched. Raises as ``run_and_undo`` does."""
        return self._run(values, None, read, is_traced=False).make()

    def run_and_undo(
        self,
        values: Sequence[Any],
        read: Callable[[EffectRecorder, Any], _T],
        arguments: Sequence[torch.Tensor] | None = None,
        *,
        runner: Runner | None = None,
        is_traced: bool = True,
    ) -> _T:
        """What ``read`` gives of what has watched a run on these values, of which nothing stays, and of its output. The
        operators are noted if its ``arguments`` are given. ``runner`` runs them.

        Raises what the call raises, and ``CaptureError`` if it changes Python state or draws where no graph draws.
        """
        trace: CodeTrace | None = self.eager.trace
        effects = recorder_of(self.request, arguments)
        try:
            run = self._run(values, effects, partial(read, effects), runner=runner, is_traced=is_traced)
            found = run.make()
            trace = None  # nothing of its state has changed
            return found
        finally:
            undo_run(self.request, effects, self.eager.rng_before, trace)

    def replay(self, entry: CUDAGraphEntry) -> None:
        """Replay what the static inputs hold. Raises ``ReplayError``, and what says that no memory is left."""
        self._reset_generator()  # a pad rule may have drawn random numbers
        try:
            entry.graph.replay()
        except Exception as error:
            if isinstance(error, ReplayError) or self.request.backend.is_out_of_memory(error):
                raise
            raise ReplayError(f"{type(error).__name__}: {error}") from error

    def replay_with(self, entry: CUDAGraphEntry, rows: int, padding: Padding) -> None:
        """Replay the first ``rows`` rows from where the eager run began, with this padding.

        What the graph writes is undone by what a run of the callable wrote. Where a write goes may depend on values, in
        indexed writes and in breaks; then the callable is run on the same padding before. Raises ``CaptureError`` if
        padding rows write where they must not.
        """
        request = self.request
        stage = f"replaying {rows} rows with other padding"
        self.start_over(stage)
        if entry.mode is CUDAGraphMode.PIECEWISE or any(region.indices for region in self.warm_run.regions):
            self.load(rows, padding)
            self._warming().make()
            check_padding_writes(request, self.eager, self.warm_run.regions)
            self.start_over(stage)
        self.load(rows, padding)
        self.replay(entry)

    def measure_gain(self, entry: CUDAGraphEntry) -> None:
        """Time an eager run of a full batch, and note it with the time of the replay that was compared: by both the
        runtime judges which batches a graph serves (``runtime/gain.py``).

        Nothing is timed where nobody judges by it, or if the call writes what is not its own or draws numbers, since it
        is run once more for its time alone.
        """
        request, eager = self.request, self.eager
        leaves_effects = eager.effects.regions or eager.draws or entry.writes_outside
        is_plain = entry.mode is CUDAGraphMode.FULL and not leaves_effects
        if not (request.is_timed and request.backend.is_settled and is_plain):
            return
        self.stage, self.runs_code = "timing an eager run beside a replay", True
        self.load()
        values, within = request.static_values(), copy_context().run  # nobody could unset a context variable
        eager_s = seconds_of(request, lambda: within(request.call, values))
        entry.note_gain(Gain(eager_s * 1e3, self.replay_s * 1e3))

    def restore(self) -> None:
        """Leave exactly the eager run's effects, or none if the request does not want them.

        Raises ``CaptureError`` if they cannot be put back, and ``DeviceLostError``.
        """
        if not self._ran_again and self.request.keep_effects:
            return
        try:
            retry_once(self._put_back, self.request.backend)
        except DeviceLostError:
            raise
        except Exception as error:
            if error_of_signal(error) is not None:  # then it was put back
                raise
            raise CaptureError(
                f"the memory that the call writes could not be put back and holds values of another run: {error}"
            ) from error

    def _put_back(self) -> None:
        self._rewind()
        walk, changes = self.eager.trace.walk, self.eager.trace.changes
        if self.eager.changed is not None or self.eager.unseen is not None:
            if not self.request.keep_effects:  # else it is the caller's, and no run followed that could have done more
                walk.restore(generators=True, changes=changes)
        elif self.runs_code or not self.request.keep_effects:
            walk.restore(changes=changes, generators=walk.drew() is not None)
        if self.request.keep_effects:
            redo(self.eager.effects.regions)
            if self.eager.draws:
                self.request.backend.set_rng_state(self.eager.rng_after)


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


def ends_capture(backend: Backend, error: Exception) -> bool:
    """Whether an error is not one of the callable for such numbers: no memory is left, or a signal's handler raised it.
    Raises ``DeviceLostError``."""
    if backend.is_out_of_memory(error) or error_of_signal(error) is not None:
        return True
    backend.raise_if_lost(error)
    return False
