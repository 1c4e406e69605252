"""``CUDAGraphRegistry``: graphs by (batch size, sequence length), captured from functions of named tensors."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain
from operator import index
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ..backends import get_backend
from ..backends.tracing import untraced
from ..call.arrays import as_tensors
from ..call.rules import ArgumentRules
from ..call.signature import Refusal
from ..call.spec import is_tensor
from ..config import CUDAGraphConfig
from ..copying import MadeAnew
from ..decide.decision import SizeTable
from ..descriptors import BatchDescriptor
from ..errors import CaptureError, ConfigError, check_callable, check_count, check_type, shown
from ..forking import make_lock
from ..memory.accounting import MemoryReport, memory_report
from ..memory.cache import make_cache
from ..memory.entry import CUDAGraphEntry
from ..modes import CUDAGraphMode
from ..reasons import Reason
from ..serve.group import GraphGroup, Route, Routes
from ..serve.prewarm import compare_numbers
from ..serve.server import Server
from ..state.objects import same_callable
from ..stats import CUDAGraphStats

__all__ = ["CUDAGraphRegistry", "Shapes", "batch_dims", "check_input_shapes", "check_output_shapes"]

Shapes = Mapping[str, Sequence[int]]
_MOST_WAITING = 8  # callables that have no graph


class _KeyedRoute(Route):
    """The route of batches of one sequence length."""

    def __init__(self, key: Hashable, table: SizeTable, rules: ArgumentRules, seq_len: int) -> None:
        super().__init__(key, table, rules)
        self.seq_len = seq_len

    def descriptor_of(self, size: int) -> BatchDescriptor:
        """``size`` requests of ``seq_len`` tokens each."""
        return BatchDescriptor(size * max(self.seq_len, 1), size, self.seq_len == 1)

    def name_of(self, size: int) -> tuple[int, int]:
        """Batch size and sequence length."""
        return size, self.seq_len


class _Callable(NamedTuple):
    """One callable with its server, and its routes by sequence length, mode and batch dimensions."""

    server: Server
    routes: Routes[_KeyedRoute]


class CUDAGraphRegistry(MadeAnew):
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

    def __init__(self, config: CUDAGraphConfig | None = None) -> None:
        self.config = CUDAGraphConfig.or_default(config, "config")
        self._backend = get_backend(self.config.backend)
        self.device = self._backend.device
        """Where graphs run, and where NumPy arrays are brought."""
        self._pool = self._backend.make_pool()
        self.stats = CUDAGraphStats()
        """Captures, replays, hits, misses and reasons over all graphs."""
        self.cache = make_cache(self.config.options, self.config.max_cached_graphs, stats=self.stats)
        """The graphs of all callables."""
        self._callables: list[_Callable] = []
        self._numbers = 0
        self._keeps_examples = False
        self.is_asleep = False
        self.is_frozen = False
        """Whether nothing is captured now: between ``sleep()`` and ``wake()``."""
        self._lock = make_lock()
        resolved = self.config.replace(mode=CUDAGraphMode.FULL).resolve()
        self._tables = {mode: SizeTable.of(resolved, mode) for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)}

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
        if self.is_frozen:
            raise CaptureError(f"no capture: {Reason.FROZEN.text}", Reason.FROZEN)
        if self.is_asleep:
            raise CaptureError(f"no capture: {Reason.ASLEEP.text}", Reason.ASLEEP)
        example = self._example(batch_size, input_shapes, inputs, dtypes)
        size = batch_size if size is None else size
        check_count("size", size, batch_size)
        check_count("seq_len", seq_len, 0)
        if mode not in self._tables:
            raise ConfigError(f"mode must be CUDAGraphMode.FULL or PIECEWISE, got {shown(mode)}")
        one = self.find(capture_fn)
        for other in self._callables:
            if other is not one:
                self._drop(other, size, seq_len)
        route = self.route(one, size, seq_len, mode, batch_dims(example, batch_size, dynamic))
        with torch.no_grad(), one.server.lock:
            found = one.server.find(route, (), dict(example))
            if isinstance(found, Refusal):
                raise CaptureError(
                    f"no graph for batch_size={batch_size}, seq_len={seq_len}: {found.detail}", found.reason
                )
            group, leaves, _ = found
            one.server.graphs.warm_up(group, group.resized(leaves, size), size)
            result = one.server.graphs.capture(group, leaves, batch_size, size, keep_effects=False)
            if result.entry is not None and batch_size < size:
                result = compare_numbers(one.server, group, leaves, batch_size, result)
        if result.entry is None:
            raise CaptureError(
                f"no graph for batch_size={batch_size}, seq_len={seq_len}: {result.detail}", result.reason
            ) from result.error
        try:
            check_output_shapes(result.answer, output_shapes)
        except ConfigError:
            self.remove(size, seq_len)
            raise
        return result.entry

    def get(self, batch_size: int, seq_len: int) -> CUDAGraphEntry | None:
        """The entry of exactly this key; if several callables have one, the one that was used last.

        Args:
            batch_size: The rows of the graph.
            seq_len: The tokens of each row.

        Returns:
            The entry, or None.
        """
        found = self.holder(batch_size, seq_len)
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
        had_graphs = [self._drop(one, batch_size, seq_len) for one in self._callables]
        return any(had_graphs)

    def invalidate(self, tag: str = "") -> None:
        """Release all graphs, since what they captured changed in a way that no guard sees.

        Args:
            tag: What changed; it is kept with ``stats.last_evictions``.
        """
        check_type("tag", tag, str, "text that says what changed")
        for one in self._callables:
            one.server.graphs.invalidate(tag)

    def sleep(self, tag: str = "") -> None:
        """Release all graphs, their buffers and the pool; nothing is captured until ``wake()``.

        Args:
            tag: Why; it is kept with ``stats.last_evictions``.
        """
        check_type("tag", tag, str, "text that says why")
        self.is_asleep = True
        self._forget_callables(tag)
        self._renew_pool()

    def wake(self) -> None:
        """End ``sleep()``. Harmless when awake."""
        self.is_asleep = False

    def freeze(self, is_frozen: bool = True) -> None:
        """Allow no capture and no comparison from now on; or allow them again.

        Args:
            is_frozen: Whether they are forbidden.
        """
        self.is_frozen = is_frozen
        for one in self._callables:
            one.server.graphs.freeze(is_frozen)

    def keep_examples(self) -> None:
        """Keep two rows of one call of each signature from now on; see ``CUDAGraphManager.keep_examples``."""
        self._keeps_examples = True
        for one in self._callables:
            with one.server.lock:
                one.server.keep_examples()

    def by_sizes(self) -> list[tuple[Server, list[_KeyedRoute]]]:
        """Each callable's server, with those of its routes that have the sizes of the configuration."""
        tables = self._tables.values()
        return [(one.server, [r for r in list(one.routes.values()) if r.table in tables]) for one in self._callables]

    def clear(self) -> None:
        """Release all graphs. The statistics stay."""
        for entry in self.cache.clear():
            entry.release()
        self._forget_callables()
        self.cache.admission.clear()
        self._renew_pool()

    @property
    def num_graphs(self) -> int:
        """How many graphs there are now."""
        return len(self.cache)

    @property
    def memory_bytes(self) -> int:
        """Bytes held by the pool, the graphs, and their static inputs and output buffers."""
        return self.memory_report().total

    def memory_report(self) -> MemoryReport:
        """These bytes, part by part and graph by graph."""
        return memory_report(self.cache, [self._pool])

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the cache's accounting is off."""
        self.cache.check_integrity()

    def __repr__(self) -> str:
        return f"<CUDAGraphRegistry {self.num_graphs} of {self.config.max_cached_graphs} graphs, {self.stats!r}>"

    def find(self, fn: Callable[..., Any]) -> _Callable:
        """The server and routes of a callable, made if it is new.

        Args:
            fn: The callable.
        """
        latest = self.latest()
        if latest is not None and latest.server.fn is fn:
            return latest
        with self._lock:
            same = (one for one in self._callables if one.server.fn is fn)
            alike = (one for one in self._callables if same_callable(one.server.fn, fn))
            known = next(chain(same, alike), None) or self._make(fn)
            self._callables = [*(one for one in self._callables if one is not known), known]
            return known

    def _make(self, fn: Callable[..., Any]) -> _Callable:
        """A server for a callable that is new; room is made by forgetting one that has no graph."""
        waiting = [one for one in self._callables if not one.server.graphs.has_graphs]
        gone = waiting[: len(waiting) - _MOST_WAITING + 1] if len(waiting) >= _MOST_WAITING else []
        server = Server(
            fn,
            self.config.options,
            self.cache,
            backend=self._backend,
            pool=self._pool,
            strict=self.config.strict,
            times_replays=True,
        )
        server.graphs.is_frozen, server.keeps_examples = self.is_frozen, self._keeps_examples
        number = self._numbers = self._numbers + 1
        self._callables = [one for one in self._callables if one not in gone]
        return _Callable(server, Routes(lambda key: self._make_route(number, *key)))

    def holder(self, size: int, seq_len: int) -> tuple[Server, GraphGroup, CUDAGraphEntry] | None:
        """The entry of a key with its group and server; if several callables have one, the one that was used last.

        Args:
            size: The rows of the graph.
            seq_len: The tokens of each row.
        """
        found = [(one.server, group, e) for one in self._callables for group, e in self._of_key(one, size, seq_len)]
        return max(found, key=lambda held: held[2].last_used, default=None)

    def groups_of(self, one: _Callable, size: int, seq_len: int) -> list[GraphGroup]:
        """The groups of a callable whose calls of this sequence length the graph of ``size`` would serve.

        Args:
            one: The callable's server and routes.
            size: The rows of the graph.
            seq_len: The tokens of each row.
        """
        routes = [route for route in list(one.routes.values()) if route.seq_len == seq_len]
        return [group for route in routes for group in route.groups if size in route.table.sizes]

    def latest(self) -> _Callable | None:
        """The callable that was used last, or None."""
        callables = self._callables
        return callables[-1] if callables else None

    def route(
        self, one: _Callable, size: int, seq_len: int, mode: CUDAGraphMode, dynamic: Mapping[str, int]
    ) -> _KeyedRoute:
        """The route of batches that graphs of one size serve; sizes of the configuration share one.

        Args:
            one: The callable's server and routes.
            size: The rows of the graph.
            seq_len: The tokens of each row.
            mode: The runtime mode.
            dynamic: The batch dimension of each input that has one.
        """
        own = 0 if size in self._tables[mode].sizes else size
        return one.routes[seq_len, mode, own, tuple(dynamic.items())]

    def _make_route(
        self, number: int, seq_len: int, mode: CUDAGraphMode, own: int, dims: tuple[tuple[str, int], ...]
    ) -> _KeyedRoute:
        table = SizeTable.of_one(own, mode, pads=True) if own else self._tables[mode]
        return _KeyedRoute((number, seq_len, mode, own), table, ArgumentRules(dict(dims), {}, frozenset()), seq_len)

    def _of_key(self, one: _Callable, size: int, seq_len: int) -> Iterator[tuple[GraphGroup, CUDAGraphEntry]]:
        for group in self.groups_of(one, size, seq_len):
            entry = one.server.graphs.current(group, size)
            if entry is not None:
                yield group, entry

    def _drop(self, one: _Callable, size: int, seq_len: int) -> bool:
        """Release the graphs of one callable for a key, and forget its failures there; whether there was a graph."""
        found = [(group, entry) for group in self.groups_of(one, size, seq_len) for entry in group.of_size(size)]
        for group, entry in found:
            self.cache.remove(entry.place)
            group.drop(entry)
            entry.release()
        return bool(found)

    def _forget_callables(self, tag: str = "") -> None:
        """Forget all callables; a call that still has one of their servers runs eagerly."""
        with self._lock:
            known, self._callables = self._callables, []
        for one in known:
            one.server.graphs.sleep(tag)

    def _renew_pool(self) -> None:
        self._pool.close()
        self._pool = self._backend.make_pool()

    def _example(
        self,
        batch_size: int,
        input_shapes: Shapes | None,
        inputs: Mapping[str, torch.Tensor] | None,
        dtypes: Mapping[str, torch.dtype] | None,
    ) -> Mapping[str, torch.Tensor]:
        check_count("batch_size", batch_size)
        if inputs is None:
            check_type("dtypes", {} if dtypes is None else dtypes, Mapping, "a mapping from input names to dtypes")
            for name, dtype in (dtypes or {}).items():
                check_type(f"dtypes[{name!r}]", dtype, torch.dtype, "a torch.dtype")
            if not input_shapes:
                raise ConfigError("input_shapes must name the inputs and their shapes, or give inputs= as an example")
            return {
                name: torch.zeros(shape, dtype=(dtypes or {}).get(name, torch.float32), device=self.device)
                for name, shape in _checked_shapes("input_shapes", input_shapes).items()
            }
        inputs, _ = as_tensors(inputs, self.device)
        check_input_shapes(inputs, input_shapes)
        return inputs


