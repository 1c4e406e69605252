"""``CUDAGraphRegistry`` keeps graphs by (batch size, sequence length); ``CUDAGraphManager`` serves batches by them.

The front ends for engines that work with batch size and sequence length rather than with descriptors.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

import torch

from ..backends import get_backend
from ..backends.tracing import untraced
from ..config import CUDAGraphConfig, parse_mode
from ..copying import make_lock
from ..errors import ConfigError, GuardError, ReplayError, check_callable, check_count, shown
from ..modes import CUDAGraphMode
from ..proof.state.objects import same_callable
from ..reasons import Reason
from ..runtime.cache import make_cache
from ..runtime.choice import Choice, admit
from ..runtime.decide import Decision, Memo, SizeTable
from ..runtime.entry import CUDAGraphEntry
from ..runtime.graph_set import GraphSet
from ..runtime.group import MOST_ROUTES, GraphGroup, Route
from ..runtime.outputs import OutputView
from ..runtime.prewarm import capture_example, refuse_closed
from ..runtime.rules import ArgumentRules
from ..runtime.server import Server
from ..sizes import ROWS
from ..stats import EvictionReason
from .lifecycle import Lifecycle, capturer_for
from .named_inputs import (
    Shapes,
    as_arrays,
    as_tensors,
    batch_dims,
    check_inputs,
    check_outputs,
    make_example,
    write_back,
)

_MOST_WAITING = 8  # callables that have no graph


class _Callable(NamedTuple):
    """One callable with its server, and its routes by sequence length, mode and batch dimensions."""

    server: Server
    routes: Memo[Any, Route]

    def groups_of(self, size: int, seq_len: int) -> list[GraphGroup]:
        """The groups whose calls of this sequence length the graph of ``size`` would serve."""
        routes = [route for route in list(self.routes.values()) if route.seq_len == seq_len]
        return [group for route in routes for group in route.groups if size in route.table.sizes]


class CUDAGraphRegistry(Lifecycle):
    """Graphs by (batch size, sequence length); all share one pool, one cache and one set of statistics.

    A function takes its static inputs by name, as keyword arguments, and returns a tensor or a nest of tensors. Every
    input's dimension 0 is the batch unless ``dynamic`` says which inputs have one and where. Shapes may be omitted
    where ``inputs=`` shows them. A key has one graph; a manager, which captures what comes often, has one for each
    callable. Of the callables without a graph, the eight that were used last are remembered; ``sleep`` and ``clear``
    let go of all of them. Thread-safe.

    Args:
        config: What to capture, how, and within which limits. None: ``CUDAGraphConfig()``.

    Raises:
        ConfigError: ``config`` is no configuration.
        BackendError: Its backend is unknown or has no device here.
    """

    def __init__(self, config: CUDAGraphConfig | None = None) -> None:
        self.config = config = CUDAGraphConfig.or_default(config, "config")
        backend = get_backend(config.backend)
        self._device = backend.device
        self._graph_cache = make_cache(config.options, config.max_cached_graphs, backend=backend)
        self.stats = self._graph_cache.stats
        """Captures, replays, hits, misses and reasons over all graphs."""
        self._callables: list[_Callable] = []
        """Those that are remembered; the one that was used last comes last."""
        self._numbers = count(1)
        self._lock = make_lock()
        self._sizes = sizes = config.replace(mode=CUDAGraphMode.FULL)
        runtime_modes = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
        self._tables = {m: SizeTable(sizes.sizes, m, pad_batches=sizes.pad_batches) for m in runtime_modes}
        """The sizes of the configuration by runtime mode."""

    @property
    def _graph_sets(self) -> list[GraphSet]:
        return [one.server.graphs for one in self._callables]

    def _rearm(self, reason: EvictionReason) -> None:
        super()._rearm(reason)
        for victim in self._graph_cache.retire(self._graph_cache, reason):  # of callables that are remembered no more
            victim.release()
        if reason is EvictionReason.ASLEEP:
            self._forget_callables()

    def _forget_callables(self) -> None:
        """Let go of all callables, which may hold weights; one that comes again is new."""
        with self._lock:
            self._callables = []

    def _find(self, fn: Callable[..., Any]) -> _Callable:
        """The server and routes of a callable, made if it is new."""
        latest = self._callables[-1:]
        if latest and latest[0].server.fn is fn:
            return latest[0]
        with self._lock:
            same = (one for one in self._callables if one.server.fn is fn)
            alike = (one for one in self._callables if same_callable(one.server.fn, fn))
            found = next(chain(same, alike), None) or self._make(fn)
            self._callables = [*(one for one in self._callables if one is not found), found]
            return found

    def _make(self, fn: Callable[..., Any]) -> _Callable:
        """A server for a callable that is new; room is made by forgetting one that has no graph."""
        waiting = [one for one in self._callables if all(e.is_released for e in one.server.graphs.entries())]
        gone = waiting[: 1 - _MOST_WAITING]
        self._callables = [one for one in self._callables if one not in gone]
        options = self.config.options
        server = Server(
            fn, options, self._graph_cache, capturer_for(options), strict=self.config.strict, times_replays=True
        )
        return _Callable(server, Memo(partial(self._make_route, next(self._numbers)), MOST_ROUTES))

    def _route(self, one: _Callable, size: int, seq_len: int, mode: CUDAGraphMode, dynamic: Mapping[str, int]) -> Route:
        """The route of batches that graphs of one size serve; sizes of the configuration share one."""
        own = 0 if size in self._tables[mode].sizes else size
        return one.routes[seq_len, mode, own, tuple(dynamic.items())]

    def _make_route(self, number: int, key: tuple[int, CUDAGraphMode, int, tuple[tuple[str, int], ...]]) -> Route:
        seq_len, mode, own, dims = key
        table = SizeTable.of_one(own, mode, pads=True) if own else self._tables[mode]
        rules = ArgumentRules({name: {dim: ROWS} for name, dim in dims}, {}, frozenset())
        return Route((number, seq_len, mode, own), table, rules, seq_len=seq_len)

    def _holder(self, size: int, seq_len: int) -> tuple[Server, GraphGroup, CUDAGraphEntry] | None:
        """The entry of a key, with its server and group; if several callables have one, the one that was used last."""
        found = [
            (one.server, group, entry)
            for one in self._callables
            for group in one.groups_of(size, seq_len)
            if (entry := group.current(size)) is not None
        ]
        return max(found, key=lambda held: held[2].last_used, default=None)

    def _drop(self, size: int, seq_len: int, *, but: _Callable | None = None) -> bool:
        """Release the graphs of a key; whether there was one."""
        others = [one for one in self._callables if one is not but]
        found = [one.server.graphs.remove(group, size) for one in others for group in one.groups_of(size, seq_len)]
        return any(found)

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
        size: int | None = None,
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
    ) -> CUDAGraphEntry:
        """Capture a function for ``batch_size`` rows, replacing an older graph of the key.

        The example that it is captured and checked with is ``inputs``, or float32 zeros of ``input_shapes``. What the
        runs write is put back.

        Args:
            batch_size: The number of rows of the example.
            seq_len: The tokens of each row.
            capture_fn: What is captured; it takes its inputs as keyword arguments.
            input_shapes: The shape of each input. It may be omitted where ``inputs`` shows them.
            output_shapes: The expected shape of each output: by key for a mapping, else in order. None: not checked.
            inputs: The example, by name, for inputs of other dtypes or values. None: zeros.
            dynamic: The batch dimension of each input that has one. None: dimension 0 of every input.
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
        check_count("batch_size", batch_size)
        if inputs is None:
            inputs = make_example(input_shapes, self._device)
        else:
            check_inputs(inputs, input_shapes)
        size = batch_size if size is None else size
        check_count("size", size, batch_size)
        check_count("seq_len", seq_len, 0)
        if mode not in self._tables:
            raise ConfigError(f"mode must be CUDAGraphMode.FULL or PIECEWISE, got {shown(mode)}")
        one = self._find(capture_fn)
        route = self._route(one, size, seq_len, mode, batch_dims(inputs, batch_size, dynamic))
        name = f"batch_size={batch_size}, seq_len={seq_len}"
        refuse_closed(one.server, route)
        self._drop(size, seq_len, but=one)  # before, or the graph of another key would make room
        result = capture_example(one.server, route, ((), dict(inputs)), batch_size, size, name)
        try:
            check_outputs(result.answer, output_shapes)
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
        found = self._holder(batch_size, seq_len)
        return found[2] if found is not None else None

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
        return self._drop(batch_size, seq_len)

    def clear(self) -> None:
        """Release all graphs, and let go of all callables. The statistics stay."""
        self._rearm(EvictionReason.DROPPED)
        self._graph_cache.admission.clear()
        self._forget_callables()

    @property
    def num_graphs(self) -> int:
        """How many graphs there are now."""
        return len(self._graph_cache)

    def __repr__(self) -> str:
        return f"<CUDAGraphRegistry {self.num_graphs} of {self.config.max_cached_graphs} graphs, {self.stats!r}>"


