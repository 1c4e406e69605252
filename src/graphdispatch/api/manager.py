"""``CUDAGraphRegistry`` keeps graphs by (batch size, sequence length); ``CUDAGraphManager`` serves batches by them.

The front ends for engines that work with batch size and sequence length rather than with descriptors.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..backends.tracing import untraced
from ..config import CUDAGraphConfig, parse_mode
from ..decide.decision import Decision
from ..errors import CaptureError, ConfigError, GuardError, ReplayError, check_callable, check_count, shown
from ..memory.entry import CUDAGraphEntry
from ..memory.outputs import OutputView
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..serve.prewarm import capture_example, capture_size, common_sizes, sizes_of_groups
from ..serve.server import Choice
from .keyed_graphs import KeyedGraphs
from .lifecycle import Lifecycle
from .named_inputs import (
    Shapes,
    as_arrays,
    as_tensors,
    batch_dims,
    check_input_shapes,
    check_output_shapes,
    make_example,
)

__all__ = ["CUDAGraphManager", "CUDAGraphRegistry"]


class CUDAGraphRegistry(Lifecycle):
    """Graphs by (batch size, sequence length); all share one pool, one cache and one set of statistics.

    A function takes its static inputs by name, as keyword arguments, and returns a tensor or a nest of tensors. Every
    input's dimension 0 is the batch unless ``dynamic`` says which inputs have one and where. Shapes may be omitted
    where ``inputs=`` shows them. A key has one graph; a manager, which captures what comes often, has one for each
    callable. Of the callables without a graph, the eight that were used last are remembered. Thread-safe.

    Args:
        config: What to capture, how, and within which limits. None: ``CUDAGraphConfig()``.

    Raises:
        ConfigError: ``config`` is no configuration.
        BackendError: Its backend is unknown or has no device here.
    """

    _graphs: KeyedGraphs

    def __init__(self, config: CUDAGraphConfig | None = None) -> None:
        self.config = CUDAGraphConfig.or_default(config, "config")
        self._graphs = KeyedGraphs(self.config)
        self.stats = self._graphs.stats
        """Captures, replays, hits, misses and reasons over all graphs."""

    @untraced
    def capture(
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
        size: int | None = None,
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
    ) -> CUDAGraphEntry:
        """Capture a function for ``batch_size`` rows, replacing an older graph of the key.

        The example that it is captured and checked with is ``inputs``, or zeros of ``input_shapes``. What the runs
        write is put back.

        Args:
            batch_size: The number of rows of the example.
            seq_len: The tokens of each row.
            capture_fn: What is captured; it takes its inputs as keyword arguments.
            input_shapes: The shape of each input. It may be omitted where ``inputs`` shows them.
            output_shapes: The expected shape of each output: by key for a mapping, else in order. None: not checked.
            inputs: The example, by name. None: zeros.
            dynamic: The batch dimension of each input that has one. None: dimension 0 of every input.
            dtypes: The dtypes of those zeros. None: float32.
            size: The rows of the graph, of which the example fills ``batch_size``; the key is then ``(size, seq_len)``.
                None: ``batch_size``.
            mode: ``FULL`` or ``PIECEWISE``.

        Returns:
            The entry of the graph.

        Raises:
            ConfigError: Arguments contradict each other.
            CaptureError: There can be no graph, or the registry is frozen or sleeps.
        """
        check_callable("capture_fn", capture_fn)
        graphs = self._graphs
        if graphs.is_frozen:
            raise CaptureError(f"no capture: {Reason.FROZEN.text}", Reason.FROZEN)
        if graphs.is_asleep:
            raise CaptureError(f"no capture: {Reason.ASLEEP.text}", Reason.ASLEEP)
        check_count("batch_size", batch_size)
        if inputs is None:
            inputs = make_example(input_shapes, dtypes, graphs.device)
        else:
            check_input_shapes(inputs, input_shapes)
        size = batch_size if size is None else size
        check_count("size", size, batch_size)
        check_count("seq_len", seq_len, 0)
        if mode not in graphs.tables:
            raise ConfigError(f"mode must be CUDAGraphMode.FULL or PIECEWISE, got {shown(mode)}")
        one = graphs.find(capture_fn)
        graphs.drop(size, seq_len, but=one)
        route = graphs.route(one, size, seq_len, mode, batch_dims(inputs, batch_size, dynamic))
        name = f"batch_size={batch_size}, seq_len={seq_len}"
        result = capture_example(one.server, route, ((), dict(inputs)), batch_size, size, name)
        try:
            check_output_shapes(result.answer, output_shapes)
        except ConfigError:
            self.remove(size, seq_len)
            raise
        assert result.entry is not None
        return result.entry

    def get(self, batch_size: int, seq_len: int) -> CUDAGraphEntry | None:
        """The entry of exactly this key; if several callables have one, the one that was used last.

        Args:
            batch_size: The rows of the graph.
            seq_len: The tokens of each row.

        Returns:
            The entry, or None.
        """
        found = self._graphs.holder(batch_size, seq_len)
        return found.entry if found is not None else None

    def has(self, batch_size: int, seq_len: int) -> bool:
        """Whether there is a graph for exactly this key now.

        Args:
            batch_size: The rows of the graph.
            seq_len: The tokens of each row.
        """
        return self.get(batch_size, seq_len) is not None

    def remove(self, batch_size: int, seq_len: int) -> bool:
        """Release the graphs of a key.

        Args:
            batch_size: The rows of the graph.
            seq_len: The tokens of each row.

        Returns:
            Whether there was a graph.
        """
        return self._graphs.drop(batch_size, seq_len)

    def clear(self) -> None:
        """Release all graphs. The statistics stay."""
        self._graphs.clear()

    @property
    def num_graphs(self) -> int:
        """How many graphs there are now."""
        return len(self._graphs.cache)

    @property
    def memory_bytes(self) -> int:
        """Bytes held by the pool, the graphs, and their static inputs and output buffers."""
        return self.memory_report().total

    def __repr__(self) -> str:
        return f"<CUDAGraphRegistry {self.num_graphs} of {self.config.max_cached_graphs} graphs, {self.stats!r}>"


class CUDAGraphManager(CUDAGraphRegistry):
    """A registry that decides which batches graphs serve, pads them, and captures what comes often. Thread-safe.

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
        super().__init__(config)
        self._mode = self.config.mode
        self._sizes = self.config.replace(mode=CUDAGraphMode.FULL)

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
        if not mode.has_graphs() or self._graphs.is_asleep:
            return False
        size = self._sizes.get_padded_batch_size(batch_size)
        latest = self._graphs.latest
        groups = latest.groups_of(size, seq_len) if latest is not None else []
        if latest is None or not groups:
            cache = self._graphs.cache
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
        return self.capture(
            batch_size,
            seq_len,
            capture_fn,
            input_shapes,
            output_shapes,
            inputs=inputs if inputs is None else as_tensors(inputs, self._graphs.device)[0],
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
            ReplayError: No graph serves the batch now, the call needs gradients, weights have moved, or the replay
                failed. Nothing was written that the caller can see, unless ``had_effects`` is true.
            GuardError: The inputs do not fit. Nothing was copied.
        """
        size = self._sizes.get_padded_batch_size(batch_size)
        found = self._graphs.holder(size, seq_len)
        if found is None:
            raise ReplayError(f"no graph serves batch_size={batch_size}, seq_len={seq_len}; capture_graph() it first")
        server, group, entry = found
        closed = server.closed(group.route) or (None if entry.fits_modes() else Reason.MODE_ACTIVE)
        if closed is not None:
            raise ReplayError(f"no graph may replay now: {closed.text}")
        if not entry.is_current():
            raise ReplayError("weights or captured variables moved since the capture; capture_graph() again")
        inputs, are_arrays = as_tensors(inputs, self._graphs.device)
        values, rows = entry.check(inputs)
        if torch.is_grad_enabled() and server.needs_gradients((), {}):
            raise ReplayError(f"no graph may replay now: {Reason.NEEDS_GRADIENTS.text}")
        if rows != batch_size and group.signature.has_rows:
            raise GuardError(f"inputs must have batch_size={batch_size} rows, got {rows}")
        reason, detail = entry.objection(values, rows, is_frozen=self.is_frozen)
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
        inputs, are_arrays = as_tensors(inputs, self._graphs.device)
        check_input_shapes(inputs, input_shapes)
        mode = self.get_mode_for_batch(batch_size, seq_len)
        may_serve = mode.has_graphs() and not self._graphs.is_asleep
        reason = None if may_serve else self._eager_reason(batch_size, seq_len)
        one = self._graphs.find(execute_fn)
        if reason is not None:
            result = one.server.run_eagerly(Decision.eager(reason, batch_size), (), dict(inputs))
        else:
            size = self._sizes.get_padded_batch_size(batch_size)
            dims = batch_dims(inputs, batch_size, dynamic)
            result = one.server.serve(self._graphs.route(one, size, seq_len, mode, dims), (), dict(inputs))
        if output_shapes:
            check_output_shapes(result.get() if isinstance(result, OutputView) else result, output_shapes)
        return as_arrays(result) if are_arrays else result

    def keep_examples(self) -> None:
        """Keep two rows of one batch of each signature from now on, as examples for ``capture_size``."""
        self._graphs.keep_examples()

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """The batch sizes that have a graph for every signature seen so far (function, sequence length, shapes)."""
        found: list[set[int]] = []
        for server, routes in self._graphs.by_sizes():
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
        for server, routes in self._graphs.by_sizes():
            with torch.no_grad(), server.lock:
                if routes and self.is_enabled:
                    capture_size(server, routes, size)
        return size in self.captured_sizes

    def reset(self) -> None:
        """Release all graphs and forget what was seen and counted."""
        self.clear()
        self.stats.reset()

    def __repr__(self) -> str:
        return f"<CUDAGraphManager {self._mode.name}: {self.num_graphs} graphs, {self.stats!r}>"

    def _eager_reason(self, batch_size: int, seq_len: int) -> Reason:
        """Why no graph may serve this batch, whatever is captured. Raises ``ConfigError`` for no integers."""
        is_within = self._sizes.should_use_cudagraph(batch_size, seq_len)
        if not self.is_enabled:
            return Reason.DISABLED
        if self._graphs.is_asleep:
            return Reason.ASLEEP
        if batch_size < 1:
            return Reason.NO_ROWS
        if not is_within:
            return Reason.ABOVE_LARGEST_SIZE if batch_size > self._sizes.resolve().largest else Reason.NOT_CAPTURED
        return Reason.MODE_MISMATCH
