"""The graphs that are registered with a dispatcher, and the worker that runs them on its server.

Some of them somebody else captured: they own the memory, and this library keeps the statistics.

What they decide for every key is one immutable thing, swapped whole, so that a dispatch takes no lock to choose.

Note [locks of a worker]
    A comparison runs the eager runner with the server's lock and the pool's lock held, and the runner may register
    graphs. So nobody takes one of these two while holding the lock of a worker's graphs, or of a dispatcher: a graph is
    published under those locks, and what it displaces is released after.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from torch.utils._pytree import tree_leaves

from ..backends import Backend, get_backend
from ..backends.base import Graph, Pool
from ..call.rules import ArgumentRules
from ..call.signature import ForeignSignature
from ..call.spec import is_tensor
from ..config import CUDAGraphOptions
from ..copying import NotCopied, make_lock
from ..decide import Decision, Memo, SizeTable
from ..descriptors import BatchDescriptor, DispatchKey
from ..errors import ConfigError, ReplayError, check_type, shown
from ..memory.cache import GraphCache
from ..memory.entry import CUDAGraphEntry
from ..memory.inputs import StaticInputs
from ..memory.outputs import OutputRule, Outputs
from ..modes import CUDAGraphMode, DispatchMode, EntryState
from ..reasons import Reason
from ..serve.group import Route
from ..serve.prewarm import capture_example
from ..serve.server import Server
from .keys import KeyTable
from .policies import DispatchPolicy

__all__ = ["GRAPH_MODES", "Registered", "Replayable", "Worker", "check_key", "entry_around"]

GRAPH_MODES = {DispatchMode.CUDAGRAPH: CUDAGraphMode.FULL, DispatchMode.PIECEWISE: CUDAGraphMode.PIECEWISE}
"""The modes that a graph can be registered in, the better first, and the runtime mode of each."""

Slot = tuple[DispatchKey, DispatchMode]
_MOST_KEPT = 16384  # keys


@runtime_checkable
class Replayable(Protocol):
    """Anything that can be replayed: ``torch.cuda.CUDAGraph``, a graph of this library, ``MockCUDAGraph``."""

    def replay(self) -> Any:
        """Run it on the caller's current stream."""


class _ForeignGraph(Graph):
    def __init__(self, graph: Replayable, pool: Pool) -> None:
        self._graph: Replayable | None = graph
        self._pool = pool

    def replay(self) -> None:
        if self._graph is None:
            raise ReplayError("this graph was released; register it again")
        self._pool.generation += 1
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
        self._graph = None

    @property
    def nbytes(self) -> int:
        return 0


class _ForeignPool(Pool):
    """Memory that this library does not see; it orders the graph's users, and nothing else."""

    @property
    def nbytes(self) -> int:
        """Bytes that are known of: none."""
        return 0

    def order_after_last_use(self) -> None:
        """The graph's owner orders its streams."""