def check_input_shapes(inputs: Mapping[str, torch.Tensor], shapes: Shapes | None) -> None:
    """Raise ``ConfigError`` if ``inputs`` are no mapping of tensors, or not what ``shapes`` says."""
    if not isinstance(inputs, Mapping):
        raise ConfigError(f"inputs must be a mapping from name to tensor, got a {type(inputs).__name__}")
    for name, tensor in inputs.items():
        if type(name) is not str:
            raise ConfigError(f"the name of an input must be text, got {shown(name)}")
        if not is_tensor(tensor):
            raise ConfigError(f"input {name!r} must be a tensor, got {shown(tensor)}; bind others to the callable")
    for name, shape in _checked_shapes("input_shapes", shapes or {}).items():
        if name not in inputs:
            raise ConfigError(f"input_shapes names {name!r}, which inputs does not; inputs are {list(inputs)}")
        if tuple(inputs[name].shape) != shape:
            raise ConfigError(
                f"input {name!r} must have shape {shape} as input_shapes says, got {tuple(inputs[name].shape)}"
            )


def check_output_shapes(outputs: Any, shapes: Shapes | None) -> None:
    """Raise ``ConfigError`` if ``outputs`` are not what ``shapes`` says: by key for a mapping, else in order."""
    if not shapes:
        return
    named = outputs if isinstance(outputs, Mapping) else dict(zip(shapes, tree_leaves(outputs), strict=False))
    for name, shape in _checked_shapes("output_shapes", shapes).items():
        if not is_tensor(named.get(name)) or tuple(named[name].shape) != shape:
            found = tuple(named[name].shape) if is_tensor(named.get(name)) else named.get(name)
            raise ConfigError(f"output {name!r} must have shape {shape} as output_shapes says, got {found}")


