"""The graphs that are registered with a dispatcher, and the workers whose servers run them.

Some of them somebody else captured: they own the memory, and this library keeps the statistics.

What the graphs decide for every key is one immutable thing, swapped whole, so that a dispatch takes no lock to choose.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch.utils._pytree import tree_leaves

from ..api.lifecycle import capturer_for
from ..backends import Backend, get_backend
from ..backends.base import Graph
from ..config import CUDAGraphOptions
from ..copying import NotCopied
from ..descriptors import BatchDescriptor, DispatchKey
from ..errors import ConfigError, ReplayError, check_type, shown
from ..modes import CUDAGraphMode, DispatchMode, EntryState
from ..reasons import Reason
from ..runtime.cache import GraphCache
from ..runtime.decide import Decision, Memo, SizeTable
from ..runtime.entry import CUDAGraphEntry
from ..runtime.flatten import is_tensor
from ..runtime.group import Route
from ..runtime.outputs import OutputRule, Outputs
from ..runtime.prewarm import capture_example
from ..runtime.rules import ArgumentRules
from ..runtime.server import Server
from ..runtime.signature import ForeignSignature
from ..runtime.static_inputs import StaticInputs
from .keys import RUNTIME_MODES, KeyTable

GRAPH_MODES = {DispatchMode.CUDAGRAPH: CUDAGraphMode.FULL, DispatchMode.PIECEWISE: CUDAGraphMode.PIECEWISE}
"""The modes that a graph can be registered in, the better first, and the runtime mode of each."""

_MOST_KEPT = 16384  # keys


@runtime_checkable
class Replayable(Protocol):
    """Anything that can be replayed: ``torch.cuda.CUDAGraph``, a graph of this library, ``MockCUDAGraph``."""

    def replay(self) -> Any:
        """Run it on the caller's current stream."""


class _ForeignGraph(Graph):
    nbytes = 0

    def __init__(self, graph: Replayable) -> None:
        self._graph = graph

    def replay(self) -> None:
        try:
            self._graph.replay()
        except ReplayError:  # a graph that raises it says itself whether it had effects
            raise
        except Exception as error:
            failure = ReplayError(
                f"the registered graph failed to replay: {type(error).__name__}: {error}; what it wrote before cannot "
                "be known, so that the step was not run again"
            )
            failure.had_effects = True
            raise failure from error

    def reset(self) -> None:
        """It is its owner's."""


def entry_around(
    graph: Replayable,
    key: DispatchKey,
    outputs: Any = None,
    *,
    mode: CUDAGraphMode = CUDAGraphMode.FULL,
    addresses: Sequence[int] | None = None,
) -> CUDAGraphEntry:
    """An entry around a graph that somebody else captured.

    The graph's inputs are its owner's to fill, and releasing the entry leaves the graph.

    Args:
        graph: The graph.
        key: What it serves.
        outputs: The tensors that it writes, or any nest of them, which are returned themselves. None: its ``outputs``.
        mode: ``PIECEWISE`` if it consists of graphs between eager breaks.
        addresses: The addresses of the tensors that it reads; None: not known.

    Returns:
        The entry.

    Raises:
        ConfigError: It cannot be replayed, or the addresses are none.
    """
    if not isinstance(graph, Replayable):
        raise ConfigError(f"graph must have a replay() method, got {shown(graph)}")
    are_addresses = isinstance(addresses, Sequence) and all(isinstance(pointer, int) for pointer in addresses)
    if addresses is not None and not are_addresses:
        raise ConfigError(f"input_ptrs must be addresses (tensor.data_ptr()) or None, got {shown(addresses)}")
    outputs = outputs if outputs is not None else getattr(graph, "outputs", None)
    backend = get_backend("auto")
    pool = backend.make_pool()  # of which only the lock is used
    tensors = sum(is_tensor(leaf) for leaf in tree_leaves(outputs))
    return CUDAGraphEntry(
        descriptor=BatchDescriptor(key.num_tokens),
        mode=mode,
        key=key,
        size=key.num_tokens,
        graph=_ForeignGraph(graph),
        pool=pool,
        backend=backend,
        inputs=StaticInputs((), 0),
        outputs=Outputs(outputs, OutputRule(((),) * tensors), [False] * tensors, "static", pool),
        state=EntryState.VERIFIED,
        knows_effects=False,
        signature=ForeignSignature(None if addresses is None else tuple(addresses)),
    )


