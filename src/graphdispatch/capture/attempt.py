"""What a capture or a verification does between the watched eager run and the restoring of its effects."""

from collections.abc import Collection
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from ..axes import Axis, pack
from ..backends.operators import storage_key
from ..call.spec import is_tensor
from ..errors import CaptureError, DeviceLostError, GraphDispatchError, ReplayError, VerificationError
from ..memory.entry import CUDAGraphEntry, WrittenSpans
from ..memory.outputs import OutputRule, Outputs, check_values, learn_output_rule
from ..memory.program import Labels, Program
from ..memory.proof import Compared, RowProof
from ..modes import CUDAGraphMode, EntryState
from ..reasons import Reason
from ..state.guards import StateGuard, WorkspaceGuard
from .eager_run import EagerRun, check_may_capture, uncached_casts, undo_run
from .effects import EffectRecorder, redo, retry_once, undo
from .gain import may_be_timed, measure_gain, seconds_of
from .probes import BY_RULE, Padding
from .prover import RowProver
from .recording import Recording, record
from .request import CaptureRequest
from .verify import check_aliases, check_padding_writes, check_replay

if TYPE_CHECKING:
    from .regions import Region

__all__ = ["CaptureAttempt"]

_SMALL_BYTES = 1 << 20
_FEWEST = 2  # rows of a batch that may be too few for a callable if there is one less