def _checked_shapes(argument: str, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    try:
        checked = {name: tuple(map(index, shape)) for name, shape in shapes.items()}
    except (AttributeError, TypeError):
        raise ConfigError(f"{argument} must map names to shapes, as {{'x': (8, 64)}}, got {shown(shapes)}") from None
    if any(length < 0 for shape in checked.values() for length in shape):
        raise ConfigError(f"{argument} must hold lengths >= 0, got {shown(shapes)}")
    return checked


def batch_dims(inputs: Mapping[str, torch.Tensor], rows: int, dynamic: Mapping[str, int] | None) -> Mapping[str, int]:
    """The batch dimension of each input that has one. Raises ``ConfigError`` for inputs without ``rows`` rows."""
    if dynamic is not None:
        check_type("dynamic", dynamic, Mapping, "a mapping from input names to batch dimensions")
        for name, dim in dynamic.items():
            if name not in inputs:
                raise ConfigError(f"dynamic names {name!r}, which is no input; inputs are {list(inputs)}")
            check_type(f"dynamic[{name!r}]", dim, int, "the number of a dimension")
        return dynamic
    for name, tensor in inputs.items():
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise ConfigError(
                f"input {name!r} has shape {tuple(tensor.shape)}, whose dimension 0 is not batch_size={rows}; "
                "say in dynamic={name: dimension} which inputs have a batch dimension"
            )
    return dict.fromkeys(inputs, 0)
