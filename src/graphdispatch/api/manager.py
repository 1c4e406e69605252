"""``CUDAGraphManager``: captures and replays by (batch size, sequence length), padding each batch to the next size.

The front end for engines that work with batch size and sequence length rather than with descriptors.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..backends.tracing import untraced
from ..call.arrays import as_arrays, as_tensors
from ..config import CUDAGraphConfig, parse_mode
from ..decide.decision import Decision
from ..errors import ConfigError, GuardError, ReplayError, check_callable, shown
from ..memory.entry import CUDAGraphEntry
from ..memory.outputs import OutputView
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..serve.prewarm import capture_size, common_sizes, sizes_of_groups
from ..serve.server import Choice
from .lifecycle import Lifecycle
from .registry import CUDAGraphRegistry, Shapes, batch_dims, check_input_shapes, check_output_shapes

__all__ = ["CUDAGraphManager"]


class CUDAGraphManager(Lifecycle):
    """Captures and replays functions of named tensors by (batch size, sequence length). Thread-safe.

    ``execute_or_capture`` is the whole job in one call. A size is captured when it comes the second time
    (``capture_after=1`` in its options: the first). ``replay_graph`` compares a batch first where that is due. A batch
    whose ``seq_len`` is 1 is uniform decode; in mode ``FULL_DECODE_ONLY`` graphs serve only such batches.

    Inputs may be NumPy arrays. The function gets tensors in any case; on the CPU they share the arrays' memory. If all
    inputs are arrays, the outputs are arrays, too; handles (``options.outputs``) and dtypes that NumPy lacks stay.

    ``Prewarmer.capture_one`` can drive a manager after ``keep_examples()``: ``captured_sizes`` are batch sizes.

    Args:
        config: What to capture, how, and within which limits. None: ``CUDAGraphConfig()``.

    Raises:
        ConfigError: ``config`` is no configuration.
        BackendError: Its backend is unknown or has no device here.
    """

    def __init__(self, config: CUDAGraphConfig | None = None) -> None:
        self.config = CUDAGraphConfig.or_default(config, "config")
        self._mode = self.config.mode
        self._sizes = self.config.replace(mode=CUDAGraphMode.FULL)
        self.registry = self._graphs = CUDAGraphRegistry(self.config)
        self.stats = self.registry.stats
        """What happened so far."""

    @property
    def mode(self) -> CUDAGraphMode:
        """The mode that batches are served in now; settable, by member, name or value, at any time.

        Graphs stay when it becomes ``NONE`` and serve again when it comes back.
        """
        return self._mode

    @mode.setter
    def mode(self, mode: CUDAGraphMode | str | int) -> None:
        self._mode = parse_mode(mode)

    def _recipe(self) -> Any:
        make, args, kwargs, _ = super()._recipe()
        return make, args, kwargs, {"mode": self.mode}

    @property
    def is_enabled(self) -> bool:
        """Whether any batch may be served by a graph."""
        return self._mode.has_graphs()

    def get_mode_for_batch(self, batch_size: int, seq_len: int) -> CUDAGraphMode:
        """The runtime mode of a batch, whether its graph exists yet or not.

        Args:
            batch_size: The number of rows.
            seq_len: The tokens of each row; 1 is uniform decode.

        Returns:
            ``FULL``, ``PIECEWISE`` or ``NONE``.
        """
        if not self.is_enabled or not self._sizes.should_use_cudagraph(batch_size, seq_len):
            return CUDAGraphMode.NONE
        return self._mode.decode_mode() if seq_len == 1 else self._mode.mixed_mode()

    def should_capture(self, batch_size: int, seq_len: int) -> bool:
        """Whether the next ``execute_or_capture`` of such a batch would capture.

        Args:
            batch_size: The number of rows.
            seq_len: The tokens of each row.
        """
        mode = self.get_mode_for_batch(batch_size, seq_len)
        if not mode.has_graphs() or self.registry.is_asleep:
            return False
        size = self._sizes.get_padded_batch_size(batch_size)
        latest = self.registry.latest()
        groups = self.registry.groups_of(latest, size, seq_len) if latest is not None else []
        if latest is None or not groups:
            cache = self.registry.cache
            return cache.admission.capture_after == 1 and not cache.is_full
        server = latest.server
        with server.lock:
            return all(server.graphs.current(g, size) is None for g in groups) and any(
                server.admit(group, size)[0] is Reason.CAPTURED_NOW for group in groups
            )

    @untraced
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
        """Capture now, for the size that serves ``batch_size`` rows. What the runs write is put back.

        The example is ``inputs``, or zeros of ``input_shapes``; its shapes are those of ``batch_size`` rows.

        Args:
            batch_size: The number of rows of the example.
            seq_len: The tokens of each row.
            capture_fn: What is captured; it takes its inputs as keyword arguments.
            input_shapes: The shape of each input. It may be omitted where ``inputs`` shows them.
            output_shapes: The expected shape of each output: by key for a mapping, else in order. None: not checked.
            inputs: The example. None: zeros.
            dynamic: The batch dimension of each input that has one. None: dimension 0 of every input.
            dtypes: The dtypes of those zeros. None: float32.

        Returns:
            The entry of the graph.

        Raises:
            ConfigError: Arguments contradict each other, or no graph may serve such a batch.
            CaptureError: There can be no graph, or the manager is frozen or sleeps.
        """
        mode = self.get_mode_for_batch(batch_size, seq_len)
        if not mode.has_graphs():
            raise ConfigError(
                f"batch_size={batch_size}, seq_len={seq_len} is served by no graph in mode {self._mode.name} with at "
                f"most {self._sizes.resolve().largest} rows and {self.config.max_seq_len} tokens"
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
            size=self._sizes.get_padded_batch_size(batch_size),
            mode=mode,
        )

    @untraced
    def replay_graph(self, batch_size: int, seq_len: int, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Serve a batch by its graph.

        A batch that must be compared with eager first (the second one, a padding that no comparison tested, one in
        every ``verify_every``) is served by the captured function, and the graph is compared with it.

        Args:
            batch_size: The number of rows.
            seq_len: The tokens of each row.
            inputs: The inputs by name, of ``batch_size`` rows.

        Returns:
            The outputs for ``batch_size`` rows, owned as ``options.outputs`` says.

        Raises:
            ReplayError: No graph serves the batch now, its weights have moved, or the replay failed. Nothing was
                written that the caller can see, unless ``had_effects`` is true.
            GuardError: The inputs do not fit. Nothing was copied.
        """
        size = self._sizes.get_padded_batch_size(batch_size)
        found = self.registry.holder(size, seq_len)
        if found is None:
            raise ReplayError(f"no graph serves batch_size={batch_size}, seq_len={seq_len}; capture_graph() it first")
        server, group, entry = found
        closed = server.closed(group.route)
        if closed is not None:
            raise ReplayError(f"no graph may replay now: {closed.text}")
        if not entry.is_current():
            raise ReplayError("weights or captured variables moved since the capture; capture_graph() again")
        inputs, are_arrays = as_tensors(inputs, self.registry.device)
        values, rows = entry.check(inputs)
        if rows != batch_size and group.signature.has_rows:
            raise GuardError(f"inputs must have batch_size={batch_size} rows, got {rows}")
        reason, detail = group.objection(entry, values, rows, is_frozen=self.is_frozen)
        if reason is not None and reason is not Reason.VERIFIED_NOW:
            raise ReplayError(f"{rows} rows in a graph of {size}: {detail or reason.text}")
        if reason is not None:
            choice = Choice(Decision.eager(Reason.VERIFIED_NOW, rows), group, values, rows, size, entry)
            with torch.no_grad(), server.lock:
                result = server.perform(choice)[1]
        else:
            result = entry.serve_timed(values, rows, self.stats)
        return as_arrays(result) if are_arrays else result

    @untraced
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

        What ``execute_fn`` raises passes through. A batch that may have to be differentiated runs eagerly; other
        batches that graphs may serve have outputs without a graph of gradients on every path.

        Args:
            batch_size: The number of rows.
            seq_len: The tokens of each row; 1 is uniform decode.
            execute_fn: The function; it takes its inputs as keyword arguments.
            inputs: The inputs by name.
            input_shapes: The expected shape of each input. None: not checked.
            output_shapes: The expected shape of each output: by key for a mapping, else in order. None: not checked.
            dynamic: The batch dimension of each input that has one. None: dimension 0 of every input.

        Returns:
            The outputs for ``batch_size`` rows, owned as ``options.outputs`` says.

        Raises:
            ConfigError: ``inputs`` or outputs contradict the shapes given, or an argument is wrong.
            FallbackError: The configuration is ``strict`` and the batch would run eagerly.
        """
        check_callable("execute_fn", execute_fn)
        inputs, are_arrays = as_tensors(inputs, self.registry.device)
        check_input_shapes(inputs, input_shapes)
        mode = self.get_mode_for_batch(batch_size, seq_len)
        may_serve = mode.has_graphs() and not self.registry.is_asleep
        reason = None if may_serve else self._eager_reason(batch_size, seq_len)
        one = self.registry.find(execute_fn)
        if reason is not None:
            result = one.server.run_eagerly(Decision.eager(reason, batch_size), (), dict(inputs))
        else:
            size = self._sizes.get_padded_batch_size(batch_size)
            dims = batch_dims(inputs, batch_size, dynamic)
            result = one.server.serve(self.registry.route(one, size, seq_len, mode, dims), (), dict(inputs))
        if output_shapes:
            check_output_shapes(result.get() if isinstance(result, OutputView) else result, output_shapes)
        return as_arrays(result) if are_arrays else result

    def keep_examples(self) -> None:
        """Keep two rows of one batch of each signature from now on, as examples for ``capture_size``."""
        self.registry.keep_examples()

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """The batch sizes that have a graph for every signature seen so far (function, sequence length, shapes)."""
        found: list[set[int]] = []
        for server, routes in self.registry.by_sizes():
            with server.lock:
                found += sizes_of_groups(routes)
        return common_sizes(found)

    @untraced
    def capture_size(self, size: int) -> bool:
        """Capture a batch size now, while nothing is to be served, for every signature of which an example is kept.

        It leaves no effect.

        Args:
            size: One of the configuration's sizes.

        Returns:
            Whether each signature has a graph of it then.

        Raises:
            ConfigError: The configuration has no such size.
            FallbackError: The configuration is ``strict`` and there can be no graph.
        """
        if size not in self._sizes.resolve().sizes:
            raise ConfigError(f"size must be one of {self._sizes.resolve().sizes}, got {shown(size)}")
        for server, routes in self.registry.by_sizes():
            with torch.no_grad(), server.lock:
                if routes and self.is_enabled:
                    capture_size(server, routes, size)
        return size in self.captured_sizes

    def reset(self) -> None:
        """Release all graphs and forget what was seen and counted."""
        self.registry.clear()
        self.stats.reset()

    def __repr__(self) -> str:
        return f"<CUDAGraphManager {self._mode.name}: {self.registry.num_graphs} graphs, {self.stats!r}>"

    def _eager_reason(self, batch_size: int, seq_len: int) -> Reason:
        """Why no graph may serve this batch, whatever is captured. Raises ``ConfigError`` for no integers."""
        is_within = self._sizes.should_use_cudagraph(batch_size, seq_len)
        if not self.is_enabled:
            return Reason.DISABLED
        if self.registry.is_asleep:
            return Reason.ASLEEP
        if batch_size < 1:
            return Reason.NO_ROWS
        if not is_within:
            return Reason.ABOVE_LARGEST_SIZE if batch_size > self._sizes.resolve().largest else Reason.NOT_CAPTURED
        return Reason.MODE_MISMATCH