@dataclass
class CaptureAttempt:
    """Runs a call again after its eager run, to capture it or to compare a graph with it.

    Call ``restore`` on every way out. The pool's lock is held throughout.
    """

    request: CaptureRequest
    eager: EagerRun
    stage: str = ""
    """What the attempt is doing, in words; empty before it runs anything."""
    warm_run: EffectRecorder = field(default_factory=lambda: EffectRecorder(0))
    """The latest run on the static inputs: what it reads from outside and what it writes, padding rows included."""
    _existing: set[int] = field(default_factory=set)
    """Keys of the storages that the warm-up used and that existed when it ended; the graph may read them."""
    _ran_again: bool = False
    _replay_s: float = 0.0
    """How long the replay took that was compared, in seconds."""

    def capture(self) -> CUDAGraphEntry:
        """Warm up, record and compare; returns a complete entry.

        Raises ``CaptureError``, ``VerificationError`` or ``ReplayError`` if there can be no graph, and whatever the
        callable raises in one of these runs.
        """
        request = self.request
        check_may_capture(request, self.eager)
        started = request.clock()
        if self.eager.warms_up:
            self._note_run(self.eager.effects)
        for _ in range(request.options.warmup_iterations - self.eager.warms_up):
            self._warm_up()
        recording = record(request, self.eager, self._existing, self.start_over)
        entry = None
        try:
            entry = self._make_entry(recording)
            entry.capture_time_ms = (request.clock() - started) * 1e3
            if request.options.verify:
                # A caller's call leaves the proof to the first padded one behind it.
                self._compare_replay(entry, proves=not request.keep_effects)
                self._measure(entry)
            else:
                entry.state = EntryState.VERIFIED
                entry.trust()
        except BaseException:
            (recording.graph.reset if entry is None else entry.release)()
            raise
        return entry

    def verify(self, entry: CUDAGraphEntry) -> None:
        """Compare the entry's replay on this batch with the eager run. Raises as ``capture`` does."""
        check_may_capture(self.request, self.eager)
        writes = entry.written is not None or any(not entry.inputs.specs[i].spans for i in entry.mutated)
        if writes or entry.mode is not CUDAGraphMode.FULL:  # else it writes its rows at most
            self._warm_up()
        check_values(self.eager.opened, entry.output)
        try:
            self._compare_replay(entry, proves=self.request.is_padded)
        except (CaptureError, VerificationError) as error:
            # A graph of full batches is not wrong because padding changes the real rows of this one.
            found = self._find_dependence(entry, error) if self.request.is_padded and entry.proof is None else None
            if found is None:
                raise
            entry.program.proof = found

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
            raise CaptureError(
                f"the memory that the call writes could not be put back and holds values of another run: {error}"
            ) from error

    def _put_back(self) -> None:
        self.start_over("putting back what was written")
        if self.eager.changed is None and self.eager.unseen is None:  # else no run followed that could have done more
            walk = self.eager.trace.walk
            walk.restore(names=self.eager.trace.touched, generators=walk.drew() is not None)
        if self.request.keep_effects:
            redo(self.eager.effects.regions)
            if self.eager.draws:
                self.request.backend.set_rng_state(self.eager.rng_after)
        self.request.inputs.mark_dirty()

    def start_over(self, stage: str) -> None:
        """Put memory and the random generator back to where the eager run began, and begin ``stage``."""
        self._ran_again = True
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

    def _warm_up(self) -> None:
        self.start_over(f"warming up with {self.request.size} rows")
        self.load()
        self._run_watched()
        self.eager.check_state()  # else the next run may write other memory

    def _run_watched(self) -> None:
        """Run the call on what the static inputs hold, and note what it writes."""
        request = self.request
        labels = Labels.of_arguments(request.inputs.views(request.size))
        self.warm_run = EffectRecorder(request.options.state_limit_bytes, strict=True, labels=labels)
        with uncached_casts(), request.backend.rehearsing(), self.eager.trace, self.warm_run.guarding():
            output = copy_context().run(request.call, request.static_values())
        self._note_run(self.warm_run)
        del output

    def _note_run(self, run: EffectRecorder) -> None:
        self.warm_run = run
        self.eager.draws |= run.uses_rng
        self._existing = set(run.outside) | run.made_storages()

    def _make_entry(self, recording: Recording) -> CUDAGraphEntry:
        request, warm_run, output = self.request, self.warm_run, recording.outputs
        check_values(self.eager.opened, output)
        rule = self._find_output_rule(output)
        views = request.inputs.views(request.size)
        mutated = tuple(index for index, view in enumerate(views) if warm_run.writes_to(view))
        check_aliases(request, self.eager, mutated)
        if request.options.shares_outputs:
            output = tree_map_only(torch.Tensor, request.backend.weak_reference, output)
        how = request.options.outputs
        outputs = Outputs(output, rule, recording.is_own, how, request.pool, recording.firsts)
        buffers = request.buffer_storages()
        held = {key: tensor for key, tensor in warm_run.outside.items() if key not in buffers}
        arguments = {storage_key(value) for value in request.values if is_tensor(value)}
        guard = self._make_guard(held.keys() | self.eager.effects.outside.keys())
        workspaces = [held[key] for key in held.keys() - guard.storages - arguments]
        written = [region.target for region in self._writes_outside_inputs()]
        entry = CUDAGraphEntry(
            descriptor=request.descriptor,
            mode=recording.mode,
            key=request.key,
            size=request.size,
            graph=recording.graph,
            pool=request.pool,
            backend=request.backend,
            inputs=request.inputs,
            outputs=outputs,
            mutated=mutated,
            written=WrittenSpans(written) if written else None,
            held=tuple(held.values()),
            metadata=self.eager.find_metadata(request.values, guard),
            workspaces=WorkspaceGuard(workspaces) if workspaces else None,
            guard=guard if request.options.guard_weights else None,
            bare=request.inputs.positions if guard.missing else (),
            compared=Compared(request.inputs.axes, [peer.compared for peer in request.peers]),
            program=self._find_program(),
            uses_rng=warm_run.uses_rng,
            signature=request.signature,
            call=request.call,
            example=request.values_with(repeat(None)),
            warm_batch=tuple(
                value.detach().clone() if is_tensor(value) and value.nbytes <= _SMALL_BYTES else None
                for value in request.values
            ),
        )
        self._watch_breaks(entry)
        return entry

    def _find_program(self) -> Program:
        """The operators of the run on the static inputs, shared with a graph of another size that has the same."""
        axes, run = self.request.inputs.axes, self.warm_run
        flags = {"limits_values": run.limits_values, "groups_rows": run.groups_rows}
        made = Program(run.operators, self.request.size, axes, **flags)
        return next((peer.program for peer in self.request.peers if peer.program.is_like(made)), made)

    def _watch_breaks(self, entry: CUDAGraphEntry) -> None:
        if entry.mode is CUDAGraphMode.PIECEWISE and self.eager.trace.shares_with_breaks():
            entry.graph.is_unchanged = entry.is_current

    def _make_guard(self, used: Collection[int]) -> StateGuard:
        """What of the callable's state the runs have read. Raises ``CaptureError`` if somebody cannot compare it, or if
        a run made only for the graph changed it or drew."""
        request = self.request
        guard = StateGuard(request.call.fn, self.eager.trace, used, request.roots)
        if guard.unguarded and request.options.guard_weights:
            raise CaptureError(
                f"the call reads state that no guard can compare: {guard.unguarded}", Reason.STATE_UNSEEN
            )
        self.eager.check_state()
        return guard

    def _find_output_rule(self, output: Any) -> OutputRule:
        """Which dimensions of ``output``, which a run of ``size`` rows gave, follow the batch: that of an earlier size
        if there is one, else found by a run for each axis, with another extent along that axis alone.

        Raises ``CaptureError`` if the outputs cannot be cut to the real rows, or follow the batch differently than in
        other sizes.
        """
        request, rule = self.request, self.request.rule
        axes, eager = request.inputs.axes, self.eager.opened
        if rule is None:
            used = {axis for spec in request.inputs.specs for _, axis in spec.spans}
            others = [(axis, *self._run_apart_along(axis, output)) for axis in axes if axis in used]
            rule = learn_output_rule(axes, eager, request.rows, others)
        rule.check(axes, eager, request.rows, output, request.size)
        return rule

    def _run_apart_along(self, axis: Axis, output: Any) -> tuple[int, Any]:
        """A batch with another extent along one axis, and its outputs: that of the graph, whose ``output`` is known if
        it differs along this axis alone. Else one less; or one more than one, or than two where the call does not take
        one, as a normalisation over the batch."""
        own, full = axis.of(self.request.rows), axis.of(self.request.size)
        if own != full:
            number = self._with_extent(axis, full)
            return number, output if number == self.request.size else self.run_with(number)
        if own > 1:
            try:
                return self._with_extent(axis, own - 1), self.run_with(self._with_extent(axis, own - 1))
            except CaptureError as error:
                if own > _FEWEST or error.__cause__ is None:
                    raise
        return self._with_extent(axis, own + 1), self.run_with(self._with_extent(axis, own + 1))

    def _with_extent(self, axis: Axis, extent: int) -> int:
        """The number of the batch with another extent along one axis."""
        axes = self.request.inputs.axes
        return pack(axes, [extent if one is axis else one.of(self.request.rows) for one in axes])

    def run_with(self, rows: int) -> Any:
        """The outputs for another number of rows. Fake tensors would stay in whatever caches the model keeps.

        Raises ``CaptureError`` if the call fails or changes Python state.
        """
        request, walk = self.request, self.eager.trace.walk
        may_have_changed = True
        self.start_over(f"probing the outputs with {rows} rows")
        values = self._resized(rows)
        effects = EffectRecorder(request.options.state_limit_bytes, strict=True)
        within = copy_context().run
        try:
            with request.backend.rehearsing(), self.eager.trace, effects.guarding():
                output = within(request.call, values)
            within(self.eager.check_state)
            may_have_changed = False
            return self.eager.open_outputs(output)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the call fails for {rows} rows, so it cannot be seen which dimensions of its outputs follow the "
                f"batch: {error}; if it takes one size alone, declare no batch dimension (dynamic={{}})",
                Reason.OUTPUT_ROWS_UNKNOWN,
            ) from error
        finally:
            undo_run(request, effects, self.eager.rng_before, walk if may_have_changed else None)

    def _resized(self, rows: int) -> list[Any]:
        """The call's values with its rows in turn, until there are so many."""
        specs, values = self.request.inputs.specs, self.request.arguments()
        return self.request.values_with(spec.repeated(value, rows) for spec, value in zip(specs, values, strict=True))

    def _writes_outside_inputs(self) -> "list[Region]":
        """What the run on the static inputs writes, apart from the static inputs themselves."""
        buffers = self.request.buffer_storages()
        return [region for region in self.warm_run.regions if storage_key(region.target) not in buffers]

    def _compare_replay(self, entry: CUDAGraphEntry, *, proves: bool) -> None:
        """Replay this batch from where the eager run began, compare, and note in the entry what the batch tested. With
        ``proves`` find out whether rows are independent, if that is not known."""
        request = self.request
        self.start_over(f"comparing the replay of {request.rows} rows with eager")
        prover = RowProver(self.request, self.eager, entry, self)
        load_s = seconds_of(request, self.load)
        proves = proves and prover.is_wanted
        alike = request.inputs.alike(request.size) if proves else {}
        self._replay_s = load_s + seconds_of(request, lambda: self._replay(entry))
        if self.eager.effects.uses_rng is not entry.uses_rng and not request.is_piecewise:
            what = "draw no random numbers" if entry.uses_rng else "draw random numbers"
            raise VerificationError(f"{request.rows} rows {what}, unlike the graph of {request.size}")
        check_replay(request, self.eager, entry)
        if request.is_padded:
            check_padding_writes(request, self.eager, self.warm_run.regions)
        if proves:
            if not prover.is_ample:
                entry.program = entry.program.apart()
            entry.program.proof = prover.prove(alike).after(entry.proof)
        if request.tells_numbers():
            self.note_compared(entry, request.rows)
        if entry.metadata is not None:
            entry.metadata.note(request.values)

    def _find_dependence(self, entry: CUDAGraphEntry, error: GraphDispatchError) -> RowProof | None:
        """What shows that real rows depend on padding, after a comparison of the first padded batch failed; or None."""
        if isinstance(error, CaptureError):
            is_cause = error.reason is Reason.PADDING_WRITES_STATE
            return RowProof(False, True, BY_RULE.name, str(error), error.reason) if is_cause else None
        self.start_over(f"asking whether {self.request.rows} rows depend on padding")
        self.load()
        alike = self.request.inputs.alike(self.request.size)
        self._replay(entry)
        proof = RowProver(self.request, self.eager, entry, self).prove(alike)
        return None if proof.independent else proof

    def note_compared(self, entry: CUDAGraphEntry, rows: int) -> None:
        """Note that so many rows were compared with eager. If code ran for them that the entry's guard does not know,
        the guard grows by what that reads."""
        trace = self.eager.trace
        if entry.guard is not None and entry.guard.notes.lacks(trace):
            check_may_capture(self.request, self.eager)
            trace.absorb(entry.guard.notes)
            effects = self.eager.effects
            used = {*map(storage_key, entry.held), *entry.guard.storages, *effects.outside}
            entry.guard = guard = self._make_guard(used)
            entry.metadata = self.eager.find_metadata(self.request.values, guard, entry.metadata)
            self._watch_breaks(entry)
            entry.compared.part()
        entry.compared.note(rows, self.request.size)

    def _measure(self, entry: CUDAGraphEntry) -> None:
        """Note what the graph gains, where it can be timed. Raises ``CaptureError`` if it is given up for that."""
        request = self.request
        if entry.gain is not None or not may_be_timed(request, self.eager, entry):
            return
        self.start_over("timing an eager run beside a replay")
        self.load()
        values = request.static_values()
        entry.gain = measure_gain(
            request, self._replay_s, lambda: request.call(values), lambda: self._load_and_replay(entry)
        )

    def _load_and_replay(self, entry: CUDAGraphEntry) -> None:
        self.load()
        self._replay(entry)

    def _replay(self, entry: CUDAGraphEntry) -> None:
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
        self._replay(entry)