class Worker(NotCopied):
    """A server of the runner, which serves the graphs that are registered with it. Thread-safe.

    At most ``max_cached_graphs`` of those that are captured here are kept.
    """

    serves_by: ClassVar[type[Server]] = Server
    """The class of its server."""

    def __init__(
        self,
        eager_runner: Callable[..., Any],
        max_cached_graphs: int,
        options: CUDAGraphOptions | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        self.cache = GraphCache(max_cached_graphs, backend=backend)
        """What was captured here. A graph of somebody else is not in it, since nobody here releases it."""
        options = options or CUDAGraphOptions()
        self.server = self.serves_by(eager_runner, options, self.cache, capturer_for(options))
        self._numbers = count()

    def wrap(self, key: DispatchKey, mode: DispatchMode, graph: Any, entry: CUDAGraphEntry) -> "Registered":
        """A graph of somebody else, with a route by which the server serves it."""
        table = SizeTable.of_one(entry.size, entry.mode, entry.descriptor, pads=entry.inputs.has_rows)
        route = Route((key, mode, next(self._numbers)), table, entry=entry)
        return Registered(self, key, mode, graph, entry, route)

    def capture(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Registered":
        """Capture the runner on these example arguments."""
        descriptor = BatchDescriptor(key.num_tokens, key.num_reqs)
        route = Route(
            (key, DispatchMode.CUDAGRAPH, next(self._numbers)),
            SizeTable.of_one(1, CUDAGraphMode.FULL, descriptor),
            ArgumentRules({}, {}, frozenset()),
            descriptor=descriptor,
            captures=False,
            is_single=True,
        )
        try:
            entry = capture_example(self.server, route, (args, kwargs), 1, 1, f"{key}").entry
        except BaseException:
            self.drop(route)
            raise
        assert entry is not None
        return Registered(self, key, DispatchMode.CUDAGRAPH, entry, entry, route)

    def drop(self, route: Route) -> None:
        """Serve no call by a route any more, and release its graph if it was captured here. Waits for calls in flight
        of that, and of a graph that its owner keeps."""
        with self.server.lock:
            self.server.drop(route)
        if route.entry is not None and isinstance(route.entry.graph, _ForeignGraph):
            route.entry.release()  # else a call that has found it could still replay it


@dataclass(frozen=True, eq=False)
class Registered:
    """A graph as it was registered, its worker, its entry, and the route by which the worker's server serves it.

    Registering a graph again makes another one, with a route of its own: what is done to the older one, by a call that
    chose it before, does not touch the newer one.
    """

    worker: Worker
    key: DispatchKey
    mode: DispatchMode
    graph: Replayable | CUDAGraphEntry
    entry: CUDAGraphEntry
    route: Route

    @property
    def place(self) -> tuple[Worker, DispatchKey, DispatchMode]:
        """Where there is one at a time."""
        return self.worker, self.key, self.mode

    @property
    def is_gone(self) -> bool:
        """Whether the graph was released, or failed when it was last replayed or compared."""
        return self.entry.is_released or self.entry.state is EntryState.FAILED


_Served = tuple[Sequence[Registered], Decision]
_Candidates = tuple[Mapping[DispatchMode, _Served], tuple[DispatchMode, ...], Decision]
"""By mode, the better first, the graphs that may serve a key, one for each worker that has it, and their decision;
these modes and EAGER; and why eager serves, if there is no graph."""


class RegisteredGraphs:
    """Registered graphs; ``candidates[key, modes]`` is what they decide for a key. Immutable.

    A graph serves its own key. One that pads serves smaller batches, too, by a ``KeyTable`` for decode or one for
    prefill: batches with sequences of at most the same length (those of unknown length, if its own is). A decode key
    whose tokens are a multiple of its requests is uniform decode.
    """

    def __init__(self, graphs: Iterable[Registered] = ()) -> None:
        self.graphs = tuple(graphs)
        self.candidates = Memo[tuple[DispatchKey, frozenset[DispatchMode]], _Candidates](self._find, _MOST_KEPT)
        """What may serve a key in some modes: the first lookup goes to the tables, later ones to a dictionary."""
        self._own = defaultdict[Any, list[Registered]](list)
        self._padding = defaultdict[Any, list[Registered]](list)
        keys: dict[Any, list[BatchDescriptor]] = defaultdict(list)
        for found in self.graphs:
            key, mode = found.key, GRAPH_MODES[found.mode]
            self._own[key, mode].append(found)
            if found.entry.inputs.has_rows:
                is_uniform = mode is CUDAGraphMode.FULL and _query_len(key) is not None
                descriptor = BatchDescriptor(key.num_tokens, key.num_reqs, is_uniform, key.max_seq_len or None)
                self._padding[key.is_prefill, mode, descriptor].append(found)
                keys[key.is_prefill, mode].append(descriptor)
        modes, configured = GRAPH_MODES.values(), CUDAGraphMode.FULL_AND_PIECEWISE
        self._tables = [KeyTable({mode: keys[kind, mode] for mode in modes}, mode=configured) for kind in (False, True)]

    def of(self, key: DispatchKey) -> Registered | None:
        """A graph of the key itself, a full one before a piecewise one; or None."""
        check_key(key)
        found = (self._own.get((key, mode)) for mode in GRAPH_MODES.values())
        return next((graphs[0] for graphs in found if graphs is not None), None)

    def _find(self, question: tuple[DispatchKey, frozenset[DispatchMode]]) -> _Candidates:
        key, modes = question
        check_type("key", key, DispatchKey, "a DispatchKey, as create_dispatch_key() makes one")
        found = {mode: best for mode in GRAPH_MODES if (best := self._best(key, GRAPH_MODES[mode])) is not None}
        eager = Decision.eager(Reason.DISABLED, key.num_tokens) if found else self._decide(key, RUNTIME_MODES)
        if eager.reason is Reason.VARIANT_NOT_CAPTURED:
            eager = Decision.eager(Reason.NOT_CAPTURED, key.num_tokens)
        most = len(found) if DispatchMode.HYBRID in modes else 1
        offered = {mode: found[mode] for mode in [mode for mode in found if mode in modes][:most]}
        return offered, (*offered, DispatchMode.EAGER), eager

    def _best(self, key: DispatchKey, mode: CUDAGraphMode) -> _Served | None:
        if own := self._own.get((key, mode)):
            return own, Decision(mode, own[0].entry.descriptor, key.num_tokens, Reason.EXACT, key.num_tokens)
        decision = self._decide(key, frozenset((CUDAGraphMode.NONE, mode)))
        padding = self._padding.get((key.is_prefill, mode, decision.descriptor))
        return (padding, decision) if padding is not None else None

    def _decide(self, key: DispatchKey, allowed: frozenset[CUDAGraphMode]) -> Decision:
        table, seq_len = self._tables[key.is_prefill], key.max_seq_len or None
        return table.decide(key.num_tokens, key.num_reqs, _query_len(key), seq_len, allowed)


def _query_len(key: DispatchKey) -> int | None:
    """The tokens of each request of uniform decode; None for a batch that is not, or not for certain."""
    if key.is_prefill or key.num_reqs < 1 or key.num_tokens % key.num_reqs:
        return None
    return key.num_tokens // key.num_reqs


def check_key(key: Any) -> None:
    """Raise ``ConfigError`` unless ``key`` is the key of a batch."""
    if not isinstance(key, DispatchKey) or type(key.num_tokens) is not int or key.num_tokens < 1:
        raise ConfigError(
            f"key must be a DispatchKey with num_tokens >= 1, got {shown(key)}; create_dispatch_key() makes one"
        )