def entry_around(
    graph: Replayable,
    key: Hashable,
    outputs: Any = None,
    *,
    mode: CUDAGraphMode = CUDAGraphMode.FULL,
    addresses: Sequence[int] | None = None,
) -> CUDAGraphEntry:
    """An entry around a graph that somebody else captured.

    The graph's inputs are its owner's to fill. Releasing the entry only drops the reference to the graph.

    Args:
        graph: The graph.
        key: The front end's name for it.
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
    if addresses is not None:
        if not isinstance(addresses, Sequence) or not all(isinstance(pointer, int) for pointer in addresses):
            raise ConfigError(f"input_ptrs must be addresses (tensor.data_ptr()) or None, got {shown(addresses)}")
        addresses = tuple(addresses)
    outputs = outputs if outputs is not None else getattr(graph, "outputs", None)
    pool = _ForeignPool()
    tensors = sum(is_tensor(leaf) for leaf in tree_leaves(outputs))
    rows = key.num_tokens if isinstance(key, (DispatchKey, BatchDescriptor)) else 1
    return CUDAGraphEntry(
        descriptor=key if isinstance(key, BatchDescriptor) else BatchDescriptor(rows),
        mode=mode,
        key=key,
        size=rows,
        graph=_ForeignGraph(graph, pool),
        pool=pool,
        backend=get_backend("auto"),
        inputs=StaticInputs((), 0),
        outputs=Outputs(outputs, OutputRule(((),) * tensors), [False] * tensors, "static", pool),
        state=EntryState.VERIFIED,
        knows_effects=False,
        signature=ForeignSignature(addresses),
    )


@dataclass(frozen=True, eq=False)
class Registered:
    """A graph as it was registered, its worker, its entry, and the route by which the worker's server serves it.

    Registering a graph again makes another one, with a route of its own: what is done to the older one, by a call that
    chose it before, does not touch the newer one.
    """

    worker: "Worker"
    key: DispatchKey
    mode: DispatchMode
    graph: Replayable | CUDAGraphEntry
    entry: CUDAGraphEntry
    route: Route

    @property
    def slot(self) -> Slot:
        """What it is registered for."""
        return self.key, self.mode

    @property
    def is_gone(self) -> bool:
        """Whether the graph was released, or failed when it was last replayed or compared."""
        return self.entry.is_released or self.entry.state is EntryState.FAILED


_Served = tuple[Registered, Decision]
Candidates = tuple[Mapping[DispatchMode, _Served], tuple[DispatchMode, ...], Decision]
"""By mode, the better first, the graph that may serve a key and its decision; these modes and EAGER; and why eager
serves, if there is no graph."""


class RegisteredGraphs:
    """Registered graphs; ``candidates[key, modes]`` is what they decide for a key. Immutable.

    A graph serves its own key. One that pads serves smaller batches, too, by a ``KeyTable`` for decode or one for
    prefill: batches with sequences of at most the same length (those of unknown length, if its own is). A decode key
    whose tokens are a multiple of its requests is uniform decode.
    """

    def __init__(self, graphs: Mapping[Slot, Registered]) -> None:
        self.graphs = MappingProxyType(dict(graphs))
        self.candidates = Memo[tuple[DispatchKey, frozenset[DispatchMode]], Candidates](self._find, _MOST_KEPT)
        """What may serve a key in some modes: the first lookup goes to the tables, later ones to a dictionary."""
        self._tables = {is_prefill: self._table(is_prefill) for is_prefill in (False, True)}

    def _table(self, is_prefill: bool) -> KeyTable:
        keys: dict[CUDAGraphMode, list[BatchDescriptor]] = {mode: [] for mode in GRAPH_MODES.values()}
        for (key, mode), found in self.graphs.items():
            if found.entry.inputs.has_rows and key.is_prefill == is_prefill:
                is_uniform = mode is DispatchMode.CUDAGRAPH and _query_len(key) is not None
                descriptor = BatchDescriptor(key.num_tokens, key.num_reqs, is_uniform, key.max_seq_len or None)
                keys[GRAPH_MODES[mode]].append(descriptor)
        return KeyTable(keys, mode=CUDAGraphMode.FULL_AND_PIECEWISE)

    def _find(self, asked: tuple[DispatchKey, frozenset[DispatchMode]]) -> Candidates:
        key, modes = asked
        check_type("key", key, DispatchKey, "a DispatchKey, as create_dispatch_key() makes one")
        found = {mode: best for mode in GRAPH_MODES if (best := self._best(key, mode)) is not None}
        eager = Decision.eager(Reason.DISABLED, key.num_tokens) if found else self._decide(key, None)
        if eager.reason is Reason.VARIANT_NOT_CAPTURED:
            eager = Decision.eager(Reason.NOT_CAPTURED, key.num_tokens)
        enabled = {mode: best for mode, best in found.items() if mode in modes}
        return enabled, (*enabled, DispatchMode.EAGER), eager

    def _best(self, key: DispatchKey, mode: DispatchMode) -> _Served | None:
        runtime = GRAPH_MODES[mode]
        own = self.graphs.get((key, mode))
        if own is not None:
            return own, Decision(runtime, own.entry.descriptor, key.num_tokens, Reason.EXACT, key.num_tokens)
        decision = self._decide(key, frozenset((CUDAGraphMode.NONE, runtime)))
        if decision.descriptor is None:
            return None
        tokens, reqs, _, seq_len = decision.descriptor
        other: Any = DispatchKey(tokens, reqs or 0, 0 if seq_len is None else seq_len, key.is_prefill)  # type: ignore[arg-type]
        return self.graphs[other, mode], decision

    def _decide(self, key: DispatchKey, allowed: frozenset[CUDAGraphMode] | None) -> Decision:
        table, seq_len = self._tables[key.is_prefill], key.max_seq_len or None
        return table.decide(key.num_tokens, key.num_reqs, _query_len(key), seq_len, allowed)


def _query_len(key: DispatchKey) -> int | None:
    """The tokens of each request of uniform decode; None for a batch that is not, or not for certain."""
    if key.is_prefill or key.num_reqs < 1 or key.num_tokens % key.num_reqs:
        return None
    return key.num_tokens // key.num_reqs


class Worker(NotCopied):
    """The graphs that are registered in one place, and the server that serves them. Thread-safe.

    At most ``max_cached_graphs`` are kept; the least recently used goes. Graphs and decisions are one immutable thing,
    swapped whole, so that choosing takes no lock.
    """

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
        self.server = Server(eager_runner, options or CUDAGraphOptions(), self.cache)
        self._graphs = RegisteredGraphs({})
        self._numbers = count()
        self._lock = make_lock()

    @property
    def graphs(self) -> Mapping[Slot, Registered]:
        """All graphs, by key and mode."""
        return self._graphs.graphs

    def wrap(self, key: DispatchKey, mode: DispatchMode, graph: Any, entry: CUDAGraphEntry) -> Registered:
        """A graph of somebody else, ready for ``publish``."""
        route = Route(
            (key, mode, next(self._numbers)),
            SizeTable.of_one(entry.size, entry.mode, entry.descriptor, pads=entry.inputs.has_rows),
            entry=entry,
        )
        return Registered(self, key, mode, graph, entry, route)

    def capture(self, key: DispatchKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Registered:
        """Capture the runner on these example arguments; ``publish`` serves the graph, ``drop`` releases it."""
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
            with self.server.lock:
                self.server.drop(route)
            self.drop()  # a capture makes room before it can fail
            raise
        assert entry is not None
        return Registered(self, key, DispatchMode.CUDAGRAPH, entry, entry, route)

    def publish(self, *new: Registered, without: Collection[Registered] = ()) -> Collection[Registered]:
        """Serve keys by ``new`` graphs from now on, in the place of older ones, and no longer by those of ``without``.

        Those that were released meanwhile, or had to go for others, leave as well. The caller gives what has to go to
        ``let_go``, with no lock held that a runner could want: see Note [locks of a worker].
        """
        with self._lock:
            kept = {slot: one for slot, one in self.graphs.items() if one not in without and not one.entry.is_released}
            kept |= {found.slot: found for found in new if not found.entry.is_released}
            oldest = sorted(set(kept.values()).difference(new), key=lambda found: found.entry.last_used)
            for found in oldest[: max(len(kept) - self.cache.max_graphs, 0)]:
                del kept[found.slot]
            known = {*self.graphs.values(), *new, *without}
            self._graphs = RegisteredGraphs(kept)
            return known.difference(kept.values())

    def let_go(self, leaving: Collection[Registered]) -> None:
        """Serve no call by these graphs any more, and release those that were captured here; waits for calls in
        flight."""
        with self.server.lock:
            for found in leaving:
                self.server.drop(found.route)

    def drop(self, *dropped: Registered) -> None:
        """Forget these graphs, not others that have taken their places; release those that were captured here."""
        self.let_go(self.publish(without=dropped))

    def clear(self) -> None:
        """Forget all graphs."""
        self.drop(*self.graphs.values())

    def choose(
        self, key: DispatchKey, policy: DispatchPolicy, modes: frozenset[DispatchMode]
    ) -> tuple[Registered | None, Decision]:
        """The graph that shall serve a key in one of ``modes`` and its decision, or None and why eager does. Takes no
        lock, unless a graph's owner has released it."""
        try:
            found, offered, eager = self._graphs.candidates[key, modes]
        except TypeError:
            check_key(key)
            raise
        if not found:
            return None, eager
        if not policy.should_use_graph(key, True):
            return None, Decision.eager(Reason.POLICY, key.num_tokens)
        mode = policy.select_mode(key, offered) if DispatchMode.HYBRID in modes else offered[0]
        if mode not in found:
            return None, Decision.eager(Reason.POLICY, key.num_tokens)
        chosen = found[mode]
        if chosen[0].entry.is_released:  # by its owner
            self.drop(chosen[0])
            return self.choose(key, policy, modes)
        return chosen


def check_key(key: Any) -> None:
    """Raise ``ConfigError`` unless ``key`` is the key of a batch."""
    if not isinstance(key, DispatchKey) or type(key.num_tokens) is not int or key.num_tokens < 1:
        raise ConfigError(
            f"key must be a DispatchKey with num_tokens >= 1, got {shown(key)}; create_dispatch_key() makes one"
        )