class CUDAGraphManager(CUDAGraphRegistry):
    """A registry that decides which batches graphs serve, pads them, and captures what comes often. Thread-safe.

    ``execute_or_capture`` is the whole job in one call. A size is captured when it comes the second time
    (``capture_after=1`` in its options: the first). ``replay_graph`` compares a batch first where that is due. A batch
    whose ``seq_len`` is 1 is uniform decode; in mode ``FULL_DECODE_ONLY`` graphs serve only such batches.

    Inputs may be NumPy arrays. The function gets tensors in any case; on the CPU they share the arrays' memory, and
    elsewhere the arrays have afterwards what the function wrote. If all inputs are arrays, the outputs are arrays, too;
    handles (``options.outputs``) and dtypes that NumPy lacks stay.

    Args:
        config: What to capture, how, and within which limits. None: ``CUDAGraphConfig()``.

    Raises:
        ConfigError: ``config`` is no configuration.
        BackendError: Its backend is unknown or has no device here.
    """

    def __init__(self, config: CUDAGraphConfig | None = None) -> None:
        super().__init__(config)
        self._mode = self.config.mode

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
        is_within = self._sizes.should_use_cudagraph(batch_size, seq_len)
        if not (self.is_enabled and is_within):
            return CUDAGraphMode.NONE
        return self._mode.decode_mode() if seq_len == 1 else self._mode.mixed_mode()

    def should_capture(self, batch_size: int, seq_len: int) -> bool:
        """Whether the next ``execute_or_capture`` of such a batch would capture.

        Args:
            batch_size: The number of rows.
            seq_len: The tokens of each row.
        """
        mode = self.get_mode_for_batch(batch_size, seq_len)
        if not mode.has_graphs() or self._graph_cache.is_asleep or self.is_frozen:
            return False
        size = self._sizes.get_padded_batch_size(batch_size)
        latest = self._callables[-1:]
        groups = [group for one in latest for group in one.groups_of(size, seq_len)]
        if not groups:
            return self._graph_cache.admission.capture_after == 1 and self._graph_cache.has_room(0)
        server = latest[0].server
        with server.lock:
            return all(g.current(size) is None for g in groups) and any(
                admit(server.graphs, group, size)[0] is Reason.CAPTURED_NOW for group in groups
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
    ) -> CUDAGraphEntry:
        """Capture now, for the size that serves ``batch_size`` rows. What the runs write is put back.

        The example is ``inputs``, or float32 zeros of ``input_shapes``; its shapes are those of ``batch_size`` rows.

        Args:
            batch_size: The number of rows of the example.
            seq_len: The tokens of each row.
            capture_fn: What is captured; it takes its inputs as keyword arguments.
            input_shapes: The shape of each input. It may be omitted where ``inputs`` shows them.
            output_shapes: The expected shape of each output: by key for a mapping, else in order. None: not checked.
            inputs: The example, for inputs of other dtypes or values. None: zeros.
            dynamic: The batch dimension of each input that has one. None: dimension 0 of every input.

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
                f"most {self._sizes.sizes[-1]} rows and {self.config.max_seq_len} tokens"
            )
        return self.capture(
            batch_size,
            seq_len,
            capture_fn,
            input_shapes,
            output_shapes,
            inputs=inputs if inputs is None else as_tensors(inputs, self._device)[0],
            dynamic=dynamic,
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
        found = self._holder(size, seq_len)
        if found is None:
            raise ReplayError(f"no graph serves batch_size={batch_size}, seq_len={seq_len}; capture_graph() it first")
        server, group, entry = found
        closed = server.closed(group.route) or (None if entry.fits_modes() else Reason.MODE_ACTIVE)
        if closed is None and torch.is_grad_enabled() and (entry.trains or server.needs_gradients((), {})):
            closed = Reason.NEEDS_GRADIENTS
        if closed is not None:
            raise ReplayError(f"no graph may replay now: {closed.text}")
        tensors, are_arrays = as_tensors(inputs, self._device)
        values, rows = entry.check(tensors)
        if rows != batch_size and group.signature.has_rows:
            raise GuardError(f"inputs must have batch_size={batch_size} rows, got {rows}")
        reason, detail = entry.licence.verdict(entry, values, rows)
        if reason is Reason.VERIFIED_NOW and self.is_frozen:
            reason, detail = Reason.FROZEN, Reason.FROZEN.text
        if reason is not None and reason is not Reason.VERIFIED_NOW:
            raise ReplayError(f"{rows} rows in a graph of {size}: {detail or reason.text}")
        if reason is not None:
            choice = Choice(Decision.eager(Reason.VERIFIED_NOW, rows), group, values, size, entry)
            with torch.no_grad(), server.lock:
                result = server.perform(choice)[1]
        else:
            result = entry.replay_call(values, rows, self.stats, is_timed=True)
        write_back(inputs, tensors)
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
        tensors, are_arrays = as_tensors(inputs, self._device)
        check_inputs(tensors, input_shapes)
        mode = self.get_mode_for_batch(batch_size, seq_len)
        one = self._find(execute_fn)
        if not mode.has_graphs():
            result = one.server.run_eagerly(self._why_eager(batch_size, seq_len), (), dict(tensors))
        else:
            size = self._sizes.get_padded_batch_size(batch_size)
            dims = batch_dims(tensors, batch_size, dynamic)
            result = one.server.serve(self._route(one, size, seq_len, mode, dims), (), dict(tensors))
        write_back(inputs, tensors)
        if output_shapes:
            check_outputs(result.get() if isinstance(result, OutputView) else result, output_shapes)
        return as_arrays(result) if are_arrays else result

    def reset(self) -> None:
        """Release all graphs and forget what was seen and counted."""
        self.clear()
        self.stats.reset()

    def __repr__(self) -> str:
        return f"<CUDAGraphManager {self._mode.name}: {self.num_graphs} graphs, {self.stats!r}>"

    def _why_eager(self, batch_size: int, seq_len: int) -> Decision:
        """Why no graph may serve this batch, whatever is captured."""
        if not self.is_enabled:
            return Decision.eager(Reason.DISABLED, batch_size)
        decision = self._tables[CUDAGraphMode.FULL].decide(batch_size)
        if decision.is_eager:
            return decision
        if seq_len <= (most := self.config.max_seq_len):
            return Decision.eager(Reason.MODE_MISMATCH, batch_size)
        why = f"seq_len={seq_len} is above max_seq_len={most}; raise that in the configuration"
        return Decision.eager(Reason.NOT_CAPTURED, batch_size, why)
