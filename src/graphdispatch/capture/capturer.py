"""The one capture path: run eagerly, undo, warm up, capture, replay, compare, put back one execution's effects.

    eager run on the real rows (watched)            -> the caller's answer, and everything it writes
    undo; load the static inputs; warm up (watched) -> everything the padded run writes
    undo; capture (undo, if recording executes)     -> the graph
    replay; compare outputs and written state with eager's
    undo; do eager's writes again; put the generator where eager left it

``verify_entry`` does the same without the capture, for the next, different batch: a value that the capture froze
agrees with eager the first time only. Whatever fails after the eager run, the caller has eager's answer.
"""

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from ..backends.base import Capture, Graph
from ..errors import CaptureError, DeviceLostError, ReplayError, VerificationError
from ..memory.entry import CUDAGraphEntry, WrittenSpans
from ..memory.outputs import OutputRule, Outputs, check_values, fixed_rule, learn_output_rule
from ..modes import CUDAGraphMode, EntryState
from ..reasons import Reason
from ..state.guards import WorkspaceGuard
from .casts import uncached_casts
from .collector import paused_collector
from .effects import EffectRecorder, Region, redo, retry_once, undo, written_elsewhere
from .piecewise import PiecewiseCapture
from .request import CaptureRequest, CaptureResult, EagerRun, failure, keep_small, refusal_of, run_eagerly
from .verify import difference, tolerance_for
from .watch import CaptureWatch

__all__ = ["capture_entry", "verify_entry", "warm_up"]

_log = logging.getLogger("graphdispatch")


def capture_entry(request: CaptureRequest) -> CaptureResult:
    """Run the call eagerly and capture it; see the module's text. The pool's lock is held throughout.

    Raises what the callable itself raises on the real rows, unchanged. Nothing else is raised but
    ``KeyboardInterrupt`` and its like, and those only after everything was put back; ``DeviceLostError`` where nothing
    can be served any more; ``CaptureError`` if what was written cannot be put back.
    """
    with request.pool.lock, request.backend.watched():
        request.pool.order_after_last_use()
        eager = run_eagerly(request)
        if isinstance(eager, CaptureResult):
            return eager
        attempt = _Attempt(request, eager)
        try:
            entry = attempt.capture()
        except Exception as error:
            return failure(request, eager.result, error, attempt.stage)
        finally:
            attempt.restore()
        return CaptureResult(eager.result, entry, Reason.CAPTURED_NOW)


def verify_entry(request: CaptureRequest, entry: CUDAGraphEntry) -> CaptureResult:
    """Serve one call eagerly and compare the entry's replay with it; ``entry.state`` says how it went."""
    with request.pool.lock, request.backend.watched():
        request.pool.order_after_last_use()
        eager = run_eagerly(request)
        if isinstance(eager, CaptureResult):
            entry.state = EntryState.FAILED
            return eager
        attempt = _Attempt(request, eager)
        try:
            attempt.verify(entry)
        except Exception as error:
            entry.state = EntryState.FAILED
            return failure(request, eager.result, error, attempt.stage)
        finally:
            attempt.restore()
        entry.state = EntryState.VERIFIED
        entry.note_comparison(request.rows, attempt.proven)
        return CaptureResult(eager.result, entry, Reason.VERIFIED_NOW)


def warm_up(request: CaptureRequest) -> None:
    """Run the call once on the static inputs and put everything back; for warming all sizes before capturing any.

    An error of the callable is left for ``capture_entry`` to report.
    """
    with request.pool.lock, request.backend.watched():
        request.pool.order_after_last_use()
        before = request.backend.rng_state()
        effects = EffectRecorder(request.options.state_limit_bytes, strict=True)

        def take_back() -> None:
            undo(effects.regions)
            request.backend.set_rng_state(before)

        try:
            static = request.static_values()
            request.inputs.load(request.values, request.rows, request.size)
            with effects:
                request.call(static)
        except Exception as error:
            request.backend.raise_if_lost(error)
            _log.debug("warming up %s failed: %s", request.key, error)
        finally:
            retry_once(take_back, request.backend)


