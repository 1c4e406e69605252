"""``CUDAGraphManager``: captures and replays by (batch size, sequence length), padding each batch to the next size.

The front door for engines that think in batch size and sequence length rather than in descriptors.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..backends import get_backend
from ..call.signature import Refusal
from ..config import CUDAGraphConfig, parse_mode
from ..errors import CaptureError, ConfigError, FallbackError, GuardError, ReplayError
from ..memory.budget import MemoryBudget
from ..memory.entry import CUDAGraphEntry
from ..memory.outputs import OutputView
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..stats import CUDAGraphStats
from .registry import (
    CUDAGraphRegistry,
    Member,
    Shapes,
    batch_dims,
    check_callable,
    check_input_shapes,
    check_output_shapes,
)

__all__ = ["CUDAGraphManager"]


class CUDAGraphManager:
    """Decides by configuration which batches graphs serve, and serves them. Thread-safe.

    ``execute_or_capture`` is the whole job in one call. A batch whose ``seq_len`` is 1 is uniform decode; in mode
    ``FULL_DECODE_ONLY`` only such batches are served by graphs. ``budget`` is one that other front doors share.
    """

    def __init__(self, config: CUDAGraphConfig | None = None, *, budget: MemoryBudget | None = None) -> None:
        self.config = CUDAGraphConfig.or_default(config, "config")
        self._mode = self._checked_mode(self.config.mode)
        self._resolved = self.config.resolve()
        self._backend = get_backend(self.config.backend)
        self.registry = CUDAGraphRegistry(self.config, budget=budget)
        self._is_asleep = False
        self._lock = threading.RLock()

    @property
    def mode(self) -> CUDAGraphMode:
        """The mode that batches are served in now; settable, by member, name or value, at any time.

        Graphs stay when it becomes ``NONE`` and serve again when it comes back. A manager whose configuration was
        made with ``NONE`` has no sizes, so its mode cannot be changed (``ConfigError``).
        """
        return self._mode

    @mode.setter
    def mode(self, mode: CUDAGraphMode | str | int) -> None:
        wanted = self._checked_mode(parse_mode(mode))
        if wanted.has_graphs() and not self._resolved.sizes:
            raise ConfigError(
                f"mode cannot become {wanted.name}: the configuration has no sizes, since its mode is NONE"
            )
        self._mode = wanted

    @property
    def is_enabled(self) -> bool:
        """Whether any batch may be served by a graph."""
        return self._mode.has_graphs()

    def get_mode_for_batch(self, batch_size: int, seq_len: int) -> CUDAGraphMode:
        """The runtime mode of a batch, whether its graph exists yet or not."""
        if not self.is_enabled or not self.config.should_use_cudagraph(batch_size, seq_len):
            return CUDAGraphMode.NONE
        return self._mode.decode_mode() if seq_len == 1 else self._mode.mixed_mode()

    def should_capture(self, batch_size: int, seq_len: int) -> bool:
        """Whether the next ``execute_or_capture`` of such a batch would capture."""
        if not self.get_mode_for_batch(batch_size, seq_len).has_graphs():
            return False
        key = self._key(batch_size, seq_len)
        return not self.registry.has(*key) and self._refusal(key, self.registry.latest_member(key)) is None

    def capture_graph(
        self,
        batch_size: int,
        seq_len: int,
        capture_fn: Callable[..., Any],
        input_shapes: Shapes | None = None,
        output_shapes: Shapes | None = None,
        *,
        inputs: Mapping[str, torch.Tensor] | None = None,
        dynamic: Mapping[str, int] | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> CUDAGraphEntry:
        """Capture now, for the size that serves ``batch_size`` rows; as ``CUDAGraphRegistry.capture``.

        The shapes are those of ``batch_size`` rows. Raises ``ConfigError`` for a batch that no graph may serve, and
        ``CaptureError`` if there can be no graph or between ``sleep()`` and ``wake()``.
        """
        if self._is_asleep:
            raise CaptureError(f"no capture: {Reason.ASLEEP.text}", Reason.ASLEEP)
        if not self.get_mode_for_batch(batch_size, seq_len).has_graphs():
            raise ConfigError(
                f"batch_size={batch_size}, seq_len={seq_len} is served by no graph in mode {self._mode.name} with at "
                f"most {self._resolved.largest} rows and {self.config.max_seq_len} tokens"
            )
        return self.registry.capture(
            batch_size,
            seq_len,
            capture_fn,
            input_shapes,
            output_shapes,
            inputs=inputs,
            dynamic=dynamic,
            dtypes=dtypes,
            size=self._key(batch_size, seq_len)[0],
        )

    def replay_graph(self, batch_size: int, seq_len: int, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Serve a batch by its graph: the outputs for ``batch_size`` rows, owned as ``options.outputs`` says.

        Raises ``ReplayError`` if there is no graph for it or its weights have moved, ``GuardError`` for inputs that do
        not fit; nothing was copied then.
        """
        key = self._key(batch_size, seq_len)
        entry = self.registry.get(*key)
        if entry is None:
            raise ReplayError(f"no graph serves batch_size={batch_size}, seq_len={seq_len}; capture_graph() it first")
        if not entry.is_current():
            raise ReplayError("weights or captured variables moved since the capture; capture_graph() again")
        values, rows = entry.check(inputs)
        if rows != batch_size and any(spec.dim is not None for spec in entry.inputs.specs):
            raise GuardError(f"inputs must have batch_size={batch_size} rows, got {rows}")
        return entry.serve_timed(values, rows, self.stats)

    def execute_or_capture(
        self,
        batch_size: int,
        seq_len: int,
        execute_fn: Callable[..., Any],
        inputs: Mapping[str, torch.Tensor],
        input_shapes: Shapes | None = None,
        output_shapes: Shapes | None = None,
        *,
        dynamic: Mapping[str, int] | None = None,
    ) -> Any:
        """Serve one batch: by its graph, by capturing it, or eagerly with a reason in ``stats``. Always eager's answer.

        Raises what ``execute_fn`` raises; ``ConfigError`` if ``inputs`` or outputs contradict the shapes given;
        ``FallbackError`` with ``strict``. A batch that may have to be differentiated runs eagerly; other batches that
        graphs may serve have outputs without a graph of gradients on every path.
        """
        check_callable("execute_fn", execute_fn)
        check_input_shapes(inputs, input_shapes)
        result = self._execute(batch_size, seq_len, execute_fn, inputs, dynamic)
        is_view = isinstance(result, OutputView)
        if output_shapes:
            check_output_shapes(result.get() if is_view else result, output_shapes)
        return OutputView(result, None) if self.config.options.returns_handles and not is_view else result

    def _execute(
        self,
        batch_size: int,
        seq_len: int,
        execute_fn: Callable[..., Any],
        inputs: Mapping[str, torch.Tensor],
        dynamic: Mapping[str, int] | None,
    ) -> Any:
        key = self._key(batch_size, seq_len)
        reason = self._eager_reason(batch_size, seq_len)
        if reason is None and torch.is_grad_enabled() and self.registry.needs_gradients(key, execute_fn, inputs):
            reason = Reason.NEEDS_GRADIENTS
        if reason is not None:
            return self._run_eagerly(execute_fn, inputs, batch_size, reason)
        with torch.no_grad(), self._lock:
            member = self.registry.member(key, execute_fn)
            member.graphs.refresh()
            entry = member.entry
            if entry is not None:
                return self._serve_or_verify(member, entry, inputs, batch_size, execute_fn)
            if (refused := self._refusal(key, member)) is not None:
                batch_dims(inputs, batch_size, dynamic)
                self.registry.sight(member)
                return self._run_eagerly(execute_fn, inputs, batch_size, refused.reason, refused.detail)
            outcome = self.registry.run_and_capture(member, inputs, batch_size, dynamic=dynamic)
            if outcome.entry is None and outcome.error is None:  # refused before anything ran
                return self._run_eagerly(execute_fn, inputs, batch_size, outcome.reason, outcome.detail)
            self.stats.record_miss(outcome.reason, batch_size)
            return self._unless_strict(outcome.take_answer(), outcome.reason, outcome.detail)

    @property
    def stats(self) -> CUDAGraphStats:
        """What happened so far."""
        return self.registry.stats

    def invalidate(self, tag: str = "") -> None:
        """Release all graphs, since what they captured changed in a way that no guard sees; batches capture anew.

        ``tag`` says what changed, and is kept with ``stats.last_evictions``.
        """
        with self._lock:
            self.registry.invalidate(tag)

    def sleep(self, tag: str = "") -> None:
        """Release graphs, buffers and pool, and run batches eagerly until ``wake()``: while weights are unloaded or
        replaced. Waits for batches that a graph serves now."""
        with self._lock:
            self._is_asleep = True
            self.registry.sleep(tag)

    def wake(self) -> None:
        """End ``sleep()``: graphs are captured again as batches come. Harmless when awake."""
        self._is_asleep = False

    def reset(self) -> None:
        """Release all graphs and forget what was seen and counted."""
        with self._lock:
            self.registry.clear()
            self.stats.reset()

    def __repr__(self) -> str:
        return f"<CUDAGraphManager {self._mode.name}: {self.registry.num_graphs} graphs, {self.stats!r}>"

    def _key(self, batch_size: int, seq_len: int) -> tuple[int, int]:
        return self.config.get_padded_batch_size(batch_size), seq_len

    def _checked_mode(self, mode: CUDAGraphMode) -> CUDAGraphMode:
        if mode.has_piecewise_cudagraphs():
            raise ConfigError(f"mode must be NONE, FULL or FULL_DECODE_ONLY here, got {mode.name}")
        return mode

    def _eager_reason(self, batch_size: int, seq_len: int) -> Reason | None:
        """Why this batch cannot be served whatever is captured, or None."""
        if not self.is_enabled:
            return Reason.DISABLED
        if self._is_asleep:
            return Reason.ASLEEP
        if self._backend.is_watched():
            return Reason.INSIDE_CAPTURE
        if batch_size < 1:
            return Reason.NO_ROWS
        if not self.config.should_use_cudagraph(batch_size, seq_len):
            return Reason.ABOVE_LARGEST_SIZE if batch_size > self._resolved.largest else Reason.NOT_CAPTURED
        if not self.get_mode_for_batch(batch_size, seq_len).has_graphs():
            return Reason.MODE_MISMATCH
        return None

    def _refusal(self, key: tuple[int, int], member: Member | None) -> Refusal | None:
        """Why a callable without a graph under ``key`` (None: one that is new there) is not captured now, or None."""
        if self._is_asleep:
            return Refusal(Reason.ASLEEP, "")
        group = member.group if member is not None else None
        failure = group.blocked(key[0]) if group is not None else None
        if failure is not None:
            return Refusal(failure.reason, failure.detail)
        return self.registry.refusal((member.place if member is not None else (key, 0), key[0]))

    def _serve_or_verify(
        self,
        member: Member,
        entry: CUDAGraphEntry,
        inputs: Mapping[str, torch.Tensor],
        rows: int,
        fn: Callable[..., Any],
    ) -> Any:
        graphs, group = member.graphs, member.group
        assert group is not None
        try:
            values, _ = entry.check(inputs)
        except GuardError as error:
            return self._run_eagerly(fn, inputs, rows, Reason.ARGUMENTS_CHANGED, str(error))
        if group.needs_check(entry, values, rows):
            with torch.no_grad(), graphs.lock:
                outcome = graphs.verify(group, values, rows, entry)
            self.stats.record_miss(outcome.reason, rows)
            return self._unless_strict(outcome.take_answer(), outcome.reason, outcome.detail)
        try:
            return entry.serve_timed(values, rows, self.stats)
        except ReplayError as error:
            if error.had_effects:
                raise
            return self._run_eagerly(fn, inputs, rows, Reason.REPLAY_FAILED, str(error))

    def _run_eagerly(
        self,
        fn: Callable[..., Any],
        inputs: Mapping[str, torch.Tensor],
        rows: int,
        reason: Reason,
        detail: str = "",
    ) -> Any:
        self.stats.record_miss(reason, rows)
        self._unless_strict(None, reason, detail)
        return fn(**inputs)

    def _unless_strict(self, result: Any, reason: Reason, detail: str) -> Any:
        if self.config.strict and not reason.leads_to_graph:
            raise FallbackError(f"eager: {detail or reason.text}", reason)
        return result
