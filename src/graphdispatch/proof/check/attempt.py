"""Runs a call again after its watched eager run, each time from where that began: warm-ups, probes and replays."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...backends.base import Backend
from ...backends.host_reads import SaysCapturing
from ...backends.tracing import uncached_casts
from ...errors import CaptureError, DeviceLostError, ReplayError, error_of_signal
from ...modes import CUDAGraphMode
from ...runtime.entry import CUDAGraphEntry
from ...runtime.request import CaptureRequest
from ..watch.effects import EffectRecorder, Region, Runner, redo, retry_once, undo
from ..watch.operator_trace import TensorNames
from .compare import check_padding_writes
from .eager_run import EagerRun, undo_run
from .padding import Padding

_T = TypeVar("_T")
_Record = Callable[[EffectRecorder, Sequence[Any]], tuple[Any, Any]]
"""Runs the call on values, watched, and records it."""


def as_recorded(backend: Backend) -> AbstractContextManager[object]:
    """A block in which code that queries whether anyone captures takes the path that is recorded, where a capture
    executes. A device's code may prepare captures in runs that are none; what it then records is traced and compared.
    """
    return SaysCapturing() if backend.capture_executes else nullcontext()


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
    warm_run: EffectRecorder = field(default_factory=lambda: EffectRecorder(0))
    """The latest run on the static inputs: what it reads from outside and what it writes, padding rows included."""
    replay_s: float = 0.0
    """How long the replay took that was compared, in seconds."""
    runs_code: bool = field(init=False)
    """Whether the user's Python may have run since the eager run."""
    traced: set[int] = field(default_factory=set)
    """The batches whose code was traced, by their rows."""
    _ran_again: bool = False

    def __post_init__(self) -> None:
        if self.eager.warms_up:
            self.warm_run = self.eager.effects
        pads = (pad for spec in self.request.inputs.specs for pad in spec.pads)
        self.runs_code = self.request.is_piecewise or any(pad.runs_code for pad in pads)
        self.traced.update([self.request.rows] if self.eager.like is None else [])

    def start_over(self, stage: str) -> None:
        """Put memory and the random generator back to where the eager run began, and begin ``stage``."""
        self._ran_again = True
        undo(self.lent)
        undo(self.warm_run.regions)
        undo(self.eager.effects.regions)
        self._reset_generator()
        self.stage = stage

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

    def warm_up(self, record: _Record | None = None, *, keeps_operators: bool = False) -> Any:
        """Run the call on the static inputs, from where the eager run began; ``record`` may be what runs it, and
        records it: returns the recording then. Raises what the call raises."""
        doing = "warming up with" if record is None else "capturing"
        self.start_over(f"{doing} {self.request.size} rows")
        self.load()
        recording = self._run_watched(record, keeps_operators=keeps_operators or record is not None)
        try:
            self.eager.check_state()  # else the next run may write other memory
        except BaseException:
            if recording is not None:
                recording.graph.reset()
            raise
        return recording

    def _run_watched(self, record: _Record | None = None, *, keeps_operators: bool = False) -> Any:
        """Run the call on what the static inputs hold, and note what it writes; gives what ``record`` recorded."""
        request, self.runs_code, recording = self.request, True, None
        views, specs = request.inputs.views(request.size), request.inputs.specs
        tensor_names = TensorNames.of_arguments(views, specs) if keeps_operators else None
        self.warm_run = EffectRecorder(request.options.state_limit_bytes, strict=True, tensor_names=tensor_names)
        with uncached_casts():
            if record is not None:
                _, recording = record(self.warm_run, request.static_values())
            else:
                with as_recorded(request.backend), self.tracing(), self.warm_run.saving_host_access():
                    output = copy_context().run(request.call, request.static_values())
                self.warm_run.note_outputs(self.eager.open_outputs(output))
        self.eager.draws |= self.warm_run.uses_rng
        if self.eager.like is None:
            self.traced.add(request.size)
        return recording

    def tracing(self) -> AbstractContextManager[Any]:
        """Traces the code of a further run, unless that of the eager run was not traced."""
        return self.eager.trace if self.eager.like is None else nullcontext()

    def run_and_undo(
        self,
        effects: EffectRecorder,
        values: Sequence[Any],
        read: Callable[[Any], _T],
        runner: Runner | None = None,
        is_traced: bool = True,
    ) -> _T:
        """What ``read`` gives of the output of a run on these values, of which nothing stays. ``runner`` runs its
        operators.

        Raises what the call raises, and ``CaptureError`` if it changes Python state or draws where no graph draws.
        """
        request, eager, has_kept_state = self.request, self.eager, False
        self.runs_code = True
        within = copy_context().run
        try:
            tracing = self.tracing() if is_traced else nullcontext()
            with uncached_casts(), as_recorded(request.backend), tracing, effects.saving_host_access(runner):
                output = within(request.call, values)
            within(eager.check_state)
            has_kept_state = True
            return read(eager.open_outputs(output))
        finally:
            undo_run(request, effects, eager.rng_before, None if has_kept_state else eager.trace.walk)

    def try_and_undo(self, effects: EffectRecorder, values: Sequence[Any], read: Callable[[Any], _T]) -> _T | None:
        """``run_and_undo`` for values that the callable may not take; None if it failed."""
        try:
            return self.run_and_undo(effects, values, read)
        except Exception as error:
            if ends_capture(self.request.backend, error):
                raise
            return None

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
            self._run_watched()
            check_padding_writes(request, self.eager, self.warm_run.regions)
            self.start_over(stage)
        self.load(rows, padding)
        self.replay(entry)

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
        self.start_over("putting back what was written")
        walk = self.eager.trace.walk
        if self.eager.changed is not None or self.eager.unseen is not None:
            if not self.request.keep_effects:  # else it is the caller's, and no run followed that could have done more
                walk.restore(generators=True)
        elif self.runs_code or not self.request.keep_effects:
            walk.restore(names=self.eager.trace.touched, generators=walk.drew() is not None)
        if self.request.keep_effects:
            redo(self.eager.effects.regions)
            if self.eager.draws:
                self.request.backend.set_rng_state(self.eager.rng_after)
        self.request.inputs.mark_dirty()


def ends_capture(backend: Backend, error: Exception) -> bool:
    """Whether an error is not one of the callable for such numbers: no memory is left, or a signal's handler raised it.
    Raises ``DeviceLostError``."""
    if backend.is_out_of_memory(error) or error_of_signal(error) is not None:
        return True
    backend.raise_if_lost(error)
    return False