@dataclass
class _Attempt:
    """One capture or verification between the eager run and the restoring of its effects."""

    request: CaptureRequest
    eager: EagerRun
    stage: str = ""
    """What it is doing, once it runs anything."""
    proven: set[int] = field(default_factory=set)
    """Inputs whose padding the comparison tested."""
    _padded: list[Region] = field(default_factory=list)
    _known: set[int] = field(default_factory=set)
    _warm: EffectRecorder | None = None
    _dirty: bool = False

    def restore(self) -> None:
        """Leave exactly the eager run's effects, or none if the request does not want them, whatever was run since."""
        if not self._dirty and self.request.keep_effects:
            return
        try:
            retry_once(self._put_back, self.request.backend)
        except DeviceLostError:
            raise
        except Exception as error:
            raise CaptureError(
                f"what the call writes could not be put back as eager left it, and holds values of another run: {error}"
            ) from error

    def _put_back(self) -> None:
        self._back_to_start()
        if self.request.keep_effects:
            redo(self.eager.effects.regions)
            self.request.backend.set_rng_state(self.eager.rng_after)
        self.request.inputs.mark_dirty()

    def capture(self) -> CUDAGraphEntry:
        """Warm up, capture and verify; returns a complete entry."""
        request = self.request
        self._refuse()
        started = time.perf_counter()
        for _ in range(request.options.warmup_iterations):
            self._warm_up()
        with paused_collector(request.options.gc_disable):
            graph, outputs, is_own = self._record_with_breaks()
        try:
            entry = self._complete(graph, outputs, is_own)
            entry.capture_time_ms = (time.perf_counter() - started) * 1e3
            if request.options.verify:
                self._compare_replay(entry)
        except BaseException:
            graph.reset()
            raise
        entry.note_comparison(request.rows, self.proven)
        if not request.options.verify:
            entry.state = EntryState.VERIFIED
            entry.note_comparison(1, entry.unproven)
        return entry

    def verify(self, entry: CUDAGraphEntry) -> None:
        """Compare the entry's replay on this batch with the eager run."""
        self._refuse()
        self._warm_up()
        check_values(self.eager.result, entry.output)
        self._compare_replay(entry)

    def _refuse(self) -> None:
        """Before anything is run again: an eager run that cannot be undone must not be."""
        if (refusal := refusal_of(self.request, self.eager)) is not None:
            raise refusal

    def _back_to_start(self) -> None:
        self._dirty = True
        undo(self._padded)
        undo(self.eager.effects.regions)
        self.request.backend.set_rng_state(self.eager.rng_before)

    def _warm_up(self) -> None:
        self._back_to_start()
        self.stage = f"warming up with {self.request.size} rows"
        self.request.inputs.load(self.request.values, self.request.rows, self.request.size)
        warm = self._warm = EffectRecorder(self.request.options.state_limit_bytes, strict=True)
        self._padded = warm.regions
        with uncached_casts(), warm:
            output = self.request.call(self.request.static_values())
        self._known = set(warm.outside) | warm.made_storages()
        del output

    def _record_with_breaks(self) -> tuple[Graph, Any, list[bool]]:
        """Record; while that fails inside a module and automatic breaks are on, break there and record again."""
        breaks = self.request.auto_breaks
        while True:
            if breaks:
                self.request.mode = CUDAGraphMode.PIECEWISE
            try:
                with uncached_casts(), breaks.marked() if breaks is not None else nullcontext():
                    return self._record()
            except CaptureError as error:
                if breaks is None or not breaks.add(error):
                    raise

    def _record(self) -> tuple[Graph, Any, list[bool]]:
        """The graph, its outputs, and which of their tensors are its own."""
        request = self.request
        self._back_to_start()
        self.stage = f"capturing {request.size} rows"
        static = request.static_values()
        known = self._known | {t.untyped_storage()._cdata for t in static if isinstance(t, torch.Tensor)}
        watch = CaptureWatch(known)
        piecewise = (
            PiecewiseCapture(request.backend, request.pool, watch) if request.mode is CUDAGraphMode.PIECEWISE else None
        )
        try:
            if piecewise is not None:
                with piecewise:
                    is_own = self._give(piecewise, watch, request.call(static))
                return piecewise.graph, piecewise.outputs, is_own
            with request.backend.begin_capture(request.pool) as capture, watch:
                is_own = self._give(capture, watch, request.call(static))
            return capture.graph, capture.outputs, is_own
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{type(error).__name__} after {watch.latest}: {error}", request.backend.classify_error(error)
            ) from error

    def _give(self, capture: Capture | PiecewiseCapture, watch: CaptureWatch, output: Any) -> list[bool]:
        """Leave the outputs to the capture, which then has the only reference to them; tells which are the graph's."""
        buffers = {t.untyped_storage()._cdata for t in self.request.inputs.views(self.request.size)}
        tensors = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
        is_own = [watch.made(t) or t.untyped_storage()._cdata in buffers for t in tensors]
        capture.set_outputs(output, shared=self.request.options.shares_outputs)
        return is_own

    def _complete(self, graph: Graph, output: Any, is_own: list[bool]) -> CUDAGraphEntry:
        request = self.request
        check_values(self.eager.result, output)
        rule = self._output_rule(output)
        views = request.inputs.views(request.size)
        buffers = {t.untyped_storage()._cdata for t in views}
        assert self._warm is not None
        mutated = tuple(i for i, view in enumerate(views) if self._warm.writes_to(view))
        self._check_aliases(mutated)
        if request.options.shares_outputs:
            output = tree_map_only(torch.Tensor, request.backend.weak_reference, output)
        written = [r.target for r in self._padded if r.target.untyped_storage()._cdata not in buffers]
        held = {key: tensor for key, tensor in self._warm.outside.items() if key not in buffers}
        arguments = {v.untyped_storage()._cdata for v in request.values if isinstance(v, torch.Tensor)}
        workspaces = [held[key] for key in held.keys() - request.guard.storages - arguments]
        return CUDAGraphEntry(
            descriptor=request.descriptor,
            mode=request.mode,
            key=request.key,
            size=request.size,
            graph=graph,
            pool=request.pool,
            backend=request.backend,
            inputs=request.inputs,
            outputs=Outputs(output, rule, is_own, request.options.outputs, request.pool, request.buffers),
            mutated=mutated,
            written=WrittenSpans(written) if written else None,
            held=tuple(held.values()),
            workspaces=WorkspaceGuard(workspaces) if workspaces else None,
            guard=request.guard if request.options.guard_weights else None,
            draws=self._warm.draws,
            warm_batch=tuple(map(keep_small, request.values)),
        )

    def _check_aliases(self, mutated: tuple[int, ...]) -> None:
        """The eager run must write to the memory of exactly those arguments that the graph writes to, and to no
        argument's memory by another way (a second argument, a cache that the argument is a part of)."""
        request = self.request
        arguments = [request.values[spec.position] for spec in request.inputs.specs]
        eager_writes = tuple(self.eager.written_inputs)
        storages = [arguments[i].untyped_storage()._cdata for i in mutated]
        shared = len({t.untyped_storage()._cdata for t in arguments}) < len(arguments)
        if eager_writes != mutated or (storages and shared):
            names = [request.inputs.specs[i].name for i in sorted({*eager_writes, *mutated})]
            raise CaptureError(
                f"the call writes to memory that arguments share with each other or with its own state: {names}; "
                "pass copies",
                Reason.ALIASED_ARGUMENTS,
            )

    def _output_rule(self, output: Any) -> OutputRule:
        request = self.request
        if request.rows != request.size:
            rule = learn_output_rule(self.eager.result, request.rows, output, request.size)
        elif request.rule is not None:
            rule = request.rule
        elif all(spec.dim is None for spec in request.inputs.specs):
            rule = fixed_rule(output)
        else:
            rule = self._probe(output)
        if request.rule is not None and rule != request.rule:
            raise CaptureError(
                f"outputs follow the batch differently than in other sizes: {rule} instead of {request.rule}",
                Reason.OUTPUT_ROWS_UNKNOWN,
            )
        return rule

    def _probe(self, output: Any) -> OutputRule:
        """Run at another number of rows to see which dimensions follow the batch.

        With real tensors: a run with fake ones would leave fakes in whatever caches the model keeps.
        """
        request = self.request
        rows = request.size - 1 if request.size > 1 else 2
        self.stage = f"probing the outputs with {rows} rows"
        self._back_to_start()
        values = list(request.values)
        for spec in request.inputs.specs:
            if spec.dim is not None:
                real = request.values[spec.position]
                index = torch.arange(rows, device=real.device) % request.rows
                values[spec.position] = real.index_select(spec.dim, index)
        effects = EffectRecorder(request.options.state_limit_bytes, strict=True)
        try:
            with effects:
                probed = request.call(values)
        except Exception as error:
            raise CaptureError(
                f"the call fails for {rows} rows, so that nothing tells which dimensions of its outputs follow the "
                f"batch: {error}; if it takes one size alone, declare no batch dimension (dynamic={{}})",
                Reason.OUTPUT_ROWS_UNKNOWN,
            ) from error
        finally:
            retry_once(partial(undo, effects.regions), request.backend)
        return learn_output_rule(output, request.size, probed, rows)

    def _compare_replay(self, entry: CUDAGraphEntry) -> None:
        """Replay on this batch from the same start, and compare outputs and written memory with eager's."""
        request = self.request
        self._back_to_start()
        self.stage = f"comparing the replay of {request.size} rows with eager"
        entry.inputs.load(request.values, request.rows, request.size)
        is_padded = request.rows != request.size
        if is_padded:
            self.proven = entry.inputs.tells_rows_apart(request.size)
        request.backend.set_rng_state(self.eager.rng_before)  # a pad rule may have drawn
        self._replay(entry.graph)
        for index, (want, got) in enumerate(zip(self.eager.tensors, entry.outputs.peek(request.rows), strict=True)):
            self._check(f"output {index}", want, got)
        for index, want in self.eager.written_inputs.items():
            name = entry.inputs.specs[index].name
            self._check(
                f"argument {name!r}, which the call writes,", want, entry.inputs.real(index, request.rows, request.size)
            )
        arguments = {request.values[spec.position].untyped_storage()._cdata for spec in request.inputs.specs}
        for region in self.eager.effects.regions:
            if region.target.untyped_storage()._cdata in arguments or (region.is_generator and is_padded):
                continue  # padding draws more
            assert region.after is not None
            self._check(f"state of shape {tuple(region.target.shape)}", region.after, region.read())
        if self.eager.drew_nothing or (request.backend.is_bit_exact and not is_padded):
            self._check("the state of the random generator", self.eager.rng_after, request.backend.rng_state())
        if is_padded and request.options.padding_writes == "refuse":
            self._check_padding_writes()

    def _replay(self, graph: Graph) -> None:
        try:
            graph.replay()
        except Exception as error:
            if isinstance(error, ReplayError) or self.request.backend.is_out_of_memory(error):
                raise
            raise ReplayError(f"{type(error).__name__}: {error}") from error

    def _check(self, what: str, want: torch.Tensor, got: torch.Tensor) -> None:
        request = self.request
        is_like_eager = request.rows == request.size and all(spec.is_dense for spec in request.inputs.specs)
        exact = request.backend.is_bit_exact and is_like_eager
        tolerance = tolerance_for(want.dtype, exact=exact, rtol=request.options.rtol, atol=request.options.atol)
        gap = difference(want, got, tolerance)
        if gap is not None:
            raise VerificationError(
                f"{what} of {request.rows} rows in a graph of {request.size} is not what eager gives: {gap}"
            )

    def _check_padding_writes(self) -> None:
        """The padded run may write only where the eager run writes: what is there now may be live later, even if
        today's padding happens to leave it as it was."""
        buffers = {v.untyped_storage()._cdata for v in self.request.inputs.views(self.request.size)}
        padded = [r for r in self._padded if r.target.untyped_storage()._cdata not in buffers]
        stray = written_elsewhere(padded, self.eager.effects.regions)
        if stray is not None:
            raise CaptureError(
                f"padding rows write to a tensor of shape {tuple(stray.target.shape)} where the real rows leave it "
                "alone; give a pad rule that points at scratch rows, and padding_writes='allow'",
                Reason.PADDING_WRITES_STATE,
            )
